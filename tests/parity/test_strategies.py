"""Every product of axes trains as one device does: loss, every raw gradient, three SGD steps."""

import functools

import pytest

from partitioning import rules
from runtime import collectives
from tests.helpers.jobs import STRATEGIES, make_job
from tests.parity.comparison import (
  MESHES,
  Run,
  assert_equal,
  reference,
  train,
)
from training.setup import Job


@functools.cache
def trained(mesh: str, recipe: str, dtype: str) -> Run:
  """Trains on a mesh."""
  return train(recipe, dtype, MESHES[mesh])


# Each axis, and axes together; the other pairs are of the same parts. In float64, where only a bug
# can differ; the matrix has all meshes in float32 too.
OFTEN = ("data8", "fsdp8", "tensor8", "fsdp4_tensor2", "data2_fsdp2_tensor2")
CASES = [pytest.param(x, marks=[pytest.mark.long] * (x not in OFTEN)) for x in MESHES]


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
@pytest.mark.parametrize("mesh", CASES)
def test_trains_as_one_device_does(mesh, recipe):
  assert_equal(trained(mesh, recipe, "float64"), reference(recipe, "float64"), "float64")


def test_trains_as_one_device_does_in_float32():
  assert_equal(trained("tensor8", "mlp", "float32"), reference("mlp", "float32"), "float32")


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
@pytest.mark.parametrize("mesh", CASES)
def test_every_axis_changes_a_shard_and_a_collective(mesh, recipe):
  ours = trained(mesh, recipe, "float64")
  job = ours.job
  found = collectives.collectives(ours.trained.text, job.mesh)
  for axis, size in job.devices.sizes.items():
    if size > 1:
      assert any(axis in c.axes for c in found), f"no collective over {axis}"
      assert shards(job, {}) != shards(job, {axis: 1}), f"no shard is cut by {axis}"
  # Key/value heads that stay whole are summed in groups of N/K: halves of the tensor axis.
  kept_whole = any(p.notes for p in job.placements["parameters"].values())
  assert all(c.whole for c in found) or kept_whole
  assert kept_whole == (mesh == "tensor8" and recipe == "lm")


def test_one_device_needs_no_collective():
  ours = reference("lm", "float64")
  assert collectives.collectives(ours.trained.text, ours.job.mesh) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_shipped_strategies_are_among_the_meshes(strategy):
  sizes = make_job(strategy, "mlp").devices.sizes
  larger = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1}
  assert larger in [*MESHES.values(), {}]


def shards(job: Job, changed: dict[str, int]) -> dict[str, tuple[int, ...]]:
  """Returns name -> shard shape of state and batch, with some axes' sizes changed."""
  sizes = {**job.devices.sizes, **changed}
  return {
    name: rules.shard_shape(p.shape, p.spec, sizes)
    for section in job.placements.values()
    for name, p in section.items()
  }
