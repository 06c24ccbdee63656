"""How often a pipeline all-gathers the parameters that fsdp shards: once per step, or in each tick.

Once per step sends 1 / M of the bytes of M microbatches, and has the parameters of a stage and
their gradients complete on each device.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import MODELS
from models.losses import Batch, Sums
from partitioning.dims import spec_entries
from partitioning.dtypes import wide_dtype
from partitioning.parallel.gathered_parameters import GatheredOnce, Params
from partitioning.parallel.pipeline_schedule import GPIPE, STAGE
from partitioning.rules import Placement, named_leaves
from partitioning.shardings import shard_shape, size_text
from training.gradients import Gradients
from training.state import nested
from training.step_spec import StepSpec

AUTO, STEP, TICK = "auto", "step", "tick"
KEY = "training.pipeline_gather"
AXIS = "fsdp"
BATCH = ("data", AXIS)  # the axes that become manual
SHARE = 1 / 4  # of a device's memory that complete parameters and gradients may take by default


def gathered_once(
  spec: StepSpec,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  trained: frozenset[str],
  memory: float | None,
) -> GatheredOnce | None:
  """Returns what is gathered once per step; None where each tick gathers what it needs.

  Args:
    spec: of the step.
    sizes: mesh axis -> size.
    parameters: name -> Placement.
    trained: names of those with gradients.
    memory: bytes of a device; None: unknown.

  Raises:
    ValueError: `training.pipeline_gather=step`, and that is not possible.
  """
  asked = spec.pipeline_gather
  if asked == TICK or sizes.get(STAGE, 1) == 1 or sizes[AXIS] == 1:
    return None
  if why := _obstacle(spec, sizes, parameters):
    if asked == STEP:
      raise ValueError(f"{KEY}={STEP}: {why}; set it to {AUTO} or {TICK}")
    return None
  dtypes = _dtypes(spec, parameters)
  if asked == AUTO:
    needed = bytes_needed(spec, sizes, parameters, trained)
    if memory is None or needed > SHARE * memory:
      return None
  return GatheredOnce(BATCH, {name: p.spec for name, p in parameters.items()}, dtypes)


def gather_once(gradients: Gradients, gathered: GatheredOnce) -> Gradients:
  """Returns the gradients of parameters that are gathered first, reduced over all rows at last."""

  def with_sums(batch: Batch, learned: Params, frozen: Params, *others: Any) -> tuple[Params, Any]:
    (grads, sums), variables = gradients(batch, nested(learned), nested(frozen), *others)
    return named_leaves(grads), (sums, variables)

  def found(
    batch: Batch, learned: Any, frozen: Any, variables: Any, key: jax.Array | None
  ) -> tuple[tuple[Any, Sums], Any]:
    given = batch, named_leaves(learned), named_leaves(frozen), variables, key
    grads, (sums, variables) = gathered.sums(with_sums, *given)
    return (nested(grads), sums), variables

  return found


def bytes_needed(
  spec: StepSpec,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  trained: frozenset[str],
) -> int:
  """Returns the bytes per device of complete parameters of a stage and of their gradients."""
  dtypes, whole = _dtypes(spec, parameters), {**sizes, **dict.fromkeys(BATCH, 1)}
  total = 0
  for name, one in parameters.items():
    count = math.prod(shard_shape(one.shape, one.spec, whole))
    dtype = dtypes.get(name, wide_dtype(jnp.dtype(one.dtype)))
    total += count * np.dtype(dtype).itemsize
    if name in trained:
      total += count * wide_dtype(jnp.dtype(one.dtype)).itemsize
  return total


def text(
  spec: StepSpec,
  sizes: Mapping[str, int],
  parameters: Mapping[str, Placement],
  trained: frozenset[str],
  gathered: GatheredOnce | None,
) -> str:
  """Returns how a pipeline gathers its parameters; "" where there is nothing to gather."""
  if sizes.get(STAGE, 1) == 1 or sizes[AXIS] == 1:
    return ""
  needed = size_text(bytes_needed(spec, sizes, parameters, trained))
  if gathered is not None:
    return f"parameters of a stage: gathered over {AXIS} once per step, {needed} with gradients"
  return (
    f"parameters of a stage: gathered over {AXIS} in each tick; once per step they would take "
    f"{needed} with gradients ({KEY}={STEP})"
  )


def _dtypes(spec: StepSpec, parameters: Mapping[str, Placement]) -> dict[str, jnp.dtype]:
  """Returns the dtype of parameters that are cast before they are gathered, by name."""
  # GPipe adds up gradients in the dtype of the parameters.
  if spec.pipeline == GPIPE or spec.matmul_dtype != "compute":
    return {}
  cast = MODELS[spec.model].SPEC.in_compute_dtype
  return {name: jnp.dtype(spec.compute_dtype) for name in parameters if cast(name)}


def _obstacle(spec: StepSpec, sizes: Mapping[str, int], parameters: Mapping[str, Placement]) -> str:
  """Returns why parameters cannot be gathered once per step; "" if they can."""
  if spec.gradient_reduction == "microbatch":
    return "training.gradient_reduction='microbatch' reduces gradients in each tick"
  table = spec.activations
  if [name for name, axes in table.items() if {*axes} & {*BATCH}] != ["batch"]:
    return f"partitioning.activations: {' and '.join(BATCH)} must split the batch alone"
  if table["batch"][: len(BATCH)] != BATCH:
    return f"partitioning.activations.batch={table['batch']} must begin with {BATCH}"
  if spec.matmul_dtype == "float8":
    return (
      "training.matmul_dtype='float8' has one scale for the rows of all devices, which each would "
      "have to know"
    )
  for name, one in parameters.items():
    for axes in spec_entries(one.spec):
      if {*axes} & {*BATCH} and not {*axes} <= {*BATCH}:
        return f"{name}: a dim is split over {' and '.join(axes)}"
  return ""
