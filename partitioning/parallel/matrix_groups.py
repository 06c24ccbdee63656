"""Groups of matrices: which kernels' matrices devices exchange together, and who gets how many.

The matrices of all kernels that have the same shape and the same sharding are one stack, those of
all layers included. `whole_matrices.py` brings each device its part of the stack.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from partitioning.rules import Axes, axes_size, spec_entries

# Of the matrices of one round on a device, unless one matrix has more: enough that matmuls are not
# small, and 64 MiB in bfloat16.
ROUND_ELEMENTS = 2**25
Part = tuple[int, Axes]  # size of a dim, or of several merged ones, and the axes that split it
# A matrix, and the squares of the size of its rows and of its columns: its Gram matrices, or bases.
KINDS = MATRIX, ROWS, COLUMNS = "matrix", "rows", "columns"


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
    """Returns rows and columns of a matrix; with `transpose`, there are never more rows."""
    return _size(self.rows), _size(self.columns)

  def parts(self, kind: str, sizes: Mapping[str, int]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Returns the parts of both sides of a matrix of a kind; those of a square may be filled up.

    Args:
      kind: of `KINDS`.
      sizes: mesh axis -> size.
    """
    if kind == MATRIX:
      return self.rows, self.columns
    size = self.shape[0 if kind == ROWS else 1]
    split = [tuple(a for _, axes in side for a in axes) for side in (self.rows, self.columns)]
    rows, columns = ((filled(size, axes_size(axes, sizes)), axes) for axes in split)
    return (rows,), (columns,)

  def elements(self, kind: str, sizes: Mapping[str, int]) -> int:
    """Returns how many elements of a matrix of a kind are exchanged."""
    return math.prod(map(_size, self.parts(kind, sizes)))


@dataclasses.dataclass(frozen=True)
class Move:
  """How often an update exchanges its matrices of one kind.

  Attributes:
    kind: of `KINDS`.
    there: times that they are brought whole to devices.
    back: times that what is computed there is brought back.
    why: what they are.
  """

  kind: str
  there: int
  back: int
  why: str


def grouped(
  shapes: Mapping[str, Sequence[int]],
  matrices: Mapping[str, Matrix],
  specs: Mapping[str, PartitionSpec],
  sizes: Mapping[str, int],
  *,
  transpose: bool = True,
) -> list[Group]:
  """Returns the groups of some arrays.

  Args:
    shapes: name -> global shape.
    matrices: name -> its matrices.
    specs: name -> its sharding.
    sizes: mesh axis -> size.
    transpose: a matrix with more rows than columns is transposed, and so is in a group with those
      of the other orientation.
  """
  members: dict[tuple, list[tuple[str, bool, int]]] = {}
  for name, shape in shapes.items():
    matrix, axes = matrices[name], _axes(specs[name], len(shape), sizes)
    sides = [_parts(dims, shape, axes) for dims in (matrix.rows, matrix.columns)]
    transposed = transpose and (_size(sides[0]), sides[0]) > (_size(sides[1]), sides[1])
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


def filled(size: int, parts: int) -> int:
  """Returns a size, filled up so that it can be divided into equal parts."""
  return -(-size // parts) * parts


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
