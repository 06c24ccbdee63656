"""Names -> dims -> PartitionSpecs -> NamedShardings, with all failures collected.

A model's legend names the dims of its tensors, one letter each, and a rule says which dims a
parameter has: `pattern: letters`; the pattern must match a parameter's whole name (`re.fullmatch`).
A table says which mesh axes a dim takes. There is no catch-all: replication has to be explicit.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
  """

  name: str
  size: int | None
  may_replicate: bool = False


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
      failures.append(indivisible(letter, dim.name, size, axes, sizes))
    entries.append(axes)
  return Resolved(partition_spec(entries), tuple(notes), tuple(failures))


def indivisible(
  letter: str, name: str, size: int, axes: Axes, sizes: Mapping[str, int], where: str = ""
) -> Failure:
  """Returns the failure of a dim that its axes do not divide, with the nearest sizes that work.

  Args:
    letter: of the dim.
    name: of the dim.
    size: in elements.
    axes: mesh axes.
    sizes: mesh axis -> size.
    where: prefix of the message.
  """
  parts = axes_size(axes, sizes)
  below, above = size // parts * parts, (size // parts + 1) * parts
  near = f"{below} or {above}" if below else f"{above}"
  fix = f"make {name} {near}"
  if len(axes) == 1:
    fix += f", or set mesh.{axes[0]}={math.gcd(size, parts)}"
  text = (
    f"{where}dim {letter} ({name}) = {size} is not divisible by mesh axis "
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
