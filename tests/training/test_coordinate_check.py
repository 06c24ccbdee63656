"""The coordinate check: with muP all is flat, without it or with a part of it broken it is not."""

import functools
import math

import numpy as np
import pytest

from configs import base
from configs.schema import finalize
from models import experts, mlp
from tests.helpers.jobs import SMALL, host_batch, make_job, place
from training import coordinate_check
from training.coordinate_check import points, shown_layers, slope, slopes

BASE, WIDE = 32, 256
CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}


def trained(width, base_width):
  keys = {f"model.{key}": width for key in ("model_size", "feedforward_size")}
  keys |= {**CONSTANT, "model.base_width": base_width, "data.global_batch_size": 32}
  return of_job(make_job("single", "mlp", **keys), steps=3)


def of_job(job, steps):
  batch = lambda step: place(job, host_batch(job, seed=step))  # noqa: E731
  return coordinate_check.train(job, batch, steps=steps, seeds=2)


at_base = functools.cache(trained)  # where muP, and what a test breaks of it, changes nothing


def not_flat(base_width=BASE):
  """Returns name -> slope of what is not flat."""
  both = [at_base(BASE, 0), trained(WIDE, base_width)]
  found = slopes(points(both), [BASE, WIDE])
  assert [one.point.name for one in found[::2]] == ["layer_1", "layer_2", "layer_3", "outputs"]
  return {one.point.name: one.value for one in found if one.change and not one.flat}


def test_with_mup_all_is_flat():
  assert not_flat() == {}


def without_divisor(monkeypatch, kind):
  """Breaks muP: modules of a kind do not divide their products."""
  draw = kind.__init__

  def drawn(self, *arguments, **keywords):
    draw(self, *arguments, **keywords)
    self.divisor = 1.0

  monkeypatch.setattr(kind, "__init__", drawn)


def test_mup_without_its_divisor_is_not(monkeypatch):
  without_divisor(monkeypatch, mlp.Dense)
  found = not_flat()
  assert set(found) == {"outputs"}
  assert found["outputs"] > 0.5


def decoder(width, **keys):
  """Returns what a decoder of one layer records; its heads are of 8."""
  heads = {"model.heads": width // 8, "model.kv_heads": width // 16, "model.head_size": 8}
  sizes = {"model.model_size": width, "model.layers": 1, "data.sequence_length": 16}
  rate = {"data.global_batch_size": 8, "optimizer.learning_rate": 4e-3}
  return of_job(make_job("single", "lm", **heads, **sizes, **rate, **CONSTANT, **keys), steps=2)


@pytest.mark.long
@pytest.mark.parametrize(
  ("optimizer", "exponent"), [({}, 1.0), ({"optimizer.name": "muon"}, 0.5)], ids=["adamw", "muon"]
)
def test_a_decoder_is_flat_with_mup_and_its_layers_grow_without(optimizer, exponent):
  def of(width, base_width):
    keys = {"model.feedforward_size": 3 * width // 2, "model.base_width": base_width}
    return decoder(width, **keys, **optimizer)

  small = of(32, 0)
  for base_width in (32, 0):
    found = slopes(points([small, of(128, base_width)]), [32, 128])
    assert [one.point.name for one in found[::2]] == [
      *("embedding", "layer 1: attention", "layer 1: mlp", "layer 1: residual", "logits")
    ]
    if base_width:
      assert [one.point.name for one in found if not one.flat] == []
      continue
    values = {one.point.name: one.value for one in found if one.change and not one.flat}
    assert set(values) == {one.point.name for one in found} - {"embedding"}
    assert values["layer 1: residual"] == pytest.approx(exponent, abs=0.2)


EXPERTS = {"model.experts": 4, "training.router_z_loss": 0.01, "training.balance_loss": 0.01}


@pytest.mark.long
def test_a_decoder_of_experts_is_flat_with_mup_and_a_router_without_its_divisor_grows(monkeypatch):
  def found():
    return slopes(points([of(32), of(128)]), [32, 128])

  def of(width):
    sizes = {"model.expert_feedforward_size": 3 * width // 4, "model.base_width": 32}
    shared = {"model.shared_feedforward_size": width // 4}
    return decoder(width, **EXPERTS, **sizes, **shared)

  with_mup = found()
  assert "layer 1: router" in {one.point.name for one in with_mup}
  assert [one.point.name for one in with_mup if not one.flat] == []
  without_divisor(monkeypatch, experts.RouterLinear)
  assert "layer 1: router" in {one.point.name for one in found() if not one.flat}


# ---- The family of configs ----


def finalized(recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  return config, finalize.finalize(config, "cpu")


def test_widths_are_in_proportion_and_heads_stay_as_large():
  config, resolved = finalized(**{"optimizer.warmup_tokens": 9, "training.tokens": 10**6})
  wider = finalize.finalize(coordinate_check.of_width(config, resolved, 320), "cpu")
  sizes = ("model_size", "feedforward_size", "heads", "kv_heads", "head_size")
  assert [wider.model[key] for key in sizes] == [320, 960, 20, 10, 16]
  assert (wider.optimizer.schedule, wider.optimizer.warmup_steps) == ("constant", 0)
  assert config.model.model_size is None  # is left as it was


def test_the_widths_by_default():
  assert coordinate_check.widths(finalized()[1].model, ()) == [32, 64, 128, 256]
  _, few = finalized(**{"model.heads": 8, "model.kv_heads": 1})
  assert coordinate_check.widths(few.model, ()) == [128, 256]


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (("64", "x"), "--widths: 'x' is no whole number; such as --widths=64,128,256"),
    (("64", "-64"), "--widths: '-64' is no whole number"),
    (
      ("64", "72"),
      "--widths=64,72: 72 is not a multiple of 32, so that heads and other widths would not be "
      "whole numbers (model.model_size=128, model.feedforward_size=384, model.heads=8, "
      "model.kv_heads=4)",
    ),
    (("0", "64"), "0 is not a multiple of 32"),
    (("64", "64"), "--widths=64: at least two widths, multiples of 32"),
  ],
)
def test_widths_that_cannot_be_are_refused(given, said):
  with pytest.raises(ValueError, match="--widths") as error:
    coordinate_check.widths(finalized()[1].model, given)
  assert said in str(error.value)


def checked(config, steps, sizes):
  sections = config.model, config.lora, config.task
  coordinate_check.check(*sections, steps=steps, sizes=sizes)


def test_what_has_no_width_of_its_choice_is_refused():
  _, config = finalized()
  checked(config, 1, {})
  with pytest.raises(ValueError, match="--steps=0: at least 1"):
    checked(config, 0, {})
  with pytest.raises(ValueError, match=r"^mesh\.stage=2: .*; set mesh\.stage=1$"):
    checked(config, 1, {"data": 4, "stage": 2})
  _, adapted = finalized(**{"lora.rank": 2})
  with pytest.raises(ValueError, match=r"lora\.rank=2: a coordinate check trains a model from"):
    checked(adapted, 5, {})
  _, pairs = finalized("model=lm,data=preferences", **{"data.files": "x.jsonl"})
  with pytest.raises(ValueError, match="the task dpo: a coordinate check trains"):
    checked(pairs, 5, {})
  with config.unlocked():
    config.model.folder = "Qwen3-0.6B"
  with pytest.raises(ValueError, match=r"model\.folder=Qwen3-0\.6B: a trained model has the width"):
    checked(config, 5, {})


def test_a_model_that_records_nothing_is_refused(monkeypatch):
  monkeypatch.setattr("models.activations.record", lambda name, x: None)
  job = make_job("single", "mlp", **SMALL["mlp"])
  with pytest.raises(ValueError, match="'mlp': it records no activations; call"):
    coordinate_check.train(job, lambda step: host_batch(job), steps=1)


# ---- Slopes ----


def test_the_slope_is_the_exponent_of_the_width():
  at, seeds = np.array([10, 20, 40, 80]), np.array([1.0, 4.0])
  for exponent in (-0.5, 0.0, 1.0):
    values = 3 * at[:, None] ** exponent * seeds
    assert slope(values, at) == pytest.approx(exponent)
  assert slope(np.array([[1.0], [math.nan], [1.0], [1.0]]), at) == math.inf
  assert slope(np.zeros((4, 1)), at) == math.inf


def test_layers_are_shown_one_after_the_other_and_logits_may_fall():
  at = (10, 20)
  values = {"first": np.ones((2, 1, 2)), "layers/a": np.ones((2, 1, 2, 2))}
  values |= {"layers/b": np.ones((2, 1, 2, 2)), "last": np.ones((2, 1, 2))}
  wider = {name: x.copy() for name, x in values.items()}
  wider["layers/b"][1, :, -1, 1] = 2.0  # the change of the second layer
  wider["last"][1, :, -1] = 0.5
  wider["first"][1, :, -1] = 0.5
  both = [
    {name: (7 if name == "last" else width, x) for name, x in arrays.items()}
    for width, arrays in zip(at, (values, wider), strict=True)
  ]
  found = slopes(points(both), at)
  names = ["first", "layer 1: a", "layer 1: b", "layer 2: a", "layer 2: b", "last"]
  assert [one.point.name for one in found[::2]] == names
  wrong = {(one.point.name, one.change): one.value for one in found if not one.flat}
  assert wrong == {("first", True): pytest.approx(-1), ("layer 2: b", True): pytest.approx(1)}
  assert found[-1].value == pytest.approx(-1)  # of no width itself


def test_of_many_layers_some_are_shown():
  assert shown_layers(3) == [0, 1, 2]
  assert shown_layers(32) == [7, 15, 23, 31]
  assert len(set(shown_layers(5))) == 4
  assert shown_layers(5)[-1] == 4


def test_widths_of_experts_are_in_proportion_too():
  keys = {"model.experts": 4, "model.shared_feedforward_size": 96}
  config, resolved = finalized(**keys, **{"model.expert_feedforward_size": 64})
  wide = coordinate_check.of_width(config, resolved, 2 * resolved.model.model_size).model
  assert (wide.expert_feedforward_size, wide.shared_feedforward_size) == (128, 192)
  assert wide.experts == 4
  with pytest.raises(
    ValueError, match=r"not a multiple of 64, .* model.expert_feedforward_size=66"
  ):
    coordinate_check.widths(
      finalized(**keys, **{"model.expert_feedforward_size": 66})[1].model, ["96"]
    )
