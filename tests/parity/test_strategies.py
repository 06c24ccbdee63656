"""Every strategy trains as one device does, and sends what its terms say, to the byte.

One program in float64 is held to all of it: loss, every raw gradient and three SGD steps; arrays
and bytes of each kind of collective along each axis; and what XLA says while it compiles.
"""

import functools

import jax
import pytest

from partitioning import rules
from partitioning.parallel import vocabulary
from runtime import collectives
from tests.helpers.jobs import STRATEGIES as FILES
from tests.helpers.jobs import make_job
from tests.parity.budgets import (
  INVOLUNTARY,
  LONG,
  MEETING,
  STRATEGIES,
  assert_within_budget,
  trained,
)
from tests.parity.comparison import (
  FEATURES,
  MESHES,
  SEQUENCE_PARALLEL,
  Run,
  assert_equal,
  reference,
  train,
)
from training.setup import Job

# Groups of devices that meet take steps of their own: tests/parity/test_budgets.py.
CASES = [
  pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in STRATEGIES if x != MEETING
]


@functools.cache
def on_one_device(**changed: float) -> Run:
  """Returns what one device gives."""
  return train("lm", "float64", changed) if changed else reference("lm", "float64")


@pytest.mark.parametrize("strategy", CASES)
def test_trains_as_one_device_does_and_sends_what_its_terms_say(strategy):
  ours, step = trained(strategy)
  assert_within_budget(step, 8)
  assert INVOLUNTARY not in step.said
  momentum = {"optimizer.momentum": 0.9} if "ZeRO-1" in strategy else {}
  assert_equal(ours, on_one_device(**momentum), "float64")


@pytest.mark.parametrize("strategy", CASES)
def test_every_axis_changes_a_shard_and_a_collective(strategy):
  ours, _ = trained(strategy)
  assert_each_axis_acts(ours)
  # Key/value heads that stay whole are summed in groups of N/K: halves of the tensor axis.
  kept_whole = any(p.notes for p in ours.job.placements["parameters"].values())
  found = collectives.collectives(ours.trained.text, ours.job.mesh)
  assert all(c.whole for c in found) or kept_whole
  assert kept_whole == (strategy == "tp8")


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param(x, marks=[pytest.mark.long] * (x not in ("data8", "fsdp8", "data2_fsdp2_tensor2")))
    for x in MESHES
  ],
)
def test_a_network_without_attention_trains_as_on_one_device(mesh):
  ours = train("mlp", "float64", MESHES[mesh])
  assert_equal(ours, reference("mlp", "float64"), "float64")
  assert_each_axis_acts(ours)


def test_a_network_trains_as_on_one_device_in_float32():
  ours = train("mlp", "float32", MESHES["tensor8"])
  assert_equal(ours, reference("mlp", "float32"), "float32")


def assert_each_axis_acts(run: Run) -> None:
  """Asserts that each axis larger than 1 cuts a shard, and that a collective is along it."""
  found = collectives.collectives(run.trained.text, run.job.mesh)
  for axis, size in run.job.devices.sizes.items():
    if size > 1:
      assert any(axis in c.axes for c in found), f"no collective over {axis}"
      assert shards(run.job, {}) != shards(run.job, {axis: 1}), f"no shard is cut by {axis}"


def shards(job: Job, changed: dict[str, int]) -> dict[str, tuple[int, ...]]:
  """Returns name -> shard shape of state and batch, with some axes' sizes changed."""
  sizes = {**job.devices.sizes, **changed}
  return {
    name: rules.shard_shape(p.shape, p.spec, sizes)
    for section in job.placements.values()
    for name, p in section.items()
  }


def test_one_device_needs_no_collective():
  ours = on_one_device()
  assert collectives.collectives(ours.trained.text, ours.job.mesh) == []


@pytest.mark.parametrize("file", FILES)
def test_the_shipped_strategies_are_among_the_meshes(file):
  sizes = make_job(file, "mlp").devices.sizes
  larger = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1}
  assert larger in [*MESHES.values(), {}]


def test_zero_1_splits_the_optimizers_state_alone():
  job = trained("dp8, ZeRO-1")[0].job
  sizes, sections = job.devices.sizes, job.placements
  [name] = [name for name in sections["optimizer"] if name.endswith("trace/layers/mlp/up/kernel")]
  kernel, state = sections["parameters"]["layers/mlp/up/kernel"], sections["optimizer"][name]
  assert rules.shard_shape(kernel.shape, kernel.spec, sizes) == (2, 40, 56)
  assert rules.shard_shape(state.shape, state.spec, sizes) == (2, 5, 56)


# ------------------------------ what changes how a step is computed ------------------------------


def test_what_cpus_do_between_processes_and_a_tables_gradient_by_parts(monkeypatch):
  """All-to-alls in place of reduce-scatters; and sums of a quarter of the rows at a time."""
  asked = []
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(vocabulary, "_parts", lambda *sizes: asked.append(sizes) or 4)
  ours = train("lm", "float64", {**MESHES["fsdp4_tensor2"], **SEQUENCE_PARALLEL})
  assert "all-to-all" in ours.trained.text
  assert "reduce-scatter" not in ours.trained.text
  assert {rows for rows, _ in asked} == {36}  # of a device: tensor splits 72
  assert_equal(ours, reference("lm", "float64"), "float64")


def test_tied_embeddings_documents_rematerialization_accumulation_and_chunks():
  # Microbatches of unequal weight: a mean of means would differ.
  counts = {"training.gradient_accumulation_steps": 4, "training.loss_chunks": 2}
  keys = {**FEATURES, **MESHES["data2_fsdp2_tensor2"], **counts, **SEQUENCE_PARALLEL}
  plain, featured = reference("lm", "float64"), reference("lm", "float64", featured=True)
  assert_equal(train("lm", "float64", keys), featured, "float64")
  assert abs(plain.trained.losses[0] - featured.trained.losses[0]) > 1e-3
  assert "unembed/kernel" not in featured.trained.gradients


def test_a_residual_that_is_split_over_its_width_too_and_a_loss_in_chunks():
  # Each product of a region then has partial sums over the axis of the width.
  tables = {"model": ("context",), "sequence": (), "residual_sequence": ()}
  keys = {
    **{"mesh.data": 2, "mesh.context": 2, "mesh.tensor": 2, **SEQUENCE_PARALLEL},
    **{f"partitioning.activations.{name}": axes for name, axes in tables.items()},
    "training.loss_chunks": 3,
  }
  assert_equal(train("lm", "float64", keys), reference("lm", "float64"), "float64")
