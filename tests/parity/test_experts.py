"""Mixtures of experts on meshes beside one device, in float64.

The smallest margin between a chosen expert and one that is not is asserted: below it, two sums in
another order might choose differently, and the comparison would say nothing.
"""

import pytest

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
MESHES = {
  "expert8": {"mesh.expert": 8},
  "data2_expert4": {"mesh.data": 2, "mesh.expert": 4},
  "fsdp2_expert4": {"mesh.fsdp": 2, "mesh.expert": 4},
  "expert2_tensor4": {"mesh.expert": 2, "mesh.tensor": 4},
  "expert4_context2": {"mesh.expert": 4, "mesh.context": 2},
  "fsdp2_expert2_tensor2": {
    "mesh.fsdp": 2,
    "mesh.expert": 2,
    "mesh.tensor": 2,
    "partitioning.sequence_parallel": True,
  },
  "gathered": {"mesh.fsdp": 2, "mesh.expert": 4, "model.expert_exchange": "gathered"},
}


@pytest.fixture(scope="module")
def wanted():
  return train("lm", "float64", EXPERTS)


@pytest.mark.parametrize("name", MESHES)
def test_training_on_a_mesh_is_that_on_one_device(wanted, name):
  assert_equal(train("lm", "float64", {**EXPERTS, **MESHES[name]}), wanted, "float64")
