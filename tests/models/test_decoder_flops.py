"""The formula of a step's operations beside those of the traced step; any may be frozen."""

import math

import pytest

from models.transformer import train_flops_per_example
from planning import traced_cost
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
  found = sum(work.flops * runs for work, runs, _ in traced_cost.operations(job))
  wanted = train_flops_per_example(job.config) * job.config.data.global_batch_size
  # Matmuls save their inputs alone: x A is computed again for the gradient of B.
  again = [p for name, p in job.placements["parameters"].items() if name.endswith("lora_a")]
  wanted += 2 * 20 * sum(math.prod(p.shape) for p in again)
  assert found == pytest.approx(wanted, rel=0.01)
