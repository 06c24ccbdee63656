"""Dims: the named dimensions of a tensor, one letter each in a model's legend."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
Table = Mapping[str, Axes]  # dim name -> the mesh axes it takes, outermost first


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
