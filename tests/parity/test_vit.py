"""The vision transformer on meshes: it trains as on one device, and sends what formulas say."""

import pytest

from planning import terms
from tests.helpers.jobs import make_job
from tests.parity.budgets import VIT_STRATEGIES, budget, compile_step, of_sources, vit_job
from tests.parity.comparison import (
  COLLECTIVE_MATMUL,
  MESHES,
  SEQUENCE_PARALLEL,
  assert_equal,
  reference,
  train,
)

# The sequence is split as well; between blocks also over tensor.
CONTEXT = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}
VARIANTS = {
  "data4_tensor2": MESHES["data4_tensor2"],
  "tensor8": MESHES["tensor8"],
  "fsdp2_context2_tensor2, sequence-parallel": {**CONTEXT, **SEQUENCE_PARALLEL},
  "data2_context4": {"mesh.data": 2, "mesh.context": 4},
  "fsdp2_tensor4, collective matmuls": {**MESHES["fsdp2_tensor4"], **COLLECTIVE_MATMUL},
  "fsdp8, two microbatches, kernels kept, unrolled": {
    **MESHES["fsdp8"],
    "training.gradient_accumulation_steps": 3,
    "partitioning.reshard_after_forward": False,
    "training.scan_unroll": 2,
  },
  "data2_fsdp2_tensor2, rematerialized": {
    **MESHES["data2_fsdp2_tensor2"],
    "training.rematerialization": "full",
  },
}
QUICK = ("fsdp2_context2_tensor2, sequence-parallel",)


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=[pytest.mark.long] * (x not in QUICK)) for x in VARIANTS]
)
def test_trains_as_one_device_does(name):
  assert_equal(train("vit", "float64", VARIANTS[name]), reference("vit", "float64"), "float64")


@pytest.mark.long
def test_dropout_is_the_same_on_every_mesh():
  dropout = {"model.dropout_rate": 0.3}
  alone = train("vit", "float64", dropout)
  assert_equal(train("vit", "float64", {**CONTEXT, **dropout}), alone, "float64")
  assert alone.trained.losses != reference("vit", "float64").trained.losses


# ------------------------------ what a step sends ------------------------------

CASES = [pytest.param(x, marks=[pytest.mark.long] * ("sequence" not in x)) for x in VIT_STRATEGIES]


@pytest.mark.parametrize("strategy", CASES)
def test_a_step_sends_what_its_terms_say(strategy):
  job = vit_job(strategy)
  assert compile_step(job).sent() == budget(job)


def test_a_plan_gathers_keys_and_values_of_whole_images():
  job = make_job("single", "vit", **VARIANTS["data2_context4"])
  sent = of_sources(job, terms.sequence_attention)
  assert sent["all-gather", ("context",)][1] == 4 * 2 * 2 * 12 * 16 * 40  # of L, k and v, b T D
