"""Shardings of arrays: shard shapes, bytes per device, NamedShardings, actual against declared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import humanize
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.dims import axes_size, partition_spec, spec_axes, spec_entries
from partitioning.rules import DEVICE, LayoutError, Placement, named_leaves


def shard_shape(
  shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the shape of one device's shard."""
  entries = spec_entries(spec, len(shape))
  return tuple(size // axes_size(axes, sizes) for size, axes in zip(shape, entries, strict=True))


def spread(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns the spec with the unused axes put on the first dim that they divide.

  So a replicated array is sharded instead; if the axes divide no dim, the spec is unchanged.
  """
  left_out = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in spec_axes(spec))
  entries = list(spec_entries(spec, len(shape)))
  for position, size in enumerate(shard_shape(shape, spec, sizes)):
    if left_out and size % axes_size(left_out, sizes) == 0:
      entries[position] += left_out
      break
  return partition_spec(entries)


def bytes_per_device(placement: Placement, sizes: Mapping[str, int]) -> int:
  """Returns the bytes of one device's shard of this array."""
  shard = shard_shape(placement.shape, placement.spec, sizes)
  return math.prod(shard) * np.dtype(placement.dtype).itemsize


def copies(placement: Placement, sizes: Mapping[str, int]) -> int:
  """Returns the number of replicas of each element of this array."""
  shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
  return math.prod(sizes.values()) * shard // max(1, math.prod(placement.shape))


def replicated_bytes(placements: Iterable[Placement], sizes: Mapping[str, int]) -> int:
  """Returns the bytes per device of fully replicated arrays (0 on one device)."""
  devices = math.prod(sizes.values())
  if devices == 1:
    return 0
  return sum(bytes_per_device(p, sizes) for p in placements if copies(p, sizes) == devices)


def spec_text(spec: PartitionSpec, rank: int) -> str:
  """Returns `(-, fsdp, tensor)`, with a dash for a dim that is not sharded."""
  return f"({', '.join('+'.join(axes) or '-' for axes in spec_entries(spec, rank))})"


def shape_text(shape: Sequence[int]) -> str:
  """Returns `[4, 128]`."""
  return f"[{', '.join(map(str, shape))}]"


def size_text(count: int) -> str:
  """Returns bytes with a binary unit, `1.5 MiB`."""
  return humanize.naturalsize(count, binary=True)


def check_placed(tree: Any, placements: Mapping[str, Placement], mesh: Mesh, prefix: str = ""):
  """Compares every leaf's actual sharding with its spec.

  Args:
    tree: placed arrays.
    placements: name -> Placement, one per leaf.
    mesh: the mesh of the specs.
    prefix: put before each leaf's name.

  Raises:
    LayoutError: naming every leaf that is sharded differently.
  """
  failures = []
  for name, leaf in named_leaves(tree, prefix).items():
    wanted = sharding_of(placements[name], mesh)
    if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
      is_text = getattr(leaf.sharding, "spec", leaf.sharding)
      if wanted.memory_kind != leaf.sharding.memory_kind:
        is_text = f"{is_text} in {leaf.sharding.memory_kind} memory"
      failures.append(f"{name}: is sharded as {is_text}, its spec says {wanted.spec}")
  if failures:
    raise LayoutError(failures)


def shardings(tree: Any, placements: Mapping[str, Placement], mesh: Mesh, prefix: str = "") -> Any:
  """Returns a tree like `tree`, with each leaf's NamedSharding."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: sharding_of(
      placements[prefix + jax.tree_util.keystr(path, simple=True, separator="/")], mesh
    ),
    tree,
  )


def sharding_of(placement: Placement, mesh: Mesh) -> NamedSharding:
  """Returns an array's spec on a mesh, in its memory."""
  if placement.memory == DEVICE:
    return NamedSharding(mesh, placement.spec)
  return NamedSharding(mesh, placement.spec, memory_kind=placement.memory)
