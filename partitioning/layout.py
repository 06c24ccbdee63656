"""The layout as people read it: a row per array, its bytes per device, two strategies compared."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import humanize
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

from partitioning.dims import Legend, axes_size, partition_spec, spec_axes, spec_entries
from partitioning.rules import LayoutError, Placement, named_leaves


def shard_shape(
  shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
  """Returns the shape of the piece that one device holds."""
  entries = spec_entries(spec, len(shape))
  return tuple(size // axes_size(axes, sizes) for size, axes in zip(shape, entries, strict=True))


def spread(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns the spec with the axes that it leaves out put on the first dim that they divide.

  So an array that devices hold copies of is cut among them instead; where the axes divide no
  dim, the spec stays as it is.
  """
  left_out = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in spec_axes(spec))
  entries = list(spec_entries(spec, len(shape)))
  for position, size in enumerate(shard_shape(shape, spec, sizes)):
    if left_out and size % axes_size(left_out, sizes) == 0:
      entries[position] += left_out
      break
  return partition_spec(entries)


def bytes_per_device(placement: Placement, sizes: Mapping[str, int]) -> int:
  """Returns the bytes of this array that one device holds."""
  shard = shard_shape(placement.shape, placement.spec, sizes)
  return math.prod(shard) * np.dtype(placement.dtype).itemsize


def copies(placement: Placement, sizes: Mapping[str, int]) -> int:
  """Returns how many devices hold each element of this array."""
  shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
  return math.prod(sizes.values()) * shard // max(1, math.prod(placement.shape))


def replicated_bytes(placements: Iterable[Placement], sizes: Mapping[str, int]) -> int:
  """Returns the bytes per device of arrays that every device holds whole (0 on one device)."""
  devices = math.prod(sizes.values())
  if devices == 1:
    return 0
  return sum(bytes_per_device(p, sizes) for p in placements if copies(p, sizes) == devices)


def spec_text(spec: PartitionSpec, rank: int) -> str:
  """Returns `(-, fsdp, tensor)`, a dash where a dim is whole."""
  return f"({', '.join('+'.join(axes) or '-' for axes in spec_entries(spec, rank))})"


def shape_text(shape: Sequence[int]) -> str:
  """Returns `[4, 128]`."""
  return f"[{', '.join(map(str, shape))}]"


def size_text(count: int) -> str:
  """Returns bytes with a binary unit, `1.5 MiB`."""
  return humanize.naturalsize(count, binary=True)


def legend_text(legend: Legend) -> str:
  """Returns the legend, a line per letter."""
  lines = ["legend: letter, dim, size"]
  for letter, dim in legend.items():
    size = "differs" if dim.size is None else str(dim.size)
    exception = "  (may replicate where its axes do not divide it)" if dim.may_replicate else ""
    lines.append(f"  {letter}  {dim.name:<14} {size:>8}{exception}")
  return "\n".join(lines)


def layout_text(
  sections: Mapping[str, Sequence[Placement]], sizes: Mapping[str, int], *, whole: bool = True
) -> str:
  """Returns the layout table: a row per array, the bytes per device, and what is replicated.

  Args:
    sections: title (`parameters`, `optimizer`, `batch`) -> placements.
    sizes: mesh axis -> size.
    whole: False leaves out types and rules, and gives the optimizer one line for all leaves.
  """
  more = ("dtype", "dims", "rule") if whole else ()
  table = _table("array", "shape", *more, "spec", "shard")
  table.add_column("bytes/device", justify="right")
  table.add_column("copies", justify="right")
  for title, placements in sections.items():
    total = sum(bytes_per_device(p, sizes) for p in placements)
    table.add_row(title, *[""] * (3 + len(more)), size_text(total), "", style="bold")
    for p in placements if whole or title != "optimizer" else ():
      table.add_row(
        f"  {p.name}",
        shape_text(p.shape),
        *((str(np.dtype(p.dtype)), p.letters or "-", p.rule) if whole else ()),
        spec_text(p.spec, len(p.shape)),
        shape_text(shard_shape(p.shape, p.spec, sizes)),
        size_text(bytes_per_device(p, sizes)),
        str(copies(p, sizes)),
      )
    table.add_section()
  notes = [f"note: {p.name}: {note}" for ps in sections.values() for p in ps for note in p.notes]
  return "\n".join([render(table), *notes])


def against_text(
  ours: Mapping[str, Placement],
  theirs: Mapping[str, Placement],
  sizes: tuple[Mapping[str, int], Mapping[str, int]],
  titles: tuple[str, str],
) -> str:
  """Returns two layouts side by side; `*` marks an array that differs."""
  table = _table("", "array", "shape")
  for title in titles:
    table.add_column(title)
    table.add_column("bytes/device", justify="right")
  for name in [*ours, *(name for name in theirs if name not in ours)]:
    pair = (ours.get(name), theirs.get(name))
    cells = []
    for placement, size in zip(pair, sizes, strict=True):
      if placement is None:
        cells.append(("not there", "0 Bytes"))
      else:
        spec = spec_text(placement.spec, len(placement.shape))
        cells.append((spec, size_text(bytes_per_device(placement, size))))
    shapes = list(dict.fromkeys(shape_text(p.shape) for p in pair if p))
    differs = "*" if cells[0] != cells[1] else ""
    table.add_row(differs, name, " | ".join(shapes), *cells[0], *cells[1])
  totals = [
    size_text(sum(bytes_per_device(p, size) for p in placements.values()))
    for placements, size in zip((ours, theirs), sizes, strict=True)
  ]
  table.add_row("", "all", "", "", totals[0], "", totals[1], style="bold")
  return render(table)


def check_placed(tree: Any, placements: Mapping[str, Placement], mesh: Mesh, prefix: str = ""):
  """Compares the sharding that every leaf really has with its spec.

  Args:
    tree: placed arrays.
    placements: name -> Placement, a name for each leaf.
    mesh: the mesh that the specs speak of.
    prefix: put before each leaf's name.

  Raises:
    LayoutError: naming every leaf that lies otherwise.
  """
  failures = []
  for name, leaf in named_leaves(tree, prefix).items():
    wanted = NamedSharding(mesh, placements[name].spec)
    if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
      is_text = getattr(leaf.sharding, "spec", leaf.sharding)
      failures.append(f"{name}: lies as {is_text}, its spec says {wanted.spec}")
  if failures:
    raise LayoutError(failures)


def shardings(tree: Any, placements: Mapping[str, Placement], mesh: Mesh, prefix: str = "") -> Any:
  """Returns a tree like `tree`, with each leaf's NamedSharding."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: NamedSharding(
      mesh, placements[prefix + jax.tree_util.keystr(path, simple=True, separator="/")].spec
    ),
    tree,
  )


def render(table: Table) -> str:
  """Returns a rich table as plain text, as wide as it needs to be."""
  # Plain: rich would read the brackets of a pattern as markup, and cut what is too wide.
  plain = {"color_system": None, "markup": False, "emoji": False, "highlight": False}
  console = Console(file=io.StringIO(), width=10_000, **plain)
  console.print(table)
  return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def _table(*columns: str) -> Table:
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for column in columns:
    table.add_column(column, no_wrap=True)
  return table
