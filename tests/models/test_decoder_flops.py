"""The formula of a step's operations beside those of the traced step; any may be frozen."""

import math

import pytest

from models import model_spec
from planning import traced_step
from planning.step_facts import of_job
from tests.helpers.jobs import make_job

SMALL = {"data.global_batch_size": 2, "data.sequence_length": 10}
FROZEN = {
  "adapters of some layers, and the logits": {
    "lora.rank": 3,
    "lora.targets": ("query", "key", "down"),
    "training.trainable": ("unembed/*",),
  },
  "what follows the layers": {"training.trainable": ("final_norm/*",)},
  "tied": {"training.trainable": ("layers/mlp/up/*",), "model.tied_embeddings": True},
}


@pytest.mark.parametrize("keys", FROZEN.values(), ids=FROZEN)
def test_as_the_traced_step(keys):
  job = make_job("single", "lm", **SMALL, **keys)
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))
  wanted = model_spec(job.config).train_flops_per_example() * job.config.data.global_batch_size
  # Matmuls save their inputs alone: x A is computed again for the gradient of B.
  again = [p for name, p in job.placements["parameters"].items() if name.endswith("lora_a")]
  wanted += 2 * 20 * sum(math.prod(p.shape) for p in again)
  assert found == pytest.approx(wanted, rel=0.01)


def test_experts_are_counted_by_the_rows_of_their_buffer():
  """A trace cannot say which tiles are used: each expert may have one that is not full."""
  keys = {"model.experts": 4, "model.expert_feedforward_size": 24, "model.dense_layers": 1}
  job = make_job("single", "lm", **SMALL, **keys)
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))
  wanted = model_spec(job.config).train_flops_per_example() * job.config.data.global_batch_size
  each = 2 * 40 * 24  # of a row in one matmul
  rows, buffer = 20 * 2, 20 * 2 + 4 * 8
  # Three matmuls forward, again in the backward pass, and six of the gradients; the router again.
  again = 2 * 20 * 40 * 4
  assert found == pytest.approx(wanted + each * (12 * buffer - 9 * rows) + again, rel=1e-6)


@pytest.mark.parametrize("mesh", [{"mesh.expert": 2}, {"mesh.expert": 2, "mesh.tensor": 2}])
def test_a_device_has_its_share_of_the_experts_rows(mesh):
  keys = {"model.experts": 4, "data.global_batch_size": 16, "data.sequence_length": 16}
  flops = []
  for more in ({}, mesh):
    job = make_job("single", "lm", **keys, **more)
    found = [
      (work.flops * runs, job.mesh.size) for work, runs, _ in traced_step.operations(of_job(job))
    ]
    flops.append(sum(one * devices for one, devices in found))
  assert flops[1] == pytest.approx(flops[0], rel=0.1)  # tiles that are not full
