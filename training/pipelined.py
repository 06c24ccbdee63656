"""A step's loss and gradients by a pipeline: connects models, schedules and the step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.losses import Batch, Sums
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dims import partition_spec, spec_entries
from partitioning.parallel.pipeline_schedule import INTERLEAVED, STAGE, Schedule
from partitioning.rules import named_leaves
from training.gradients import split_rows
from training.state import merged, nested
from training.step_spec import StepSpec

Params = dict[str, jax.Array]  # name -> array
Build = Callable[[Any], Any]  # nested dict of parameters -> the module


def schedule_of(spec: StepSpec, sizes: Mapping[str, int]) -> Schedule | None:
  """Returns the schedule of a step's pipeline on a mesh of these sizes; None without stages."""
  if sizes.get(STAGE, 1) == 1:
    return None
  chunks = spec.pipeline_chunks if spec.pipeline == INTERLEAVED else 1
  return Schedule(spec.pipeline, sizes[STAGE], spec.microbatches, chunks)


class _Parts:
  """The parts of a model, as functions of its parameters by name; see `pipeline.Network`."""

  def __init__(self, build: Build, residual: str, finish: Callable[[Sums], Sums]):
    self.residual, self._build, self._finish = residual, build, finish

  def _module(self, params: Params) -> Any:
    return self._build(nested(params))

  def enter(self, params: Params, one: Any) -> jax.Array:
    batch, _ = one
    return self._module(params).enter(batch)

  def layers(self, params: Params, x: jax.Array, one: Any, first: jax.Array):
    x, sums, counts = self._module(params).run_layers(x, *one, first)
    return x, self._finish(sums), counts

  def leave(self, params: Params, x: jax.Array, one: Any) -> Sums:
    return self._finish(self._module(params).leave(x, *one))


@dataclasses.dataclass(frozen=True)
class Pipelined:
  """A model's loss, and its gradients, by a pipeline schedule.

  Attributes:
    spec: of the step.
    schedule: of `schedule_of`.
    build: makes the module of parameters.
    residual: letters of what goes from layer to layer.
    stacked: whether a parameter, by its name, has the layers as its first dim.
    specs: name -> the parameter's PartitionSpec; None: unknown.
    finish: applied to the sums of each microbatch before they are added up; linear.
  """

  spec: StepSpec
  schedule: Schedule
  build: Build
  residual: str
  stacked: Callable[[str], bool]
  specs: Mapping[str, PartitionSpec] | None = None
  finish: Callable[[Sums], Sums] = lambda sums: sums

  def gradients(
    self, batch: Batch, learned: Any, frozen: Any, variables: Any, key: jax.Array | None
  ) -> tuple[tuple[Any, Sums], Any]:
    """Returns gradients of the loss, and the sums, as `training.gradients.Gradients` does.

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
    sums = {**sums, **counts, **self.finish(self._weight(batch, sums))}
    return (nested(grads), sums), variables

  def sums(self, params: Any, batch: Batch) -> Sums:
    """Returns the sums over the rows of a batch, without dropout."""
    inputs = self._inputs(params, batch, None)
    found, counts = self._pipeline().sums(named_leaves(params), inputs)
    return {**found, **counts, **self._weight(batch, found)}

  def _weight(self, batch: Batch, sums: Sums) -> Sums:
    return {"weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}

  def _inputs(self, params: Any, batch: Batch, key: jax.Array | None) -> Any:
    count, batch = self.schedule.microbatches, self.build(params).ordered(batch)
    return split_rows(batch, count), None if key is None else jax.random.split(key, count)

  def _pipeline(self) -> Any:
    from partitioning.parallel.pipeline import Pipeline  # of runs with stages alone

    return Pipeline(
      self.schedule,
      _Parts(self.build, self.residual, self.finish),
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
