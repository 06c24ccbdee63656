"""Partition rules: parameter names -> dims -> PartitionSpecs, with all failures collected.

A rule is `pattern: letters`; the pattern must match a parameter's whole name (`re.fullmatch`).
There is no catch-all: replication has to be explicit.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.dims import (
  Failure,
  Legend,
  Table,
  axes_size,
  indivisible,
  partition_spec,
  resolve,
  spec_axes,
  spec_entries,
)

DEVICE, HOST = "device", "pinned_host"  # kinds of memory, as JAX names them
Overrides = Sequence[tuple[str, tuple]]  # (name, entries of an explicit PartitionSpec)


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
