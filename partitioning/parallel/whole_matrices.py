"""Brings whole matrices of sharded kernels to devices, and what is computed of them back.

For optimizers that multiply a kernel by itself (Muon's Newton-Schulz iterations) or by squares of
the size of its sides (SOAP's bases, which are exchanged with it). Left to XLA, each such matmul of
a sharded kernel is a collective of its own. Here the matrices of all kernels that have the same
shape and the same sharding are stacked, those of all layers included (`matrix_groups.py`), and each
device gets its part of the stack:

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

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.parallel import collectives
from partitioning.parallel.manual_region import manual_region
from partitioning.parallel.matrix_groups import MATRIX, ROWS, Group, Matrix, filled, grouped
from partitioning.rules import axes_size, partition_spec, spec_entries

Stacks = dict[str, jax.Array]  # label -> shards [matrices, ...]


class Exchange:
  """Brings the matrices of one round of a group whole to devices, and what is computed back."""

  def __init__(self, group: Group, sizes: Mapping[str, int]):
    """Takes a group and the mesh: axis -> size."""
    self._group, self._sizes = group, sizes

  def whole(self, stack: jax.Array, kind: str = MATRIX) -> jax.Array:
    """Returns this device's whole matrices [each, rows, columns] of shards [matrices, ...]."""
    group, sizes = self._group, self._sizes
    if group.shared:
      length = len(stack) // axes_size(group.shared, sizes)
      start = jax.lax.axis_index(group.shared) * length
      stack = jax.lax.dynamic_slice_in_dim(stack, start, length)
    rows, columns = group.parts(kind, sizes)
    local, cut = self.local(kind), [axes_size(axes, sizes) for _, axes in (*rows, *columns)]
    each = len(stack) // math.prod(cut)
    if group.exchanged:
      stack = stack.reshape(-1, each, *local)
      stack = jax.lax.all_to_all(stack, group.exchanged, 0, 0)  # by the device that a shard is of
      rank = len(cut)
      stack = stack.reshape(*cut, each, *local)
      # Of each part, the device comes before the place in its shard.
      order = [rank, *(one for part in range(rank) for one in (part, rank + 1 + part))]
      stack = stack.transpose(order)
    stack = stack.reshape(each, *(math.prod(size for size, _ in side) for side in (rows, columns)))
    return stack[:, : self._shape(kind)[0], : self._shape(kind)[1]]

  def back(self, whole: jax.Array, kind: str = MATRIX) -> jax.Array:
    """Returns shards [matrices, ...] of whole matrices: the inverse of `whole`."""
    group, sizes = self._group, self._sizes
    local, parts = self.local(kind), [p for side in group.parts(kind, sizes) for p in side]
    stack = whole
    if group.exchanged:
      if kind != MATRIX:
        more = [(0, size - n) for (size, _), n in zip(parts, whole.shape[1:], strict=True)]
        stack = jnp.pad(whole, [(0, 0), *more])
      cut = [axes_size(axes, sizes) for _, axes in parts]
      pairs = [size for pair in zip(cut, local, strict=True) for size in pair]
      rank = len(cut)
      order = [*range(1, 2 * rank, 2), 0, *range(2, 2 * rank + 1, 2)]
      stack = stack.reshape(len(whole), *pairs).transpose(order)
      stack = stack.reshape(math.prod(cut), len(whole), *local)
      stack = jax.lax.all_to_all(stack, group.exchanged, 0, 0)
    stack = stack.reshape(-1, *local)
    return collectives.all_gather(stack, group.shared, 0) if group.shared else stack

  def local(self, kind: str) -> tuple[int, ...]:
    """Returns the shape of a device's shard of a matrix, dims of a side that are split apart."""
    sides = self._group.parts(kind, self._sizes)
    return tuple(size // axes_size(axes, self._sizes) for side in sides for size, axes in side)

  def _shape(self, kind: str) -> tuple[int, int]:
    rows, columns = self._group.shape
    return {MATRIX: (rows, columns), ROWS: (rows, rows)}.get(kind, (columns, columns))


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

  def one_round(exchange: Exchange, stacks: Stacks) -> Stacks:
    return {MATRIX: exchange.back(function(exchange.whole(stacks[MATRIX])))}

  given = {MATRIX: (MATRIX, arrays)}
  return in_rounds(one_round, given, [MATRIX], groups, matrices, specs, sizes)[MATRIX]


def in_rounds(
  function: Callable[..., Stacks],
  arrays: Mapping[str, tuple[str, Mapping[str, jax.Array]]],
  results: Sequence[str],
  groups: Sequence[Group],
  matrices: Mapping[str, Matrix],
  specs: Mapping[str, PartitionSpec],
  sizes: Mapping[str, int],
  scalars: Sequence[jax.Array] = (),
) -> dict[str, dict[str, jax.Array]]:
  """Calls a function of shards on each device, for the matrices of each round of each group.

  Args:
    function: takes an `Exchange`, the shards of the round's matrices by label, and the scalars, and
      returns shards by label.
    arrays: label -> (kind, name -> array). Squares have the dims of the kernel's stack, and then
      the size of their side twice; their sharding is that of `square_spec`. Groups of which a label
      has no array do without it.
    results: the labels that the function returns, of the kind of the same label of `arrays`.
    groups: of the kernels.
    matrices: name -> its matrices.
    specs: name -> the sharding of the kernel.
    sizes: mesh axis -> size, of the mesh that is set; {} without a mesh.
    scalars: replicated arrays.

  Returns:
    label -> name -> array.
  """
  kinds = {label: kind for label, (kind, _) in arrays.items()}
  placed = {
    label: {
      name: specs[name] if kind == MATRIX else square_spec(matrices[name], specs[name], x.ndim - 2)
      for name, x in leaves.items()
    }
    for label, (kind, leaves) in arrays.items()
  }
  given = {
    label: {name: _filled(x, placed[label][name], sizes) for name, x in leaves.items()}
    for label, (_, leaves) in arrays.items()
  }

  def on_device(shards, *scalars):
    found: dict[str, dict[str, jax.Array]] = {label: {} for label in results}
    done: list[jax.Array] = []
    for group in groups:
      names = [(label, name) for label in shards for name in group.names if name in shards[label]]
      if scalars:  # the function may branch by them
        mine = collectives.in_turn([shards[label][name] for label, name in names], done)
        for (label, name), x in zip(names, mine, strict=True):
          shards = {**shards, label: {**shards[label], name: x}}
      done = []
      for label, name, x in _of_group(function, group, shards, kinds, matrices, sizes, scalars):
        found[label][name] = x
        done.append(x)
    return found

  if math.prod(sizes.values()) == 1:
    found = on_device(given, *scalars)
  else:
    ways = (placed, *(PartitionSpec() for _ in scalars))
    region = manual_region(on_device, ways, {label: placed[label] for label in results})
    found = region(given, *scalars)
  return {
    label: {name: _cut(x, arrays[label][1][name].shape) for name, x in leaves.items()}
    for label, leaves in found.items()
  }


def square_spec(matrix: Matrix, spec: PartitionSpec, stacked: int) -> PartitionSpec:
  """Returns the sharding of squares of a kernel, filled up to sizes that its axes divide.

  Rows are split over the axes of the kernel's rows, columns over those of its columns, whichever
  of the two sides the squares are of: so a square has as many shards as its kernel, and a device
  sends its shards in the same order.

  Args:
    matrix: how the kernel is a stack of matrices.
    spec: the kernel's sharding.
    stacked: how many dims the stack has.
  """
  entries = spec_entries(spec, stacked + len(matrix.rows) + len(matrix.columns))
  sides = [tuple(a for dim in dims for a in entries[dim]) for dims in (matrix.rows, matrix.columns)]
  stack = [axes for i, axes in enumerate(entries) if i not in (*matrix.rows, *matrix.columns)]
  return partition_spec([*stack, *sides])


def _of_group(
  function, group: Group, shards, kinds, matrices, sizes, scalars
) -> Iterator[tuple[str, str, jax.Array]]:
  """Yields label, name and shards of the results of a group; runs on each device."""
  exchange, stacks = Exchange(group, sizes), {}
  total = group.each * axes_size(group.exchanged, sizes) * axes_size(group.shared, sizes)
  for label, arrays in shards.items():
    if group.names[0] in arrays:
      parts = [
        _stacked(arrays[name], _matrix(arrays[name], kinds[label], matrices[name]), turned)
        for name, turned in zip(group.names, group.transposed, strict=True)
      ]
      local = exchange.local(kinds[label])
      stack = jnp.concatenate([one.reshape(-1, *local) for one in parts])
      stacks[label] = jnp.pad(stack, [(0, total - len(stack)), *[(0, 0)] * len(local)])
  if group.rounds == 1:
    found = function(exchange, stacks, *scalars)
  else:
    rounds = jax.tree.map(lambda x: x.reshape(group.rounds, -1, *x.shape[1:]), stacks)
    found = jax.lax.map(lambda stacks: function(exchange, stacks, *scalars), rounds)
    found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
  for label, stack in found.items():
    arrays = [shards[label][name] for name in group.names]
    counts = [x.size // math.prod(exchange.local(kinds[label])) for x in arrays]
    cuts = list(itertools.accumulate(counts))
    split = jnp.split(stack[: cuts[-1]], cuts[:-1])
    for name, turned, x, one in zip(group.names, group.transposed, arrays, split, strict=True):
      yield label, name, _unstacked(one, x.shape, _matrix(x, kinds[label], matrices[name]), turned)


def _matrix(x: jax.Array, kind: str, matrix: Matrix) -> Matrix:
  """Returns how an array of this kind is a stack of matrices."""
  return matrix if kind == MATRIX else Matrix((x.ndim - 2,), (x.ndim - 1,))


def _filled(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
  """Returns an array, filled up with zeros so that the axes of its sharding divide its dims."""
  parts = [math.prod(sizes.get(a, 1) for a in axes) for axes in spec_entries(spec, x.ndim)]
  sides = [(0, filled(size, n) - size) for size, n in zip(x.shape, parts, strict=True)]
  return jnp.pad(x, sides) if any(more for _, more in sides) else x


def _cut(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  return x if x.shape == tuple(shape) else x[tuple(slice(size) for size in shape)]


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
