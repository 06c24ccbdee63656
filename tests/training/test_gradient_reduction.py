"""How often gradients of microbatches are reduced: the rule and its refusals."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec

from partitioning.rules import Placement
from reports import layout_text
from tests.helpers.jobs import make_job
from training.microbatches import reduced_once_over

MICROBATCHES = {"training.gradient_accumulation_steps": 2}
SPLIT = {"partitioning.parameters.feedforward": ("tensor", "data")}


def once(strategy, recipe="mlp", **overrides):
  """Returns the axis over which a small job's gradients are reduced once, or None."""
  return make_job(strategy, recipe, **overrides).program.reduce_once_over


def test_the_rule():
  assert once("dp8", **MICROBATCHES) == "data"
  assert once("dp8", **MICROBATCHES, **{"training.gradient_reduction": "step"}) == "data"
  assert once("dp8", **MICROBATCHES, **{"training.gradient_reduction": "microbatch"}) is None
  assert once("dp8") is None
  assert once("fsdp8", **MICROBATCHES, **{"training.gradient_reduction": "step"}) is None
  assert once("dp8", **MICROBATCHES, **SPLIT) is None


def test_a_split_parameter_refuses_it_by_name():
  with pytest.raises(ValueError, match=r"=step: layer_2/bias is sharded over data=8, .* set it to"):
    once("dp8", **MICROBATCHES, **SPLIT, **{"training.gradient_reduction": "step"})


def test_variables_and_other_layouts_refuse_it():
  spec = make_job("dp8", "mlp", **MICROBATCHES).program.spec
  placement = Placement("a", (8, 8), "float32", "", "rule", PartitionSpec(), ())
  arguments = {"data": 8}, {"a": placement}
  assert reduced_once_over(spec, *arguments, {}) == "data"
  assert reduced_once_over(spec, *arguments, {"seen": 0}) is None
  spec = dataclasses.replace(spec, gradient_reduction="step")
  with pytest.raises(ValueError, match=r"variables that each microbatch .* updates \(seen\)"):
    reduced_once_over(spec, *arguments, {"seen": 0})
  spec = dataclasses.replace(spec, activations={"batch": ("fsdp", "data")})
  with pytest.raises(ValueError, match="must split the batch first, and nothing else"):
    reduced_once_over(spec, *arguments, {})


def test_a_registered_model_says_that_it_can(monkeypatch):
  class Registered:
    READS = ()

  monkeypatch.setattr("training.microbatches.extensions.registered", lambda what, name: Registered)
  step = {"training.gradient_reduction": "step"}
  assert once("dp8", **MICROBATCHES) is None
  with pytest.raises(ValueError, match="mlp does not name it in its READS"):
    once("dp8", **MICROBATCHES, **step)
  monkeypatch.setattr(Registered, "READS", ("training.gradient_reduction",))
  assert once("dp8", **MICROBATCHES, **step) == "data"


def test_the_layout_says_which():
  reduced = "gradients of 2 microbatches: reduced"
  text = layout_text.job_text(make_job("dp8", "mlp", **MICROBATCHES), whole=False)
  assert f"{reduced} once per step over data, after each microbatch over the other axes" in text
  text = layout_text.job_text(make_job("fsdp8", "mlp", **MICROBATCHES), whole=False)
  assert f"{reduced} after each microbatch over all axes" in text
  assert reduced not in layout_text.job_text(make_job("dp8", "mlp"), whole=False)
