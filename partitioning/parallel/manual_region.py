"""Manual regions: `jax.shard_map` over the axes that no surrounding region has made manual."""

from collections.abc import Callable
from typing import Any

import jax

from partitioning.constraints import manual_axes


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
  axes = set(jax.sharding.get_abstract_mesh().axis_names) - manual_axes()
  return jax.shard_map(
    function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
  )
