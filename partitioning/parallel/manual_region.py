"""Manual regions: `jax.shard_map` over the axes that no surrounding region has made manual."""

from collections.abc import Callable
from typing import Any

import jax

from partitioning.constraints import manual_axes


def manual_region(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
  """Returns a function that runs on each device's shards, by hand-written collectives.

  At the top level all axes are manual, also those that only carry rows along (data): XLA's
  partitioner copies the whole batch to every device before a hand-written all-gather or
  reduce-scatter over some of the axes (as seen on CPUs, jax 0.10.2). Inside a region of pipeline
  stages or experts, all that are left are.

  Without check_vma: a weight that is replicated has a product that is too, which the check cannot
  see behind an all-gather, and a branch of `cond` that differs between devices confuses it. The
  parity tests see what it would.

  Args:
    function: takes shards, and returns shards.
    in_specs: of its arguments; they name no axis that is manual already.
    out_specs: of its results, likewise.
  """
  axes = set(jax.sharding.get_abstract_mesh().axis_names) - manual_axes()
  return jax.shard_map(
    function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
  )
