"""Parameters that are all-gathered once per step, not for each matmul of each microbatch.

A region is manual over the mesh axes that shard them, which also split the batch, as that of
`batch_region`. All microbatches of a step read the gathered parameters; their gradients, of the
complete parameters, are added up on each device, and reduce-scattered once at the end.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import BatchPart, inside_batch_part
from partitioning.dims import Axes, partition_spec, spec_entries
from partitioning.parallel import collectives

Params = dict[str, jax.Array]  # name -> array


@dataclasses.dataclass(frozen=True)
class GatheredOnce:
  """Which parameters are gathered, and in which dtype.

  Attributes:
    axes: that are manual, the first ones of the batch.
    specs: of the parameters, by name.
    dtypes: to which some are cast before they are gathered, by name.
  """

  axes: Axes
  specs: Mapping[str, PartitionSpec]
  dtypes: Mapping[str, jnp.dtype] = dataclasses.field(default_factory=dict)

  def manual_spec(self, name: str) -> PartitionSpec:
    """Returns a parameter's spec with the manual axes alone."""
    entries = spec_entries(self.specs[name])
    return partition_spec([tuple(a for a in axes if a in self.axes) for axes in entries])

  def moves(self, name: str) -> tuple[tuple[int, Axes], ...]:
    """Returns (dim, axes) of the all-gathers of a parameter."""
    entries = enumerate(spec_entries(self.manual_spec(name)))
    return tuple((dim, axes) for dim, axes in entries if axes)

  def sums(
    self,
    function: Callable[..., tuple[Params, Any]],
    batch: Any,
    trained: Params,
    frozen: Params,
    *arguments: Any,
  ) -> tuple[Params, Any]:
    """Returns the sums over parts of the batch of `function(part, trained, frozen, *arguments)`.

    Args:
      function: takes complete parameters; returns gradients of the trained ones, float32 or wider,
        and a tree of sums over rows.
      batch: a tree of arrays (rows, ...).
      trained: parameters by name, sharded as the specs say.
      frozen: likewise.
      *arguments: trees of arrays that are not split over the axes.

    Returns:
      Gradients, sharded as their parameters; the sums.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    count = 1
    for axis in self.axes:
      count *= sizes[axis]

    def on_part(batch: Any, trained: Params, frozen: Params, arguments: Any) -> Any:
      with inside_batch_part(BatchPart(self.axes, count)):
        given = ({n: self._gathered(n, x) for n, x in p.items()} for p in (trained, frozen))
        grads, sums = function(batch, *given, *arguments)
      grads = {name: self._reduced(name, x) for name, x in grads.items()}
      return grads, jax.tree.map(lambda x: jax.lax.psum(x, self.axes), sums)

    whole = PartitionSpec()
    specs = [{name: self.manual_spec(name) for name in params} for params in (trained, frozen)]
    region = jax.shard_map(
      on_part,
      in_specs=(PartitionSpec(self.axes), *specs, whole),
      out_specs=(specs[0], whole),
      axis_names=set(self.axes),
      check_vma=False,
    )
    return region(batch, trained, frozen, arguments)

  def _gathered(self, name: str, shard: jax.Array) -> jax.Array:
    shard = shard.astype(self.dtypes.get(name, shard.dtype))
    for dim, axes in self.moves(name):
      shard = collectives.all_gather(shard, axes, dim)
    return shard

  def _reduced(self, name: str, gradient: jax.Array) -> jax.Array:
    """Returns a device's part of the sum of the gradients of all parts of the batch."""
    moves = self.moves(name)
    for dim, axes in moves:
      gradient = collectives.reduce_scatter(gradient, axes, dim)
    scattered = {axis for _, axes in moves for axis in axes}
    left = tuple(axis for axis in self.axes if axis not in scattered)
    return jax.lax.psum(gradient, left) if left else gradient
