"""Places each leaf of an optimizer's state by its parameter, and by dims of that parameter.

Copies of the parameter tree are found by structure, without knowing a state's fields by name. A
factored statistic (Adafactor's `v_row`) is sharded by the dims that it keeps of its parameter, a
square one (SOAP's preconditioners) by those of the matrix that it is multiplied by, and the scales
of an array in blocks as the array.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import traverse_util
from jax.sharding import PartitionSpec

from partitioning.rules import (
  Axes,
  Failure,
  Legend,
  Overrides,
  Placement,
  Table,
  axes_size,
  overridden,
  partition_spec,
  resolve,
  spec_entries,
)

Path = tuple[str, ...]
Kept = tuple[int, ...]  # the dims of a parameter that a statistic of it has


CODES, SCALES = "codes", "scales"  # of an array in blocks: the last parts of their paths


@dataclasses.dataclass(frozen=True)
class Square:
  """How a statistic is a stack of squares, of the size of one side of a parameter's matrices.

  Attributes:
    stack: the parameter's dims that both have.
    rows: the parameter's dims that are its matrices' rows.
    columns: those that are the columns.
    side: `rows` or `columns`: that whose size, all dims together, is the square's.
  """

  stack: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]
  side: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """How a statistic has a number for each block of its parameter: the shape of the blocks."""

  shape: tuple[int, ...]

  def __str__(self) -> str:
    """Returns `1 x 6 x 5`."""
    return " x ".join(map(str, self.shape))


def owners(paths: Iterable[Path], parameters: Iterable[Path]) -> dict[Path, Path | None]:
  """Returns leaf -> the parameter that it belongs to; None where it belongs to none.

  A node of the state is a copy of the parameter tree if the path of every leaf below it begins
  with a parameter's path; some parameters may be absent (masked), and one may have several leaves.
  The outermost copy that contains a leaf determines its parameter.

  Args:
    paths: of the state's leaves.
    parameters: of the parameters.
  """
  paths, known = list(paths), set(parameters)
  found: dict[tuple[Path, int], Path | None] = {}  # (leaf, length of the node's path) -> parameter
  copies: dict[Path, bool] = {}
  for path in paths:
    for cut in range(len(path) + 1):
      rest = path[cut:]
      heads = (rest[:end] for end in range(1, len(rest) + 1))
      owner = next((head for head in heads if head in known), None)
      found[path, cut] = owner
      copies[path[:cut]] = copies.get(path[:cut], True) and owner is not None
  result = {}
  for path in paths:
    cut = next((cut for cut in range(len(path) + 1) if copies[path[:cut]]), None)
    result[path] = None if cut is None else found[path, cut]
  return result


def candidates(shape: Sequence[int], whole: Sequence[int]) -> list[Kept | Square]:
  """Returns every way in which a shape is another one with dims removed or set to 1, or of squares.

  Args:
    shape: of a statistic.
    whole: of its parameter.

  Returns:
    For each way, the dims that remain, in order; or what the squares are of.
  """
  if tuple(shape) == tuple(whole):
    return [tuple(range(len(whole)))]
  return [*_kept(shape, whole), *_squares(shape, whole)]


def _kept(shape: Sequence[int], whole: Sequence[int]) -> list[Kept]:
  if len(shape) == len(whole):
    kept = tuple(i for i, (n, m) in enumerate(zip(shape, whole, strict=True)) if n == m)
    others = (shape[i] for i in range(len(whole)) if i not in kept)
    return [kept] if all(size == 1 for size in others) else []
  chosen = itertools.combinations(range(len(whole)), len(shape))
  return [kept for kept in chosen if tuple(whole[i] for i in kept) == tuple(shape)]


def _squares(shape: Sequence[int], whole: Sequence[int]) -> list[Square]:
  if len(shape) < 2 or shape[-1] != shape[-2]:
    return []
  found = []
  for stack in itertools.combinations(range(len(whole)), len(shape) - 2):
    rest = tuple(dim for dim in range(len(whole)) if dim not in stack)
    if tuple(whole[dim] for dim in stack) == tuple(shape[:-2]):
      for cut in range(1, len(rest)):
        sides = rest[:cut], rest[cut:]
        found += [
          Square(stack, *sides, side)
          for side in sides
          if math.prod(whole[dim] for dim in side) == shape[-1]
        ]
  return found


def block_shape(
  path: Path, leaf: Any, leaves: Mapping[Path, Any], whole: Sequence[int]
) -> tuple[int, ...] | None:
  """Returns the shape of the blocks that an array of scales has a number for each of.

  Args:
    path: of the leaf.
    leaf: array or ShapeDtypeStruct.
    leaves: of the state.
    whole: shape of the parameter.

  Returns:
    A size for each dim; None if the leaf is no array of scales, with codes of the parameter's shape
    beside it.
  """
  codes = leaves.get((*path[:-1], CODES)) if path[-1] == SCALES else None
  if codes is None or codes.shape != tuple(whole) or len(leaf.shape) != len(whole):
    return None
  pairs = list(zip(whole, leaf.shape, strict=True))
  return None if any(n % m for n, m in pairs) else tuple(n // m for n, m in pairs)


def kept_by_trial(
  init: Callable[[Any], Any],
  parameters: Mapping[Path, jax.ShapeDtypeStruct],
) -> dict[Path, list[Kept | Square]]:
  """Returns state leaf -> the ways of `candidates`, as if each parameter's dims differed in size.

  Dims of equal size are ambiguous. So the state is evaluated abstractly once more, for parameters
  whose equal dims are made to differ as little as possible, the later ones being larger: the order
  that NumPy's and JAX's stable sorts give equal ones.

  Args:
    init: the optimizer's: parameters -> state.
    parameters: path -> shape and dtype.
  """
  distinct = {
    path: jax.ShapeDtypeStruct(_distinct(leaf.shape), leaf.dtype)
    for path, leaf in parameters.items()
  }
  leaves = leaves_by_path(jax.eval_shape(init, traverse_util.unflatten_dict(distinct)))
  whose = owners(leaves, distinct)
  return {
    path: candidates(leaf.shape, distinct[whose[path]].shape) if whose[path] else []
    for path, leaf in leaves.items()
  }


def leaves_by_path(tree: Any) -> dict[Path, Any]:
  """Returns path -> leaf, a path being the keys as text."""
  return {
    tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _distinct(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns a shape whose dims differ, in the same order by size."""
  sizes, least = list(shape), 0
  for position in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
    sizes[position] = least = max(sizes[position], least + 1)
  return tuple(sizes)


# ------------------------------ placement ------------------------------

# Most elements of an optimizer leaf that belongs to no parameter and is replicated.
SMALL = 64


def place_optimizer(
  abstract_opt_state: Any,
  parameters: Mapping[str, Placement],
  legend: Legend,
  table: Table,
  sizes: Mapping[str, int],
  overrides: Overrides = (),
  prefix: str = "optimizer/",
  init: Callable[[Any], Any] | None = None,
) -> tuple[dict[str, Placement], list[Failure]]:
  """Places every leaf of the optimizer's state by the dims of the parameter that it belongs to.

  A leaf of the parameter's shape has its letters; one whose shape is the parameter's with dims
  removed or set to 1 (Adafactor's rows and columns) has the letters of the remaining dims. Of
  squares of the size of one side of the parameter's matrices (SOAP's preconditioners), the rows are
  split over the axes of the matrices' rows, and the columns over those of their columns. Scales of
  an array in blocks are sharded as the array, whose blocks have to be whole on a device. Scalars,
  leaves of one element and small leaves of no parameter (a random key) are replicated. Any other
  leaf needs an override.

  Args:
    abstract_opt_state: the optimizer's state, arrays or ShapeDtypeStructs.
    parameters: the parameters' placements, which give the letters.
    legend: letter -> Dim.
    table: dim name -> mesh axes, for optimizer state (another one than the parameters' is ZeRO-1).
    sizes: mesh axis -> size.
    overrides: (name with its prefix, PartitionSpec entries).
    prefix: put before each leaf's name.
    init: the optimizer's, parameters -> state. It distinguishes dims of equal size; without it, a
      leaf for which they give different shardings needs an override.

  Returns:
    name -> Placement, and the failures.
  """
  tables, overrides = _Tables(legend, table, sizes), dict(overrides)
  by_path = {tuple(name.split("/")): name for name in parameters}
  leaves = leaves_by_path(abstract_opt_state)
  whose = owners(leaves, by_path)
  trial: dict | None = None
  placements, failures = {}, []
  for path, leaf in leaves.items():
    name = prefix + "/".join(path)
    owner = parameters[by_path[whose[path]]] if whose[path] else None
    ways = candidates(leaf.shape, owner.shape) if owner else []
    wrong: tuple[Failure, ...] = ()
    if name in overrides:
      placement, wrong = overridden(name, leaf, "", overrides[name], sizes)
    elif rule := _replication_rule(leaf, owner):
      placement = Placement(name, leaf.shape, leaf.dtype, "", rule, PartitionSpec())
    elif owner and (block := block_shape(path, leaf, leaves, owner.shape)):
      placement, wrong = _place_leaf(name, leaf, owner, Block(block), tables)
    else:
      found = [_place_leaf(name, leaf, owner, way, tables) for way in ways]
      if len({placed.spec for placed, _ in found}) > 1 and init is not None:
        if trial is None:
          arrays = {
            p: jax.ShapeDtypeStruct(parameters[n].shape, parameters[n].dtype)
            for p, n in by_path.items()
          }
          trial = kept_by_trial(init, arrays)
        by_trial = [kept for kept in trial.get(path, []) if kept in ways]
        found = [found[ways.index(kept)] for kept in by_trial[:1]] or found
      if len({placed.spec for placed, _ in found}) != 1:
        failures.append(_no_dims(name, leaf, owner, [placed.rule for placed, _ in found]))
        continue
      placement, wrong = found[0]
    placements[name] = placement
    failures.extend(failure.of(name) for failure in wrong)
  return placements, failures


class _Tables(NamedTuple):
  """What turns letters into a spec: arguments of `dims.resolve`."""

  legend: Legend
  table: Table
  sizes: Mapping[str, int]


def _replication_rule(leaf: Any, owner: Placement | None) -> str:
  """Returns the rule by which a leaf is replicated; "" where its dims decide."""
  if leaf.ndim == 0:
    return "scalar"
  if owner is not None and owner.shape == leaf.shape:
    return ""
  if leaf.size == 1:
    return "one element"
  if owner is None and leaf.size <= SMALL:
    return "no parameter's"
  return ""


def _place_leaf(
  name: str, leaf: Any, owner: Placement, way: Kept | Square | Block, tables: _Tables
) -> tuple[Placement, tuple[Failure, ...]]:
  """Places a leaf that follows from its parameter in this way; see `place_optimizer`."""
  rank, given = len(owner.shape), {"name": name, "shape": leaf.shape, "dtype": leaf.dtype}
  if len(owner.letters) != rank:  # the parameter's own failure, already reported
    return dataclasses.replace(owner, **given), ()
  dims = way if isinstance(way, tuple) else tuple(range(rank))
  if owner.rule == "override":
    entries, notes, wrong = spec_entries(owner.spec, rank), (), ()
    axes = {dim: entries[dim] for dim in dims}
  else:
    letters = "".join(owner.letters[dim] for dim in dims)
    found = resolve(letters, tuple(owner.shape[dim] for dim in dims), *tables)
    axes = dict(zip(dims, spec_entries(found.spec, len(dims)), strict=True))
    notes, wrong = found.notes, found.failures
  if isinstance(way, Square):
    split, letters, rule, more = _of_square(leaf, owner, way, axes, tables.sizes)
    notes = (*notes, *more)
  elif isinstance(way, Block):
    split, letters, rule = [*axes.values()], "", f"as {owner.name} in blocks of {way}"
    # The failures of the codes are not repeated.
    wrong = () if wrong else _cut_blocks(leaf, owner, way, axes, tables.sizes)
  else:
    gone = "".join(letter for dim, letter in enumerate(owner.letters) if dim not in dims)
    rule = f"as {owner.name}" + (f" without {gone}" if gone else "")
    whole = len(leaf.shape) == rank  # the others are of size 1
    split = [axes.get(dim, ()) for dim in range(rank)] if whole else [*axes.values()]
    letters = "" if whole and gone else "".join(owner.letters[dim] for dim in dims)
  spec = partition_spec(split)
  return Placement(**given, letters=letters, rule=rule, spec=spec, notes=notes), wrong


def _of_square(
  leaf: Any, owner: Placement, square: Square, axes: Mapping[int, Axes], sizes: Mapping[str, int]
) -> tuple[list[Axes], str, str, list[str]]:
  """Returns axes of each dim, letters, rule and notes of squares of a side of the matrices."""
  split, notes, size = [axes[dim] for dim in square.stack], [], leaf.shape[-1]
  for dims in (square.rows, square.columns):
    both = tuple(axis for dim in dims for axis in axes[dim])
    if size % axes_size(both, sizes):
      notes.append(f"{size} is replicated over {' x '.join(both)}, which does not divide it")
      both = ()
    split.append(both)
  side, stack = ("".join(owner.letters[x] for x in dims) for dims in (square.side, square.stack))
  letters = stack + 2 * side if len(side) == 1 else ""
  return split, letters, f"squares of {side} of {owner.name}", notes


def _cut_blocks(
  leaf: Any, owner: Placement, block: Block, axes: Mapping[int, Axes], sizes: Mapping[str, int]
) -> tuple[Failure, ...]:
  """Returns a failure for each dim whose shards would cut a block."""
  return tuple(
    Failure(
      f"shards of {owner.shape[i] // axes_size(split, sizes)} of dim {owner.letters[i]} = "
      f"{owner.shape[i]} (mesh axis {' x '.join(f'{axis}={sizes[axis]}' for axis in split)}) would "
      f"cut blocks of {block.shape[i]}, whose shape {block} is the same on every mesh; split it "
      f"over at most {leaf.shape[i]} devices, or set optimizer.state_dtype=bfloat16"
    )
    for i, split in axes.items()
    if leaf.shape[i] % axes_size(split, sizes)
  )


def _no_dims(name: str, leaf: Any, owner: Placement | None, rules: Sequence[str]) -> Failure:
  """Returns the failure of a leaf that no rule places."""
  if owner is None:
    why = f"but it belongs to no parameter and has more than {SMALL} elements"
  elif rules:
    why = f"which is {' or '.join(rules)}: dims of equal size, sharded differently"
  else:
    why = f"but {owner.name} has shape {owner.shape}, and it is not that with dims removed"
  text = (
    f"shape {leaf.shape}, {why}; give it an explicit spec, "
    f'partitioning.overrides=(("{name}", ({"None, " * leaf.ndim})),)'
  )
  return Failure(text, array=name)
