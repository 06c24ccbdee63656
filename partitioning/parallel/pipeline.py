"""Pipeline parallelism over the mesh axis `stage`, as one SPMD program.

One `jax.shard_map` is manual over `stage`; all other axes stay as they are outside, so constraints
and manual regions inside a stage shard over them. `1f1b` and `interleaved` are three scans over
ticks: with forward passes alone, with both, with backward passes alone. A backward pass is
`jax.vjp` of the chunk at its saved input, so the forward pass runs again; gradients are added up in
the carry of the scans. Memory does not grow with the microbatches, but for their tokens.

Nothing that a chunk computes may be a collective over `stage`: inside of `jax.vjp` its transpose
would be another one (psum becomes psum, as seen with jax 0.10.2 and 0.12.0). The two permutes of a
tick are outside.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.parallel import pipeline_layers
from partitioning.parallel.pipeline_schedule import GPIPE, STAGE, Schedule
from partitioning.parallel.pipeline_stage import Network, Params, Scalars, Stage


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A network with its schedule.

  Attributes:
    schedule: of the stages of the mesh.
    network: what is computed.
    layers: of the whole model; the stages times the chunks divide them.
    stacked: whether a parameter has the layers as its first dim, by its name; stages have parts of
      those, and all of the others.
    laid_out: shards gradients inside of the region as their parameters are sharded; takes those by
      name, stacked ones with their chunks as the first dim where a stage has several.
    conditional: whether only the stages that use them compute embeddings and losses, by
      `jax.lax.cond`; else all stages do, and the results of the others are not used.
  """

  schedule: Schedule
  network: Network
  layers: int
  stacked: Callable[[str], bool]
  laid_out: Callable[[Params], Params] = lambda grads: grads
  conditional: bool = False

  def gradients(self, trained: Params, frozen: Params, inputs: Any) -> tuple[Params, Scalars, Any]:
    """Returns gradients of the summed loss, the sums, and the counts of all layers.

    Args:
      trained: parameters with gradients.
      frozen: parameters without.
      inputs: a tree of arrays with the microbatches as their first dim.
    """

    def on_stage(trained: Params, frozen: Params, inputs: Any) -> Any:
      stage = Stage(self, self._computed(trained), self._computed(frozen), inputs)
      found = stage.gpipe() if self.schedule.kind == GPIPE else stage.one_f_one_b()
      grads, sums, counts = found
      grads = {
        name: self._stored(x) if self.stacked(name) else jax.lax.psum(x, STAGE)
        for name, x in grads.items()
      }
      return grads, _summed(sums), stage.of_layers(counts)

    specs = self._specs(trained)
    out = specs, PartitionSpec(), self._counts_spec()
    found = self._region(on_stage, (specs, self._specs(frozen), PartitionSpec()), out)(
      trained, frozen, inputs
    )
    return *found[:2], self._all_layers(found[2])

  def sums(self, params: Params, inputs: Any) -> tuple[Scalars, Any]:
    """Returns the sums, and the counts of all layers, by forward passes alone."""

    def on_stage(params: Params, inputs: Any) -> Any:
      stage = Stage(self, {}, self._computed(params), inputs)
      sums, counts = stage.forward_alone({})
      return _summed(sums), stage.of_layers(counts)

    out = PartitionSpec(), self._counts_spec()
    sums, counts = self._region(on_stage, (self._specs(params), PartitionSpec()), out)(
      params, inputs
    )
    return sums, self._all_layers(counts)

  # ------------------------------ parameters and counts ------------------------------

  def _region(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(
      function, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False
    )

  def _specs(self, params: Params) -> dict[str, PartitionSpec]:
    return {
      name: PartitionSpec(STAGE) if self.stacked(name) else PartitionSpec() for name in params
    }

  def _counts_spec(self) -> PartitionSpec:
    return PartitionSpec(None, STAGE)  # chunks, then layers of a chunk

  def _all_layers(self, counts: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), counts)

  def _computed(self, params: Params) -> Params:
    """Returns parameters as a stage computes with them: by chunk, if it has several."""
    sizes = self.schedule.stages, self.schedule.chunks
    if self.schedule.chunks == 1:
      return params
    return {
      name: pipeline_layers.to_compute(x, *sizes) if self.stacked(name) else x
      for name, x in params.items()
    }

  def _stored(self, stacked: jax.Array) -> jax.Array:
    sizes = self.schedule.stages, self.schedule.chunks
    return stacked if sizes[1] == 1 else pipeline_layers.to_store(stacked, *sizes)


def _summed(tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.lax.psum(x, STAGE), tree)
