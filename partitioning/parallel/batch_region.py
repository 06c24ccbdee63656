"""Regions that are manual over a mesh axis which splits the batch.

Inside, sums over the batch are those of a device's own rows; they are reduced over the axis once,
at the end of the region. So the gradients of several microbatches are added up, then reduced.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.constraints import BatchPart, inside_batch_part


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
