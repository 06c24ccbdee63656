"""Manual regions: `jax.shard_map` over the axes that no surrounding region has made manual."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.constraints import manual_axes
from partitioning.rules import spec_entries


def manual_region(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
  """Returns a function that runs on each device's shards, with explicit collectives.

  At the top level all axes are manual, even those that only split the batch (data): before a
  manual all-gather or reduce-scatter over some of the axes, XLA's partitioner would copy the full
  batch to every device (as seen on CPUs, jax 0.10.2). Inside a region of pipeline stages or
  experts, all remaining axes become manual.

  Without check_vma: the check does not see that the result of a gathered weight is replicated, and
  it rejects a `cond` whose branch differs between devices. The parity tests cover what it checks.

  Args:
    function: takes and returns shards.
    in_specs: of its arguments; without axes that are already manual.
    out_specs: of its results, likewise.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  axes = tuple(axis for axis in sizes if axis not in manual_axes())
  alone = tuple(axis for axis in axes if sizes[axis] == 1)
  in_specs, out_specs = jax.tree.map(lambda spec: _with(spec, alone), (in_specs, out_specs))
  return jax.shard_map(
    function, in_specs=in_specs, out_specs=out_specs, axis_names={*axes}, check_vma=False
  )


def _with(spec: PartitionSpec, alone: tuple[str, ...]) -> PartitionSpec:
  """Returns a spec that also splits the first dim over axes of size 1, which changes no shard.

  The transpose of a shard_map sums gradients over the axes that a spec does not name, those of size
  1 too, and XLA for CPUs keeps an all-reduce of single devices as a copy (jax 0.10.2).
  """
  if not len(spec):
    return spec
  entries = spec_entries(spec, len(spec))
  named = {axis for entry in entries for axis in entry}
  first = (*entries[0], *(axis for axis in alone if axis not in named))
  return PartitionSpec(first, *spec[1:])
