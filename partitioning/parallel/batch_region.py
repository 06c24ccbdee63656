"""Regions of parts of a batch: sums over its rows are those of a device's own, and reduced at last.

So the gradients of several microbatches are added up, then reduced once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import BatchPart, inside_batch_part
from partitioning.parallel import collectives
from partitioning.parallel.manual_region import manual_region
from partitioning.rules import Axes, axes_size, partition_spec, spec_entries


def summed_over_batch_parts(
  function: Callable[..., Any], axis: str, batch: Any, *arguments: Any
) -> Any:
  """Returns the sum over parts of a batch of `function(part, *arguments)`, by one all-reduce.

  All other mesh axes stay as they are outside: constraints and manual regions inside the function
  shard over them.

  Args:
    function: takes rows of the batch and the arguments; returns a tree of sums over the rows.
    axis: of the mesh, the first that splits the batch.
    batch: a tree of arrays (rows, ...); the size of the axis divides the rows.
    *arguments: trees of arrays that are not split over the axis.
  """
  count = dict(jax.sharding.get_abstract_mesh().shape)[axis]

  def on_part(batch: Any, arguments: Any) -> Any:
    with inside_batch_part(BatchPart((axis,), count)):
      partial = function(batch, *arguments)
    return jax.tree.map(lambda x: jax.lax.psum(x, axis), partial)

  whole = PartitionSpec()
  region = jax.shard_map(
    on_part,
    in_specs=(PartitionSpec(axis), whole),
    out_specs=whole,
    axis_names={axis},
    check_vma=False,
  )
  return region(batch, arguments)


# ------------------------------ parameters gathered once per step ------------------------------
# And not for each matmul of each microbatch: in a region over the mesh axes that shard them, which
# also split the batch, all microbatches read complete parameters, and add up their gradients.

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

  def whole_spec(self, name: str) -> PartitionSpec:
    """Returns a parameter's spec after it is gathered: without the manual axes."""
    entries = spec_entries(self.specs[name])
    return partition_spec([tuple(a for a in axes if a not in self.axes) for axes in entries])

  def moves(self, name: str) -> collectives.Moves:
    """Returns (dim, axes) of the all-gathers of a parameter."""
    found = []
    for dim, axes in enumerate(spec_entries(self.specs[name])):
      if gathered := tuple(axis for axis in axes if axis in self.axes):
        found.append((dim, gathered))
    return tuple(found)

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
    count = axes_size(self.axes, sizes)

    def on_part(batch: Any, trained: Params, frozen: Params, arguments: Any) -> Any:
      with inside_batch_part(BatchPart(self.axes, count)):
        grads, sums = function(batch, trained, frozen, *arguments)
      # Partial sums leave the region with a dim for the parts.
      grads = {name: x[None] for name, x in grads.items()}
      return grads, jax.tree.map(lambda x: jax.lax.psum(x, self.axes), sums)

    whole, parts = PartitionSpec(), PartitionSpec(self.axes)
    region = jax.shard_map(
      on_part,
      in_specs=(parts, whole, whole, whole),
      out_specs=(parts, whole),
      axis_names=set(self.axes),
      check_vma=False,
    )
    given = ({n: self._gathered(n, x) for n, x in p.items()} for p in (trained, frozen))
    grads, sums = region(batch, *given, arguments)
    return {name: self._reduced(name, x) for name, x in grads.items()}, sums

  # Both in regions of their own, in which all axes are manual: where others are automatic, XLA's
  # partitioner copies what those split to every device before a manual gather (jax 0.10.2, CPUs).

  def _gathered(self, name: str, stored: jax.Array) -> jax.Array:
    moves, dtype = self.moves(name), self.dtypes.get(name, stored.dtype)

    def gather(shard: jax.Array) -> jax.Array:
      return collectives.gather(shard.astype(dtype), moves)

    return manual_region(gather, (self.specs[name],), self.whole_spec(name))(stored)

  def _reduced(self, name: str, partial: jax.Array) -> jax.Array:
    """Returns the sum of the gradients of all parts of the batch, sharded as the parameter."""
    moves = self.moves(name)
    scattered = {axis for _, axes in moves for axis in axes}
    left = tuple(axis for axis in self.axes if axis not in scattered)

    def reduce(partial: jax.Array) -> jax.Array:
      gradient = partial[0]
      for dim, axes in moves:
        gradient = collectives.reduce_scatter(gradient, axes, dim)
      return jax.lax.psum(gradient, left) if left else gradient

    parts = PartitionSpec(self.axes, *self.whole_spec(name))
    return manual_region(reduce, (parts,), self.specs[name])(partial)
