"""Names -> dims -> PartitionSpecs -> NamedShardings, with all failures collected.

A model's legend names the dims of its tensors, one letter each, and a rule says which dims a
parameter has: `pattern: letters`; the pattern must match a parameter's whole name (`re.fullmatch`).
A table says which mesh axes a dim takes. There is no catch-all: replication has to be explicit.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import humanize
import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]
Table = Mapping[str, Axes]  # dim name -> the mesh axes it takes, outermost first
DEVICE, HOST = "device", "pinned_host"  # kinds of memory, as JAX names them
Overrides = Sequence[tuple[str, tuple]]  # (name, entries of an explicit PartitionSpec)


# ------------------------------ dims ------------------------------


@dataclasses.dataclass(frozen=True)
class Dim:
  """One entry of a legend.

  Attributes:
    name: the dim's name, the key of the axis tables.
    size: its size in elements, or None where it differs between arrays (batch, sequence).
    may_replicate: the one exception to "an axis must divide it": the dim is replicated where its
      axes do not divide it, and the layout reports that.
    block: elements that count as one, of a dim of blocks that no shard may cut.
  """

  name: str
  size: int | None
  may_replicate: bool = False
  block: int = 1


Legend = Mapping[str, Dim]  # letter -> Dim


@dataclasses.dataclass(frozen=True)
class Failure:
  """One thing that is wrong with a layout; as a string, a line of the message.

  Attributes:
    text: what is wrong, the numbers and the fix, without the name of the array.
    cause: what is wrong as a value, the same for all arrays that fail for it and have the same
      fix: its kind, then the dim, size or axes; () where no other array can share it.
    array: the name of the array; "" if it concerns none.
  """

  text: str
  cause: tuple = ()
  array: str = ""

  def __str__(self) -> str:
    """Returns `layers/mlp/up/kernel: dim F (feedforward) = 54 is not ...`."""
    return f"{self.array}: {self.text}" if self.array else self.text

  def of(self, array: str) -> "Failure":
    """Returns this failure with the name of an array."""
    return dataclasses.replace(self, array=array)


@dataclasses.dataclass(frozen=True)
class Resolved:
  """The result for one array's letters: its spec, notes for the table, and failures."""

  spec: PartitionSpec
  notes: tuple[str, ...]
  failures: tuple[Failure, ...]


def axes_size(axes: Axes, sizes: Mapping[str, int]) -> int:
  """Returns the number of shards of a dim that these axes split."""
  count = 1
  for axis in axes:
    count *= sizes[axis]
  return count


def resolve(
  letters: str, shape: tuple[int, ...], legend: Legend, table: Table, sizes: Mapping[str, int]
) -> Resolved:
  """Turns one array's letters into a PartitionSpec, collecting all failures.

  Axes of size 1 are left out of the spec, but an axis that is used twice is a failure at size 1
  too: an error in a table should show on every mesh.

  Args:
    letters: one letter of the legend per dim.
    shape: the array's logical (global) shape.
    legend: letter -> Dim.
    table: dim name -> mesh axes.
    sizes: mesh axis -> size.
  """
  if len(letters) != len(shape):
    text = f"dims {letters} have rank {len(letters)}, its shape is {shape}"
    return Resolved(PartitionSpec(), (), (Failure(text, ("rank", letters, tuple(shape))),))
  entries, notes, failures, seen = [], [], [], {}
  for letter, size in zip(letters, shape, strict=True):
    dim = legend.get(letter)
    if dim is None or dim.name not in table:
      known = ", ".join(f"{key} {value.name}" for key, value in legend.items())
      what = "is not in the legend" if dim is None else f"({dim.name}) is not in the axis table"
      failures.append(Failure(f"dim {letter} {what} ({known})", ("unknown dim", letter)))
      entries.append(())
      continue
    if dim.size is not None and dim.size != size:
      text = f"dim {letter} ({dim.name}) has size {size}, its legend says {dim.size}"
      failures.append(Failure(text, ("size", letter, size)))
    axes = table[dim.name]
    for axis in axes:
      if axis in seen:
        text = f"mesh axis {axis} splits both dim {letter} and dim {seen[axis]}"
        failures.append(Failure(text, ("axis taken twice", axis, letter, seen[axis])))
      seen[axis] = letter
      if axis not in sizes:
        known = ", ".join(sizes)
        text = f"dim {letter} ({dim.name}) takes unknown mesh axis {axis!r}; the axes are {known}"
        failures.append(Failure(text, ("unknown axis", letter, axis)))
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    parts = axes_size(axes, sizes)
    if size % parts and dim.may_replicate:
      notes.append(f"{dim.name}={size} is replicated: {_axes_text(axes, sizes)} does not divide it")
      axes = ()
    elif size % parts:
      failures.append(indivisible(letter, dim.name, size, axes, sizes, block=dim.block))
    entries.append(axes)
  return Resolved(partition_spec(entries), tuple(notes), tuple(failures))


def indivisible(
  letter: str,
  name: str,
  size: int,
  axes: Axes,
  sizes: Mapping[str, int],
  where: str = "",
  *,
  block: int = 1,
) -> Failure:
  """Returns the failure of a dim that its axes do not divide, with the nearest sizes that work.

  Args:
    letter: of the dim.
    name: of the dim.
    size: in elements.
    axes: mesh axes.
    sizes: mesh axis -> size.
    where: prefix of the message.
    block: elements that count as one.
  """
  parts = axes_size(axes, sizes)
  below, above = (size // parts * parts * block, (size // parts + 1) * parts * block)
  of_blocks = f" blocks of {block}" if block > 1 else ""
  near = f"{below} or {above}" if below else f"{above}"
  fix = f"make {name} {near}"
  if len(axes) == 1:
    fix += f", or set mesh.{axes[0]}={math.gcd(size, parts)}"
  text = (
    f"{where}dim {letter} ({name}) = {size}{of_blocks} is not divisible by mesh axis "
    f"{_axes_text(axes, sizes)}; {fix}"
  )
  return Failure(text, ("indivisible", letter, name, size, axes))


def _axes_text(axes: Axes, sizes: Mapping[str, int]) -> str:
  return " x ".join(f"{axis}={sizes[axis]}" for axis in axes)


def spec_entries(spec: Iterable, rank: int | None = None) -> tuple[Axes, ...]:
  """Returns the mesh axes of each dim, outermost first; `()` where a dim is not sharded.

  In a PartitionSpec a dim's axes are None, one name or a tuple, and the last dims may be omitted.

  Args:
    spec: a PartitionSpec, or its entries.
    rank: the array's rank; None: the number of entries of the spec.
  """
  entries = tuple(
    () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec
  )
  return entries + ((),) * ((rank or 0) - len(entries))


def partition_spec(entries: Iterable[Axes]) -> PartitionSpec:
  """Returns the spec of dims that are sharded over these axes: the inverse of `spec_entries`."""
  return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


def spec_axes(spec: PartitionSpec) -> set[str]:
  """Returns the mesh axes that a spec names."""
  return {axis for axes in spec_entries(spec) for axis in axes}


# ------------------------------ rules ------------------------------


class LayoutError(ValueError):
  """The layout is wrong; the message lists every failure, one per line."""

  def __init__(self, failures: Iterable[Failure | str]):
    """Joins the failures into one message."""
    self.failures = tuple(map(str, failures))
    count = len(self.failures)
    head = f"the layout is refused ({count} {'failure' if count == 1 else 'failures'}):"
    super().__init__("\n".join([head, *(f"  {failure}" for failure in self.failures)]))


@dataclasses.dataclass(frozen=True)
class Placement:
  """How one array of the state or the batch is sharded.

  Attributes:
    name: `layers/mlp/up/kernel`, `optimizer/0/mu/layers/mlp/up/kernel`, `batch/tokens`.
    shape: logical (global) shape.
    dtype: NumPy dtype.
    letters: its dims, or "" where an override or a scalar has none.
    rule: the pattern that matched, or what was used instead.
    spec: the PartitionSpec, without axes of size 1.
    notes: remarks, such as a kv_heads dim that is replicated.
    memory: `device`, or the kind of a host's memory that it is in.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any
  letters: str
  rule: str
  spec: PartitionSpec
  notes: tuple[str, ...] = ()
  memory: str = DEVICE


def named_leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
  """Returns name -> leaf, a name being the path with `/` between its keys."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    prefix + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
  }


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts of leaves by name, a level for each part of the names.

  Containers of other kinds (the optimizer's named tuples) become dicts: `optimizer/0/mu` is
  `["0"]["mu"]`.
  """
  return traverse_util.unflatten_dict(leaves, sep="/")


def letters_of(name: str, rules: Mapping[str, str]) -> str:
  """Returns the letters of a parameter; "" where not exactly one rule matches its name."""
  matching = [letters for pattern, letters in rules.items() if re.fullmatch(pattern, name)]
  return matching[0] if len(matching) == 1 else ""


def place_parameters(
  abstract_params: Any,
  rules: Mapping[str, str],
  legend: Legend,
  table: Table,
  sizes: Mapping[str, int],
  overrides: Overrides = (),
) -> tuple[dict[str, Placement], list[Failure]]:
  """Places every parameter by the rule that matches its name.

  Args:
    abstract_params: a tree of arrays or ShapeDtypeStructs.
    rules: pattern -> letters.
    legend: letter -> Dim.
    table: dim name -> mesh axes, for parameters.
    sizes: mesh axis -> size.
    overrides: (name, PartitionSpec entries), applied after matching.

  Returns:
    name -> Placement, and the failures: a parameter that no rule or more than one matches, a
    rule that matches nothing, and whatever `dims.resolve` or an override finds.
  """
  overrides = dict(overrides)
  leaves = named_leaves(abstract_params)
  placements, failures, used = {}, [], set()
  for name, leaf in leaves.items():
    matching = [pattern for pattern in rules if re.fullmatch(pattern, name)]
    used.update(matching)
    if len(matching) != 1:
      failures.append(_not_one_rule(name, leaf.shape, matching))
      continue
    letters = rules[matching[0]]
    if name in overrides:
      placement, wrong = overridden(name, leaf, letters, overrides[name], sizes)
      # The letters still have to be right: optimizer leaves are sharded by them.
      whole = dict.fromkeys(table, ())
      wrong += resolve(letters, leaf.shape, legend, whole, sizes).failures
    else:
      found = resolve(letters, leaf.shape, legend, table, sizes)
      placement = Placement(
        name, leaf.shape, leaf.dtype, letters, matching[0], found.spec, found.notes
      )
      wrong = found.failures
    placements[name] = placement
    failures.extend(failure.of(name) for failure in wrong)
  failures.extend(
    Failure(f"rule {pattern!r}: matches no parameter; remove it, or correct its name")
    for pattern in rules
    if pattern not in used
  )
  return placements, failures


def unknown_overrides(overrides: Overrides, names: Iterable[str]) -> list[Failure]:
  """Returns a failure for each override whose name no array has, or that is given twice."""
  names, given = set(names), [name for name, _ in overrides]
  return [
    Failure(f"partitioning.overrides: {name!r} {wrong}")
    for name in dict.fromkeys(given)
    for wrong, found in (
      ("is neither a parameter nor an optimizer leaf", name not in names),
      ("is given twice; keep one of them", given.count(name) > 1),
    )
    if found
  ]


def check_table(
  title: str, table: Table, legend: Legend, sizes: Mapping[str, int]
) -> list[Failure]:
  """Returns failures of an axis table itself: unknown axes, and dims that the model lacks."""
  dims = sorted({dim.name for dim in legend.values()})
  failures = [
    Failure(f"{title}.{name}: the model has no dim of this name; its dims are {', '.join(dims)}")
    for name in table
    if name not in dims
  ]
  for name, axes in table.items():
    failures.extend(
      Failure(f"{title}.{name}: unknown mesh axis {axis!r}; the axes are {', '.join(sizes)}")
      for axis in axes
      if axis not in sizes
    )
  return failures


def unused_axes(sizes: Mapping[str, int], used: set[str]) -> list[Failure]:
  """Returns a failure for each axis larger than 1 that splits nothing."""
  return [
    Failure(
      f"mesh.{axis}={size}: no parameter, activation or schedule of this model uses it, so it "
      f"would only repeat work; set mesh.{axis}=1"
    )
    for axis, size in sizes.items()
    if size > 1 and axis not in used
  ]


def _not_one_rule(name: str, shape: tuple[int, ...], matching: list[str]) -> Failure:
  if not matching:
    text = f"no rule matches this parameter of shape {tuple(shape)}; add one to its table"
  else:
    rules = " and ".join(repr(pattern) for pattern in matching)
    text = f"{len(matching)} rules match, {rules}; exactly one must"
  return Failure(text, array=name)


def overridden(
  name: str, leaf: Any, letters: str, entries: tuple, sizes: Mapping[str, int]
) -> tuple[Placement, tuple[Failure, ...]]:
  """Checks an explicit PartitionSpec as strictly as one made from letters."""
  failures = [
    Failure(f"override: {entry!r} is not a mesh axis, a tuple of them or None")
    for entry in entries
    if not (
      entry is None
      or isinstance(entry, str)
      or (isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry))
    )
  ]
  named = () if failures else spec_entries(entries)
  flat = [axis for axes in named for axis in axes]
  failures += [
    Failure(f"override: unknown mesh axis {axis!r}") for axis in flat if axis not in sizes
  ]
  failures += [
    Failure(f"override: mesh axis {axis} is used twice")
    for axis in dict.fromkeys(flat)
    if flat.count(axis) > 1
  ]
  if len(entries) > leaf.ndim:
    text = f"override: {len(entries)} entries for shape {tuple(leaf.shape)}"
    failures.append(Failure(text))
  if failures:
    named = ()
  kept = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in named]
  for position, (axes, size) in enumerate(zip(kept, leaf.shape, strict=False)):
    if size % axes_size(axes, sizes):
      letter = letters[position] if len(letters) == leaf.ndim else str(position)
      failures.append(indivisible(letter, "its size", size, axes, sizes, "override: "))
  spec = partition_spec(kept)
  placement = Placement(name, leaf.shape, leaf.dtype, letters, "override", spec)
  return placement, tuple(failures)


def used_axes(placements: Iterable[Placement]) -> set[str]:
  """Returns the mesh axes that some array is split over."""
  return set().union(*(spec_axes(placement.spec) for placement in placements))


# ------------------------------ optimizer state ------------------------------
# Copies of the parameter tree are found by structure, without knowing a state's fields by name.
# A factored statistic (Adafactor's `v_row`) is sharded by the dims that it keeps of its parameter,
# a square one (SOAP's preconditioners) by those of the matrix that it is multiplied by, and the
# scales of an array in blocks as the array.

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


# ------------------------------ arrays on a mesh ------------------------------


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


def over_replicated(
  state: Sequence[Placement], sizes: Mapping[str, int], limit: int | None
) -> list[Failure]:
  """Returns a failure if more bytes of these arrays are replicated than allowed; None: any."""
  count = replicated_bytes(state, sizes)
  if limit is None or count <= limit:
    return []
  devices = math.prod(sizes.values())
  largest = max(
    (placement for placement in state if copies(placement, sizes) == devices),
    key=lambda placement: bytes_per_device(placement, sizes),
  )
  text = (
    f"{size_text(count)} per device are replicated; partitioning.max_replicated_bytes={limit} "
    f"({size_text(limit)}); the largest is {largest.name} {shape_text(largest.shape)}; split its "
    "dims in partitioning.parameters"
  )
  return [Failure(text)]


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
