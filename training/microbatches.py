"""Steps of several microbatches: what gradients exchange once per step; pipelines of stages."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models import MODELS
from models.losses import Batch, Sums
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dtypes import wide_dtype
from partitioning.mesh_sizes import STAGE
from partitioning.parallel.batch_region import GatheredOnce, Params
from partitioning.parallel.pipeline import Pipeline
from partitioning.parallel.pipeline_schedule import GPIPE, INTERLEAVED, Schedule
from partitioning.rules import (
  Placement,
  named_leaves,
  nested,
  partition_spec,
  shard_shape,
  size_text,
  spec_axes,
  spec_entries,
)
from runtime import extensions
from training.gradients import Gradients, split_rows
from training.specs import StepSpec
from training.state import merged

Sizes = Mapping[str, int]  # mesh axis -> size
Placements = Mapping[str, Placement]  # of parameters, by name
_FLOAT8 = (
  "training.matmul_dtype='float8' has one scale for the rows of all devices, which each would have "
  "to know"
)


# ------------------------------ one reduction over data ------------------------------
# Parameters are replicated over `data`, so each device adds up complete gradients either way: a sum
# over its own rows takes no more memory than a reduced one, and is sent once. Over `fsdp` each
# microbatch's gradients are reduce-scattered; unreduced ones would have the size of all parameters.

REDUCTION, REDUCED = "training.gradient_reduction", "data"


def reduced_once_over(
  spec: StepSpec, sizes: Sizes, parameters: Placements, variables: Any
) -> str | None:
  """Returns the mesh axis over which gradients of microbatches are reduced once, or None.

  `variables` are those of the model.

  Raises:
    ValueError: `training.gradient_reduction=step`, and that is not possible.
  """
  asked = spec.gradient_reduction
  if asked == "microbatch" or sizes[REDUCED] == 1:
    return None
  why = reduction_obstacle(spec, sizes, parameters, variables)
  if why and asked == "step":
    raise ValueError(f"{REDUCTION}=step: {why}; set it to auto or microbatch")
  return None if why else REDUCED


def keep_apart(grads: Any, sums: Any) -> tuple[Any, Any]:
  """Returns a microbatch's gradients and sums, whose reductions the compiler leaves where they are.

  The compiler for TPUs (libtpu 0.0.42) moves reductions of what a loop adds up out of the loop:
  those over fsdp too, where the sums would need the memory of all parameters, and it fails
  (RET_CHECK in while_loop_all_reduce_code_motion.cc) where rows are split so.
  """
  return jax.lax.optimization_barrier((grads, sums))


def reduction_text(count: int, axis: str | None, *, gathered: bool = False) -> str:
  """Returns how the gradients of several microbatches are reduced.

  Args:
    count: of microbatches.
    axis: of `reduced_once_over`.
    gathered: whether a pipeline gathers its parameters once per step.
  """
  if gathered:
    return f"gradients of {count} microbatches: reduced once per step over data and fsdp"
  how = f"once per step over {axis}" if axis else "after each microbatch over all axes"
  more = ", after each microbatch over the other axes" if axis else ""
  return f"gradients of {count} microbatches: reduced {how}{more}"


def reduction_obstacle(spec: StepSpec, sizes: Sizes, parameters: Placements, variables: Any) -> str:
  """Returns why gradients cannot be reduced once per step; "" if they can."""
  model = extensions.registered("model", spec.model)
  if model is not None and REDUCTION not in getattr(model, "READS", ()):
    return (
      f"the model {spec.model} does not name it in its READS: its loss must be a sum over "
      f"rows, and what it draws for a row must follow from the row's number in the batch "
      f"(partitioning.constraints.batch_part)"
    )
  if variables:
    return (
      f"the model has variables that each microbatch of the global batch updates "
      f"({', '.join(sorted(variables))})"
    )
  if spec.matmul_dtype == "float8":
    return _FLOAT8
  for name, one in parameters.items():
    if REDUCED in spec_axes(one.spec):
      return (
        f"{name} is sharded over {REDUCED}={sizes[REDUCED]}, and a sum before the reduction has "
        f"its complete size"
      )
  table = spec.activations
  users = [name for name, axes in table.items() if REDUCED in axes]
  if users != ["batch"] or table["batch"][0] != REDUCED:
    return f"partitioning.activations: {REDUCED} must split the batch first, and nothing else"
  return ""


# ------------------------------ one gather over fsdp ------------------------------
# Of a pipeline: once per step sends 1 / M of the bytes of M microbatches, and has the parameters of
# a stage and their gradients complete on each device.

GATHER, GATHERED = "training.pipeline_gather", "fsdp"
BATCH = ("data", GATHERED)  # the axes that become manual
SHARE = 1 / 4  # of a device's memory that complete parameters and gradients may take by default


def gathered_once(
  spec: StepSpec,
  sizes: Sizes,
  parameters: Placements,
  trained: frozenset[str],
  memory: float | None,
) -> GatheredOnce | None:
  """Returns what is gathered once per step; None where each tick gathers what it needs.

  Args:
    spec: of the step.
    sizes: of the mesh.
    parameters: where they are.
    trained: names of those with gradients.
    memory: bytes of a device; None: unknown.

  Raises:
    ValueError: `training.pipeline_gather=step`, and that is not possible.
  """
  asked = spec.pipeline_gather
  if asked == "tick" or sizes.get(STAGE, 1) == 1 or sizes[GATHERED] == 1:
    return None
  if why := _gathering_obstacle(spec, parameters):
    if asked == "step":
      raise ValueError(f"{GATHER}=step: {why}; set it to auto or tick")
    return None
  dtypes = _dtypes(spec, parameters)
  if asked == "auto":
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
  spec: StepSpec, sizes: Sizes, parameters: Placements, trained: frozenset[str]
) -> int:
  """Returns the bytes per device of complete parameters of a stage and of their gradients."""
  dtypes, whole = _dtypes(spec, parameters), {**sizes, **dict.fromkeys(BATCH, 1)}
  total = 0
  for name, one in parameters.items():
    count = math.prod(shard_shape(one.shape, one.spec, whole))
    own = wide_dtype(jnp.dtype(one.dtype)) if name in trained else one.dtype
    total += count * np.dtype(dtypes.get(name, own)).itemsize
    if name in trained:
      total += count * own.itemsize
  return total


def gathering_text(
  spec: StepSpec,
  sizes: Sizes,
  parameters: Placements,
  trained: frozenset[str],
  gathered: GatheredOnce | None,
) -> str:
  """Returns how a pipeline gathers its parameters; "" where there is nothing to gather."""
  if sizes.get(STAGE, 1) == 1 or sizes[GATHERED] == 1:
    return ""
  needed = size_text(bytes_needed(spec, sizes, parameters, trained))
  if gathered is not None:
    return f"parameters of a stage: gathered over {GATHERED} once per step, {needed} with gradients"
  return (
    f"parameters of a stage: gathered over {GATHERED} in each tick; once per step they would take "
    f"{needed} with gradients ({GATHER}=step)"
  )


def _dtypes(spec: StepSpec, parameters: Placements) -> dict[str, jnp.dtype]:
  """Returns the dtype of parameters that are cast before they are gathered, by name."""
  # GPipe adds up gradients in the dtype of the parameters.
  if spec.pipeline == GPIPE or spec.matmul_dtype != "compute":
    return {}
  cast = MODELS[spec.model].SPEC.in_compute_dtype
  return {name: jnp.dtype(spec.compute_dtype) for name in parameters if cast(name)}


def _gathering_obstacle(spec: StepSpec, parameters: Placements) -> str:
  """Returns why parameters cannot be gathered once per step; "" if they can."""
  if spec.gradient_reduction == "microbatch":
    return "training.gradient_reduction='microbatch' reduces gradients in each tick"
  table = spec.activations
  if [name for name, axes in table.items() if {*axes} & {*BATCH}] != ["batch"]:
    return f"partitioning.activations: {' and '.join(BATCH)} must split the batch alone"
  if table["batch"][: len(BATCH)] != BATCH:
    return f"partitioning.activations.batch={table['batch']} must begin with {BATCH}"
  if spec.matmul_dtype == "float8":
    return _FLOAT8
  for name, one in parameters.items():
    for axes in spec_entries(one.spec):
      if {*axes} & {*BATCH} and not {*axes} <= {*BATCH}:
        return f"{name}: a dim is split over {' and '.join(axes)}"
  return ""


# ------------------------------ a pipeline ------------------------------


def schedule_of(spec: StepSpec, sizes: Sizes) -> Schedule | None:
  """Returns the schedule of a step's pipeline on a mesh of these sizes; None without stages."""
  if sizes.get(STAGE, 1) == 1:
    return None
  chunks = spec.pipeline_chunks if spec.pipeline == INTERLEAVED else 1
  return Schedule(spec.pipeline, sizes[STAGE], spec.microbatches, chunks)


@dataclasses.dataclass(frozen=True)
class Pipelined:
  """A model's loss, and its gradients, by a pipeline schedule; the `Network` of the pipeline.

  Attributes:
    spec: of the step.
    schedule: of `schedule_of`.
    build: makes the module of a nested dict of parameters.
    residual: letters of what goes from layer to layer.
    stacked: whether a parameter, by its name, has the layers as its first dim.
    specs: name -> the parameter's PartitionSpec; None: unknown.
    finish: applied to the sums of each microbatch before they are added up; linear.
  """

  spec: StepSpec
  schedule: Schedule
  build: Callable[[Any], Any]
  residual: str
  stacked: Callable[[str], bool]
  specs: Mapping[str, PartitionSpec] | None = None
  finish: Callable[[Sums], Sums] = lambda sums: sums

  def gradients(
    self, batch: Batch, learned: Any, frozen: Any, variables: Any, key: jax.Array | None
  ) -> tuple[tuple[Any, Sums], Any]:
    """Returns gradients of the loss, and the sums, as `Gradients` does.

    Args:
      batch: the schedule's microbatches divide its rows.
      learned: nested dict of the trained parameters, float32 or wider.
      frozen: nested dict of parameters without gradients.
      variables: {}: stages exchange none.
      key: draws the dropout.
    """
    inputs = self._inputs(merged(learned, frozen), batch, key)
    grads, sums, counts = self._pipeline().gradients(
      named_leaves(learned), named_leaves(frozen), inputs
    )
    counts = self._by_stack(merged(learned, frozen), counts)
    sums = {**sums, **counts, **self.finish(self._weight(batch, sums))}
    return (nested(grads), sums), variables

  def sums(self, params: Any, batch: Batch) -> Sums:
    """Returns the sums over the rows of a batch, without dropout."""
    inputs = self._inputs(params, batch, None)
    found, counts = self._pipeline().sums(named_leaves(params), inputs)
    return {**found, **self._by_stack(params, counts), **self._weight(batch, found)}

  def enter(self, params: Params, one: Any) -> jax.Array:
    """Returns what the first layer is given of a microbatch; see `pipeline.Network`."""
    return self.build(nested(params)).enter(one[0])

  def layers(self, params: Params, x: jax.Array, one: Any, first: jax.Array) -> tuple:
    """Runs a chunk's layers; likewise."""
    x, sums, counts = self.build(nested(params)).run_layers(x, *one, first)
    return x, self.finish(sums), counts

  def leave(self, params: Params, x: jax.Array, one: Any) -> Sums:
    """Returns the sums of a microbatch; likewise."""
    return self.finish(self.build(nested(params)).leave(x, *one))

  def _by_stack(self, params: Any, counts: Sums) -> Sums:
    parts = self.schedule.stages * self.schedule.chunks
    return self.build(params).counts_by_stack(counts, parts) if counts else counts

  def _weight(self, batch: Batch, sums: Sums) -> Sums:
    return {"weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}

  def _inputs(self, params: Any, batch: Batch, key: jax.Array | None) -> Any:
    count, batch = self.schedule.microbatches, self.build(params).ordered(batch)
    return split_rows(batch, count), None if key is None else jax.random.split(key, count)

  def _pipeline(self) -> Pipeline:
    return Pipeline(
      self.schedule,
      self,
      self.spec.layers,
      self.stacked,
      self._laid_out,
      self.spec.pipeline_ends == "conditional",
    )

  def _laid_out(self, grads: Params) -> Params:
    """Returns gradients that are sharded as their parameters are, inside the region."""
    if self.specs is None or on_one_device():
      return grads

    def constrained(name: str, x: jax.Array) -> jax.Array:
      entries = spec_entries(automatic_spec(self.specs[name]))
      if self.schedule.chunks > 1 and self.stacked(name):
        entries = [(), *entries]
      return jax.lax.with_sharding_constraint(x, partition_spec(entries))

    return {name: constrained(name, x) for name, x in grads.items()}
