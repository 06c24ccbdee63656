"""models/__init__.py: a model that lacks a part of what is asked of it is refused."""

import types

import pytest

import models
from tests.helpers.jobs import make_job


def test_ours_have_all_of_it():
  for name in ("transformer", "mlp"):
    assert models.find(name) is models.MODELS[name]


def test_what_is_missing_is_listed(monkeypatch):

  class Half(models.ModelSpec):
    legend = parameters = property(dict)

  half = types.SimpleNamespace(SPEC=Half, build=object)
  monkeypatch.setitem(models.MODELS, "half", half)
  with pytest.raises(
    ValueError, match=r"lacks train_flops_per_example of its SPEC, loss_sums\(\) of wh"
  ):
    models.find("half")


def test_a_function_that_builds_something_else_is_refused_before_it_is_used(monkeypatch):
  whole = vars(models.MODELS["mlp"])
  other = types.SimpleNamespace(**{**whole, "build": lambda spec, rngs: types.SimpleNamespace()})
  monkeypatch.setitem(models.MODELS, "mlp", other)
  with pytest.raises(ValueError, match=r"model\.name='mlp'.* lacks loss_sums\(\) of what build"):
    make_job("dp8", "mlp")
