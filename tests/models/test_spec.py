"""Specs, one frozen value that a config is resolved to; a model that lacks a part is refused."""

import dataclasses
import math
import types

import pytest

import models
from models import mlp, model_spec
from models.spec import in_8_bits, stacks_of
from partitioning.rules import Dim
from tests.helpers.jobs import make_job

YARN = ("yarn", {"factor": 4.0, "original_length": 8, "beta_fast": 3.0})


def spec_of(**keys):
  return model_spec(make_job("single", "lm", **keys).config)


def test_a_spec_is_a_frozen_value_that_modules_can_keep():
  keys = {"model.rotary_scaling": YARN, "model.layer_types": ("full", "full_unrotated")}
  ours, same, other = spec_of(**keys), spec_of(**keys), spec_of(**keys, **{"model.layers": 3})
  assert (ours, hash(ours)) == (same, hash(same))
  assert ours != other
  with pytest.raises(dataclasses.FrozenInstanceError):
    ours.layers = 3


def test_letters_of_stacked_layers_are_told_by_the_names_of_their_dims():
  theirs = {"L": Dim("left", 3), "y": Dim("right", 5), "K": Dim("layers", 2)}
  assert stacks_of(theirs) == ("K",)
  assert stacks_of(model_spec(make_job("single", "lm").config).legend) == (*"LZyzfY",)


def test_what_follows_from_several_keys():
  spec = spec_of(**{"lora.rank": 4, "lora.alpha": 6.0, "lora.rs": True, "lora.targets": ("up",)})
  assert spec.padded_vocabulary == 72
  assert spec.lora.scale == 6 / math.sqrt(4)
  assert spec.adapts("layers/mlp/up")
  assert not spec.adapts("layers/mlp/down")
  assert not spec_of().adapts("layers/mlp/up")
  assert spec.out_scale == 1 / math.sqrt(2 * 2)


def test_letters_sizes_and_fan_ins_of_kernels():
  spec = spec_of()
  assert spec.optional_letters("layers/mlp/up/bias") == ""
  # Name -> letters within the layer, shape, and the number of inputs.
  wanted = {
    "embed/table": ("VD", (72, 40), None),
    "layers/attention/key/kernel": ("DKH", (40, 4, 6), 40),
    "layers/attention/out/kernel": ("NHD", (8, 6, 40), 48),
    "layers/mlp/down/kernel": ("FD", (56, 40), 56),
    "unembed/kernel": ("DV", (40, 72), 40),
  }
  for name, (letters, shape, inputs) in wanted.items():
    assert (spec.letters_of(name), spec.sizes(letters)) == (letters, shape), name
    if inputs:
      assert spec.fan_in(letters) == inputs, name
      assert spec.deviation(letters) == pytest.approx(inputs**-0.5), name


def test_the_kernels_of_layers_are_multiplied_in_8_bits():
  names = ("layers/mlp/up/kernel", "dense_layers/mlp/up/kernel", "unembed/kernel")
  assert [in_8_bits(name, "int8") for name in names] == [True, True, False]
  assert not in_8_bits("layers/mlp/up/lora_a", "int8")
  assert not in_8_bits("layers/mlp/up/kernel", "compute")


# ------------------------------ contract ------------------------------


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
  whole = vars(mlp)
  other = types.SimpleNamespace(**{**whole, "build": lambda spec, rngs: types.SimpleNamespace()})
  monkeypatch.setitem(models.MODELS, "mlp", other)
  with pytest.raises(ValueError, match=r"model\.name='mlp'.* lacks loss_sums\(\) of what build"):
    make_job("dp8", "mlp")
