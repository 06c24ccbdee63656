"""The vision transformer on meshes: it trains as on one device, and sends what theory says."""

import functools
import math
from collections import defaultdict

import pytest

from planning import analytic
from tests.helpers.jobs import make_job
from tests.parity.budgets import compile_step
from tests.parity.comparison import (
  COLLECTIVE_MATMUL,
  MESHES,
  SEQUENCE_PARALLEL,
  assert_equal,
  reference,
  train,
)
from tests.parity.theory import norm

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

STRATEGIES = {
  "dp8": ("dp8", {}),
  "fsdp8": ("fsdp8", {}),
  "tp8": ("tp8", {}),
  "dp2_fsdp2_tp2": ("dp2_fsdp2_tp2", {}),
  "dp2_fsdp2_tp2, sequence-parallel": ("dp2_fsdp2_tp2", SEQUENCE_PARALLEL),
}
CASES = [pytest.param(x, marks=[pytest.mark.long] * ("sequence" not in x)) for x in STRATEGIES]


@functools.cache
def job_of(strategy):
  """Returns the small job of one of STRATEGIES."""
  file, changed = STRATEGIES[strategy]
  return make_job(file, "vit", **changed)


def theory(job):
  """Returns (kind, axes) -> (arrays, bytes) of one step, on data, fsdp and tensor.

  Kernels of the layers are gathered over fsdp in both passes, everything else with a width once.
  Their gradients are scattered. Others, which constraints alone shard, are all-reduced.
  """
  model, sizes = job.config.model, job.devices.sizes
  d, f, t = (sizes[axis] for axis in ("data", "fsdp", "tensor"))
  split = job.config.partitioning.sequence_parallel and t > 1
  L, D, F, O = model.layers, model.model_size, model.feedforward_size, model.output_size
  X, T = model.patch_size**2 * model.channels, (model.image_size // model.patch_size) ** 2
  rows = job.config.data.global_batch_size // (d * f)
  residual = rows * T * D
  kernels = 6 * L, L * (4 * D * D + 2 * D * F) // t
  vectors = 2 * (2 * L + 1) + 2 * L + 1, (2 * (2 * L + 1) + 2 * L + 1) * D  # of D
  biases = 4 * L + 1, L * (3 * D + F) // t + O  # of queries, keys, values, up; of the head
  gathered = (2 * kernels[0] + vectors[0] + 3, 2 * kernels[1] + vectors[1] + (X + T + O) * D)
  own = T // t if split else T  # of the table of positions, whose gradient has its sequence
  reduced = vectors[0] + 3 + biases[0], vectors[1] + (X + own + O) * D + biases[1]
  parts = [
    ("all-gather", ("fsdp",), *gathered),
    ("reduce-scatter", ("fsdp",), *kernels),
    ("all-reduce", ("data",), kernels[0], kernels[1] // f),
    ("all-reduce", ("data", "fsdp"), *reduced),
    ("all-reduce", ("data", "fsdp"), 2, 2),  # the sums of losses and weights
  ]
  if f == 1:  # kernels are reduced as they are
    parts = [*parts[3:], ("all-reduce", ("data",), *kernels)]
  if split:
    parts += [
      ("reduce-scatter", ("tensor",), 4 * L, 4 * L * residual),
      ("all-gather", ("tensor",), 6 * L + 1, 6 * L * residual + T * D),
      # The mean over the patches, and gradients to which each part of them contributes.
      ("all-reduce", ("tensor",), 1 + vectors[0] + 1, rows * D + vectors[1] + X * D),
    ]
  else:
    parts.append(("all-reduce", ("tensor",), 4 * L, 4 * L * residual))
  parts += [("all-reduce", axes, count, count) for axes, count in norm(job).items()]
  found = defaultdict(lambda: (0, 0))
  for kind, axes, arrays, elements in parts:
    if axes := tuple(axis for axis in axes if sizes[axis] > 1):
      before = found[kind, axes]
      found[kind, axes] = before[0] + arrays, before[1] + 4 * elements
  return dict(found)


@pytest.mark.parametrize("strategy", CASES)
def test_a_step_sends_what_theory_says(strategy):
  job = job_of(strategy)
  assert compile_step(job).sent() == theory(job)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_says_the_same_but_for_small_kernels(strategy):
  job, found = job_of(strategy), defaultdict(float)
  for term in analytic.terms(job):
    found[term.kind, term.axes] += term.runs * term.elements * term.itemsize
  sent = {key: size for key, (_, size) in theory(job).items()}
  # A plan has these gradients scattered as those of the layers' kernels.
  small = ("patches/kernel", "positions/table", "head/kernel")
  if job.devices.sizes["fsdp"] > 1:
    parameters = job.placements["parameters"]
    sent["reduce-scatter", ("fsdp",)] += sum(4 * math.prod(parameters[x].shape) for x in small)
  for key in (
    *(("all-gather", (axis,)) for axis in ("fsdp", "tensor")),
    *(("reduce-scatter", (axis,)) for axis in ("fsdp", "tensor")),
    *([("all-reduce", ("tensor",))] if "sequence" not in strategy else []),
  ):
    # The positions' table and the norm of the gradients are not in the plan.
    assert found[key] == pytest.approx(sent.get(key, 0), abs=4 * 700), key


def test_a_plan_gathers_keys_and_values_of_whole_images():
  job = make_job("single", "vit", **VARIANTS["data2_context4"])
  [gathered] = [x for x in analytic.terms(job) if (x.kind, x.axes) == ("all-gather", ("context",))]
  assert gathered.runs * gathered.elements == 2 * 2 * 12 * 16 * 40  # of L, k and v, b T D
