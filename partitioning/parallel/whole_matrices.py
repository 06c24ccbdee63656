"""Brings whole matrices of sharded kernels to devices, and what is computed of them back.

For optimizers that multiply a kernel by itself (Muon's Newton-Schulz iterations). Left to XLA, each
such matmul of a sharded kernel is a collective of its own, in each iteration. Here the matrices of
all kernels that have the same shape and the same sharding are stacked, those of all layers
included, and each device gets its part of the stack:

- Along the axes that split the matrices, by one all-to-all: of each matrix a device has a shard,
  and of its own matrices it gets all shards. Another all-to-all brings the results back.
- Along axes over which the kernels are replicated, each device takes its part of what it has
  anyway, and the results are all-gathered.

With r replicas a device sends 2 / r + 1 times the bytes of its shards: its part there and back, and
the results of the others. If the replicas all did the same work, it would be 2 times, or nothing
where no axis splits the matrices. So sharing costs no more bytes than repeating the work in the
first case; in the second it pays where the work takes longer than the gather, which is so for
Newton-Schulz of matrices with more than some hundred rows (docs/optimizers.md).

Large matrices are computed in rounds, a few on each device at a time: what a round needs is small
beside the parameters, however many matrices a device has.

Source: arXiv:2502.16982, section 2.3 (each replica computes a part of the whole matrices).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.dims import Axes, axes_size, spec_entries
from partitioning.parallel import collectives
from partitioning.parallel.manual_region import manual_region

# Of the matrices of one round on a device, unless one matrix has more: enough that matmuls are not
# small, and 64 MiB in bfloat16.
ROUND_ELEMENTS = 2**25
Part = tuple[int, Axes]  # size of a dim, or of several merged ones, and the axes that split it


@dataclasses.dataclass(frozen=True)
class Matrix:
  """How an array is a stack of matrices.

  Attributes:
    rows: the array's dims that are the rows, in order.
    columns: those that are the columns. The remaining dims (layers) are the stack.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Group:
  """Matrices of the same shape and sharding.

  A matrix with more rows than columns is transposed.

  Attributes:
    names: of the arrays.
    transposed: for each of them, whether its rows are the columns here.
    rows: the parts of the rows, of the whole matrices.
    columns: likewise.
    count: how many matrices the devices that exchange have among them.
    each: how many a device gets; the last devices may get zeros.
    rounds: in how many steps, each with as many matrices.
    exchanged: axes that split the matrices, which the all-to-alls are along.
    shared: axes over which the kernels are replicated that share the work.
  """

  names: tuple[str, ...]
  transposed: tuple[bool, ...]
  rows: tuple[Part, ...]
  columns: tuple[Part, ...]
  count: int
  each: int
  rounds: int
  exchanged: Axes
  shared: Axes

  @property
  def shape(self) -> tuple[int, int]:
    """Returns rows and columns of a matrix; there are never more rows."""
    return _size(self.rows), _size(self.columns)


def grouped(
  shapes: Mapping[str, Sequence[int]],
  matrices: Mapping[str, Matrix],
  specs: Mapping[str, PartitionSpec],
  sizes: Mapping[str, int],
) -> list[Group]:
  """Returns the groups of some arrays.

  Args:
    shapes: name -> global shape.
    matrices: name -> its matrices.
    specs: name -> its sharding.
    sizes: mesh axis -> size.
  """
  members: dict[tuple, list[tuple[str, bool, int]]] = {}
  for name, shape in shapes.items():
    matrix, axes = matrices[name], _axes(specs[name], len(shape), sizes)
    sides = [_parts(dims, shape, axes) for dims in (matrix.rows, matrix.columns)]
    transposed = (_size(sides[0]), sides[0]) > (_size(sides[1]), sides[1])
    stack = [dim for dim in range(len(shape)) if dim not in (*matrix.rows, *matrix.columns)]
    split = tuple(axis for dim in stack for axis in axes[dim])
    count = math.prod(shape[dim] for dim in stack) // axes_size(split, sizes)
    key = (*(sides[::-1] if transposed else sides), tuple(sorted(split)))
    members.setdefault(key, []).append((name, transposed, count))
  groups = []
  for (rows, columns, split), arrays in members.items():
    names, transposed, counts = zip(*arrays, strict=True)
    exchanged = tuple(axis for _, axes in (*rows, *columns) for axis in axes)
    replicated = [a for a, n in sizes.items() if n > 1 and a not in (*exchanged, *split)]
    parts = axes_size(exchanged, sizes)
    shared, each = _share(sum(counts), parts, replicated, sizes)
    rounds = _rounds(each, _size(rows) * _size(columns))
    groups.append(
      Group(names, transposed, rows, columns, sum(counts), each, rounds, exchanged, shared)
    )
  return groups


def on_whole_matrices(
  function: Callable[[jax.Array], jax.Array],
  arrays: Mapping[str, jax.Array],
  matrices: Mapping[str, Matrix],
  specs: Mapping[str, PartitionSpec],
  sizes: Mapping[str, int],
) -> dict[str, jax.Array]:
  """Applies a function to every matrix of some arrays, each whole on one device.

  Args:
    function: takes [matrices, rows, columns], no more rows than columns, and returns the same
      shape. It treats matrices one by one, a transposed one likewise, and zeros as anything.
    arrays: name -> array, all of one dtype.
    matrices: name -> its matrices.
    specs: name -> its sharding, that of the result too.
    sizes: mesh axis -> size, of the mesh that is set; {} without a mesh.
  """
  groups = grouped({name: x.shape for name, x in arrays.items()}, matrices, specs, sizes)

  def on_device(shards: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {
      name: result
      for group in groups
      for name, result in _of_group(function, group, shards, matrices, sizes).items()
    }

  arrays = dict(arrays)
  if math.prod(sizes.values()) == 1:
    return on_device(arrays)
  placed = {name: specs[name] for name in arrays}
  return manual_region(on_device, (placed,), placed)(arrays)


def _of_group(function, group: Group, shards, matrices, sizes) -> dict[str, jax.Array]:
  """Returns the results of a group's arrays, shards as they are; runs on each device."""
  stacks = [
    _stacked(shards[name], matrices[name], turned)
    for name, turned in zip(group.names, group.transposed, strict=True)
  ]
  cuts = list(itertools.accumulate(len(stack) for stack in stacks))
  parts = (*group.rows, *group.columns)
  local = tuple(size // axes_size(axes, sizes) for size, axes in parts)
  stack = jnp.concatenate([one.reshape(-1, *local) for one in stacks])
  devices, sharers = axes_size(group.exchanged, sizes), axes_size(group.shared, sizes)
  padding = group.each * devices * sharers - len(stack)
  stack = jnp.pad(stack, [(0, padding), *[(0, 0)] * len(local)])
  if group.shared:
    length = group.each * devices
    start = jax.lax.axis_index(group.shared) * length
    stack = jax.lax.dynamic_slice_in_dim(stack, start, length)

  def one_round(stack: jax.Array) -> jax.Array:
    return _back(function(_whole(stack, group, local, sizes)), group, local, sizes)

  if group.rounds == 1:
    stack = one_round(stack)
  else:
    stack = jax.lax.map(one_round, stack.reshape(group.rounds, -1, *local)).reshape(stack.shape)
  if group.shared:
    stack = collectives.all_gather(stack, group.shared, 0)
  found = jnp.split(stack[: cuts[-1]], cuts[:-1])
  return {
    name: _unstacked(one, shards[name].shape, matrices[name], turned)
    for name, turned, one in zip(group.names, group.transposed, found, strict=True)
  }


def _whole(stack: jax.Array, group: Group, local: tuple[int, ...], sizes) -> jax.Array:
  """Returns this device's whole matrices [each, rows, columns] of shards [matrices, ...]."""
  each = group.each // group.rounds
  if group.exchanged:
    stack = stack.reshape(-1, each, *local)
    stack = jax.lax.all_to_all(stack, group.exchanged, 0, 0)  # by the device that a shard is of
    cut = [axes_size(axes, sizes) for _, axes in (*group.rows, *group.columns)]
    rank = len(cut)
    stack = stack.reshape(*cut, each, *local)
    # Of each part, the device comes before the place in its shard.
    order = [rank, *(one for part in range(rank) for one in (part, rank + 1 + part))]
    stack = stack.transpose(order)
  return stack.reshape(each, *group.shape)


def _back(whole: jax.Array, group: Group, local: tuple[int, ...], sizes) -> jax.Array:
  """Returns shards [matrices, ...] of whole matrices: the inverse of `_whole`."""
  if not group.exchanged:
    return whole.reshape(-1, *local)
  cut = [axes_size(axes, sizes) for _, axes in (*group.rows, *group.columns)]
  pairs = [size for pair in zip(cut, local, strict=True) for size in pair]
  rank = len(cut)
  order = [*range(1, 2 * rank, 2), 0, *range(2, 2 * rank + 1, 2)]
  stack = whole.reshape(len(whole), *pairs).transpose(order)
  stack = stack.reshape(math.prod(cut), len(whole), *local)
  return jax.lax.all_to_all(stack, group.exchanged, 0, 0).reshape(-1, *local)


def _order(rank: int, matrix: Matrix, transposed: bool) -> list[int]:
  """Returns the dims: the stack's, then the rows', then the columns'."""
  sides = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
  stack = [dim for dim in range(rank) if dim not in (*matrix.rows, *matrix.columns)]
  return [*stack, *sides[0], *sides[1]]


def _stacked(shard: jax.Array, matrix: Matrix, transposed: bool) -> jax.Array:
  """Returns [matrices, ...]: the stack's dims merged, then the rows', then the columns'."""
  moved = shard.transpose(_order(shard.ndim, matrix, transposed))
  inside = len(matrix.rows) + len(matrix.columns)
  return moved.reshape(-1, *moved.shape[shard.ndim - inside :])


def _unstacked(stack: jax.Array, shape, matrix: Matrix, transposed: bool) -> jax.Array:
  """Returns the array of this shape: the inverse of `_stacked`."""
  order = _order(len(shape), matrix, transposed)
  back = [order.index(dim) for dim in range(len(shape))]
  return stack.reshape([shape[dim] for dim in order]).transpose(back)


def _axes(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> list[Axes]:
  """Returns the axes larger than 1 of each dim."""
  return [tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in spec_entries(spec, rank)]


def _parts(dims: Sequence[int], shape: Sequence[int], axes: Sequence[Axes]) -> tuple[Part, ...]:
  """Returns the dims of one side, each merged with the one before it if nothing splits it.

  Then a device's shard of the merged dims is contiguous.
  """
  parts: list[Part] = []
  for dim in dims:
    if parts and not axes[dim]:
      size, split = parts.pop()
      parts.append((size * shape[dim], split))
    else:
      parts.append((shape[dim], axes[dim]))
  return tuple(parts)


def _size(parts: Sequence[Part]) -> int:
  return math.prod(size for size, _ in parts)


def _share(
  count: int, parts: int, replicated: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Axes, int]:
  """Returns the replicated axes that share the work, and how many matrices a device then gets.

  Those with which a device gets the fewest; of these, the fewest devices, since each adds to what
  is all-gathered.
  """
  lengths = range(len(replicated) + 1)
  ways = [way for length in lengths for way in itertools.combinations(replicated, length)]

  def cost(way: Axes) -> tuple[int, int]:
    sharers = axes_size(way, sizes)
    return -(-count // (parts * sharers)), sharers

  best = min(ways, key=cost)
  return best, cost(best)[0]


def _rounds(each: int, elements: int) -> int:
  """Returns into how many equal rounds a device's matrices of this size are divided."""
  at_once = max(1, ROUND_ELEMENTS // elements)
  return next(n for n in range(1, each + 1) if each % n == 0 and each // n <= at_once)
