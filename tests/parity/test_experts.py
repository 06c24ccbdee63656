"""Mixtures of experts on meshes beside one device, in float64.

The smallest margin between a chosen expert and one that is not is asserted: below it, two sums in
another order might choose differently, and the comparison would say nothing.
"""

import jax.numpy as jnp
import pytest

from tests.helpers.jobs import first_state, host_batch, make_job
from tests.parity.choices import (
  InconclusiveError,
  assert_conclusive,
  first_choices,
  margins,
)
from tests.parity.comparison import assert_equal, train

EXPERTS = {
  "model.experts": 8,
  "model.experts_per_token": 3,
  "model.expert_feedforward_size": 24,
  "training.balance_loss": 0.02,
  "training.router_z_loss": 0.01,
  "model.layers": 3,
  "model.dense_layers": 1,
  "model.shared_feedforward_size": 16,
  "model.router_scores": "sigmoid",
  "model.router_correction": True,
  "training.router_bias_rate": 0.05,
  "model.router_scale": 1.5,
}
PATTERN = {
  **EXPERTS,
  "model.dense_layers": 0,
  "model.layers": 6,
  "model.sparse_every": 2,
  "model.mlp_only_layers": (5,),  # so that two layers, twice, are before two others
  "model.shared_feedforward_size": 0,
  "model.experts_per_token": 1,
  "model.router_normalized": False,
  "model.router_scales_inputs": True,
}
ONE_LAYER = {"model.experts": 8, "model.experts_per_token": 3, "model.layers": 1}
MESH = {"mesh.fsdp": 2, "mesh.expert": 4}
MESHES = {
  "expert2_context2_tensor2": {"mesh.expert": 2, "mesh.context": 2, "mesh.tensor": 2},
}
MORE_MESHES = {
  "fsdp2_expert2_tensor2, sequence-parallel": {
    "mesh.fsdp": 2,
    "mesh.expert": 2,
    "mesh.tensor": 2,
    "partitioning.sequence_parallel": True,
  },
  "data2_expert4, 2 microbatches": {
    "mesh.data": 2,
    "mesh.expert": 4,
    "training.gradient_accumulation_steps": 2,
  },
  "expert8": {"mesh.expert": 8},
  "fsdp2_expert4, ragged": {
    **MESH,
    "training.grouped_matmul": "ragged",
    "training.rematerialization": "full",
  },
  "gathered": {**MESH, "model.expert_exchange": "gathered"},
}


def padded(job, step):
  """Returns a batch in which some rows are padding, one of them the whole share of a device."""
  batch = host_batch(job, step)
  batch["weights"][[3, 8, 9]] = 0
  return batch


def observed(keys):
  """Returns training on one device, and the margins of its choices."""
  with margins() as found:
    run = train("lm", "float64", keys, padded)
  return run, found


@pytest.fixture(scope="module")
def wanted():
  run, found = observed(EXPERTS)
  assert len(found) >= 3 * 2  # of each step, both sparse layers
  assert_conclusive(found, "float64")
  return run


@pytest.mark.parametrize(
  "name", [*MESHES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_MESHES)]
)
def test_training_on_a_mesh_is_that_on_one_device(wanted, name):
  keys = {**EXPERTS, **(MESHES | MORE_MESHES)[name]}
  assert_equal(train("lm", "float64", keys, padded), wanted, "float64")


@pytest.mark.long
def test_a_pattern_of_sparse_layers_on_a_mesh():
  run, found = observed(PATTERN)
  assert_conclusive(found, "float64")
  assert_equal(train("lm", "float64", {**PATTERN, **MESH}, padded), run, "float64")


def test_choices_within_rounding_are_inconclusive():
  with pytest.raises(
    InconclusiveError, match=r"inconclusive: .* 6 choices .* 0.0e\+00, below 1e-11"
  ):
    assert_conclusive([0.25] * 5 + [0.0], "float64")
  with pytest.raises(AssertionError, match="no choice of experts was observed"):
    assert_conclusive([], "float64")


def test_a_router_of_zeros_is_inconclusive():
  job = make_job("single", "lm", **ONE_LAYER)
  _, drawn = first_choices(job, first_state(job).params)
  assert_conclusive([*drawn], "float32")
  params = first_state(job).params
  router = params["layers"]["experts"]["router"]
  router["kernel"] = jnp.zeros_like(router["kernel"])
  _, equal = first_choices(job, params)
  with pytest.raises(InconclusiveError):
    assert_conclusive([*equal], "float32")
