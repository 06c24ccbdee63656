"""Parameters that a pipeline gathers once per step: the same numbers, and how often they go."""

import functools
import math

import jax.numpy as jnp
import pytest

from partitioning import rules
from reports import layout_text
from runtime import collectives
from tests.helpers.jobs import make_job
from tests.parity.comparison import FEATURES, assert_equal, train
from training import microbatches

MESH = {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "model.layers": 4}


@functools.cache
def trained(**keys):
  return train("lm", "float64", {"model.layers": 4, **FEATURES, **keys})


def arrays(run, kind):
  """Returns how many arrays a step sends over fsdp by such collectives."""
  found = collectives.collectives(run.trained.text, run.job.mesh)
  return sum(c.count * c.arrays for c in found if c.kind == kind and c.axes == ("fsdp",))


def p_bytes(job, one):
  """Returns the bytes of a parameter on a device, after it is gathered over fsdp."""
  shape = rules.shard_shape(one.shape, one.spec, {**job.devices.sizes, "fsdp": 1})
  return 8 * math.prod(shape)


def of_fsdp(run):
  """Returns the parameters that fsdp splits."""
  return [p for p in run.job.placements["parameters"].values() if "fsdp" in str(p.spec)]


def test_once_per_step():
  once = trained(**MESH)
  assert_equal(once, trained(), "float64")
  sharded = of_fsdp(once)
  for kind in ("all-gather", "reduce-scatter"):
    assert arrays(once, kind) == len(sharded)
  # What tensor and stage split is not copied for it.
  found = collectives.collectives(once.trained.text, once.job.mesh)
  assert not [c for c in found if c.kind == "all-gather" and "stage" in c.axes]
  both = [c for c in found if c.axes == ("fsdp",) and c.kind in ("all-gather", "reduce-scatter")]
  whole = sum(p_bytes(once.job, p) for p in sharded)
  assert sum(c.count * c.bytes for c in both) == 2 * whole


def test_kernels_alone_are_gathered_in_the_compute_dtype():
  job = make_job("single", "lm", **MESH, **{"training.compute_dtype": "bfloat16"})
  gathered = job.program.gathered
  assert {*gathered.dtypes.values()} == {jnp.dtype("bfloat16")}
  assert "layers/mlp/up/kernel" in gathered.dtypes
  # Sums over tokens and statistics are in float32.
  assert not {"embed/table", "final_norm/scale"} & {*gathered.dtypes}


def test_auto_follows_the_memory():
  job = make_job("single", "lm", **MESH)
  given = job.program.spec, job.devices.sizes, job.placements["parameters"], job.program.trained
  needed = microbatches.bytes_needed(*given)
  # Complete but for stage and tensor, in float32, each with its gradient.
  total = 0
  for one in job.placements["parameters"].values():
    parts = math.prod(2 if axis in str(one.spec) else 1 for axis in ("stage", "tensor"))
    total += 8 * math.prod(one.shape) // parts
  assert needed == total
  assert microbatches.gathered_once(*given, 4 * needed) is not None
  assert microbatches.gathered_once(*given, 4 * needed - 1) is None
  assert microbatches.gathered_once(*given, None) is None


def test_it_says_how_gradients_are_reduced():
  job, rows = make_job("single", "lm", **MESH), "gradients of 8 microbatches: reduced "
  assert job.config.training.microbatches == 8
  assert (
    layout_text.reduction_text(job.program, job.devices.sizes)
    == f"{rows}once per step over data and fsdp"
  )
  keys = {**MESH, "training.gradient_reduction": "microbatch"}
  job = make_job("single", "lm", **keys)
  assert job.program.gathered is None
  assert (
    layout_text.reduction_text(job.program, job.devices.sizes)
    == f"{rows}after each microbatch over all axes"
  )
  with pytest.raises(ValueError, match="gradient_reduction='microbatch'"):
    make_job("single", "lm", **keys, **{"training.pipeline_gather": "step"})


def test_what_it_cannot_do_is_refused_or_left_to_each_tick():
  overrides = (("layers/mlp/up/kernel", ("stage", None, ("fsdp", "tensor"))),)
  keys = {**MESH, "partitioning.overrides": overrides}
  assert make_job("single", "lm", **keys).program.gathered is None
  with pytest.raises(ValueError, match=r"layers/mlp/up/kernel: a dim is split over fsdp and ten"):
    make_job("single", "lm", **keys, **{"training.pipeline_gather": "step"})
