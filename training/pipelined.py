"""A step's loss and gradients by a pipeline: connects models, schedules and the step."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from ml_collections import ConfigDict

from models.losses import Batch, Sums
from partitioning.constraints import automatic_spec, on_one_device
from partitioning.dims import partition_spec, spec_entries
from partitioning.parallel.gathered_parameters import GatheredOnce
from partitioning.parallel.pipeline_schedule import INTERLEAVED, STAGE, Schedule
from training.state import merged

Params = dict[str, jax.Array]  # name -> array
Build = Callable[[Any], Any]  # nested dict of parameters -> the module


def schedule_of(config: ConfigDict, sizes: Mapping[str, int]) -> Schedule | None:
  """Returns the schedule of a finalized config; None without pipeline stages."""
  training = config.training
  if sizes.get(STAGE, 1) == 1:
    return None
  chunks = training.pipeline_chunks if training.pipeline == INTERLEAVED else 1
  return Schedule(training.pipeline, sizes[STAGE], training.microbatches, chunks)


def split_rows(batch: Batch, count: int) -> dict[str, jax.Array]:
  """Returns microbatches of a batch, [count, rows, ...].

  Row r of the batch belongs to microbatch r % count, so that no row moves between devices.
  """
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), dict(batch)
  )


def gathered_sums(
  gathered: GatheredOnce,
  function: Callable[..., tuple[tuple[Any, Any], Any]],
  batch: Batch,
  trained: Any,
  frozen: Any,
  *arguments: Any,
) -> tuple[tuple[Any, Any], Any]:
  """Returns what a function of nested dicts of parameters does, with `GatheredOnce.sums`.

  Args:
    gathered: which parameters are gathered.
    function: takes what follows; returns ((gradients of the trained ones, sums), more sums).
    batch: its rows.
    trained: nested dict of parameters.
    frozen: nested dict of parameters.
    *arguments: of the function.
  """

  def flat(batch: Batch, trained: Params, frozen: Params, *arguments: Any) -> tuple[Params, Any]:
    (grads, sums), more = function(batch, _nested(trained), _nested(frozen), *arguments)
    return _flat(grads), (sums, more)

  grads, (sums, more) = gathered.sums(flat, batch, _flat(trained), _flat(frozen), *arguments)
  return (_nested(grads), sums), more


class _Parts:
  """The parts of a model, as functions of its parameters by name; see `pipeline.Network`."""

  def __init__(self, build: Build, residual: str, finished: Callable[[Sums], Sums]):
    self.residual, self._build, self._finished = residual, build, finished

  def _module(self, params: Params) -> Any:
    return self._build(_nested(params))

  def enter(self, params: Params, one: Any) -> jax.Array:
    batch, _ = one
    return self._module(params).enter(batch)

  def layers(self, params: Params, x: jax.Array, one: Any, first: jax.Array):
    x, sums, counts = self._module(params).run_layers(x, *one, first)
    return x, self._finished(sums), counts

  def leave(self, params: Params, x: jax.Array, one: Any) -> Sums:
    return self._finished(self._module(params).leave(x, *one))


class Pipelined:
  """A model's loss, and its gradients, by a pipeline schedule."""

  def __init__(
    self,
    config: ConfigDict,
    schedule: Schedule,
    build: Build,
    residual: str,
    stacked: Callable[[str], bool],
    specs: Any = None,
  ):
    """Compiles nothing.

    Args:
      config: finalized.
      schedule: of `schedule_of`.
      build: makes the module of parameters.
      residual: letters of what goes from layer to layer.
      stacked: whether a parameter, by its name, has the layers as its first dim.
      specs: nested dict of the parameters' PartitionSpecs; None: unknown.
    """
    self._config, self._schedule, self._build = config, schedule, build
    self._residual, self._stacked = residual, stacked
    self._specs = None if specs is None else _flat(specs)

  def gradients(
    self,
    trained: Any,
    frozen: Any,
    batch: Batch,
    key: jax.Array | None,
    each: Callable[[Sums], Sums],
  ) -> tuple[Any, Sums]:
    """Returns gradients of the loss, and the sums, over the rows of a batch.

    Args:
      trained: nested dict of parameters, float32 or wider.
      frozen: nested dict of parameters without gradients.
      batch: its microbatches divide the rows.
      key: draws the dropout.
      each: applied to the sums of each microbatch before they are added up; linear.
    """
    pipeline = self._pipeline(each)
    inputs = self._inputs(merged(trained, frozen), batch, key)
    grads, sums, counts = pipeline.gradients(_flat(trained), _flat(frozen), inputs)
    sums = {**sums, **counts, **each(self._weight(batch, sums))}
    return _nested(grads), sums

  def sums(self, params: Any, batch: Batch) -> Sums:
    """Returns the sums over the rows of a batch, without dropout."""
    inputs = self._inputs(params, batch, None)
    found, counts = self._pipeline(lambda sums: sums).sums(_flat(params), inputs)
    return {**found, **counts, **self._weight(batch, found)}

  def _weight(self, batch: Batch, sums: Sums) -> Sums:
    return {"weight": jnp.sum(batch["weights"], dtype=sums["loss"].dtype)}

  def _inputs(self, params: Any, batch: Batch, key: jax.Array | None) -> Any:
    count, batch = self._schedule.microbatches, self._build(params).ordered(batch)
    return split_rows(batch, count), None if key is None else jax.random.split(key, count)

  def _pipeline(self, each: Callable[[Sums], Sums]) -> Any:
    from partitioning.parallel.pipeline import Pipeline  # of runs with stages alone

    return Pipeline(
      self._schedule,
      _Parts(self._build, self._residual, each),
      self._config.model.layers,
      self._stacked,
      self._laid_out,
      self._config.training.pipeline_ends == "conditional",
    )

  def _laid_out(self, grads: Params) -> Params:
    """Returns gradients that are sharded as their parameters are, inside the region."""
    if self._specs is None or on_one_device():
      return grads

    def constrained(name: str, x: jax.Array) -> jax.Array:
      entries = spec_entries(automatic_spec(self._specs[name]))
      if self._schedule.chunks > 1 and self._stacked(name):
        entries = [(), *entries]
      return jax.lax.with_sharding_constraint(x, partition_spec(entries))

    return {name: constrained(name, x) for name, x in grads.items()}


def _nested(params: Params) -> Any:
  return traverse_util.unflatten_dict(params, sep="/")


def _flat(tree: Any) -> Params:
  return traverse_util.flatten_dict(tree, sep="/")
