"""Pictures of arrays on a mesh: which devices hold which block, for the terminal and as SVG.

What is drawn is read from the sharding's own map of devices to indices, not from its spec.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from rich.text import Text

from partitioning.dims import partition_spec, spec_axes, spec_entries
from partitioning.rules import Placement
from reports import svg as svg_drawing
from reports.grid import (
  Cell,
  Edge,
  Sheet,
  at,
  cell_height,
  cell_width,
  gap_text,
  labels_text,
  numbers_text,
  shown,
)

# More rows or panels than these are drawn with a gap.
TERMINAL_ROWS = 8
TERMINAL_PANELS = 4


@dataclasses.dataclass(frozen=True)
class Block:
  """A piece of an array: its place in the global array, and the ids of all devices holding it."""

  index: tuple[slice, ...]
  devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Picture:
  """How one array lies.

  Attributes:
    title: such as the array's name.
    shape: global shape.
    dims: a name per dim, or nothing.
    spec: the mesh axes along which each dim's place changes, as seen; None for a whole dim.
    sizes: mesh axis -> size; empty where the sharding has no mesh.
    blocks: the distinct pieces, in the order of their places.
  """

  title: str
  shape: tuple[int, ...]
  dims: tuple[str, ...]
  spec: PartitionSpec
  sizes: Mapping[str, int]
  blocks: tuple[Block, ...]

  @property
  def copied(self) -> tuple[str, ...]:
    """Returns the mesh axes along which every device holds the same."""
    return tuple(a for a, size in self.sizes.items() if size > 1 and a not in spec_axes(self.spec))


@dataclasses.dataclass(frozen=True)
class Holdings:
  """What each device of a mesh holds, in words.

  Attributes:
    title: one line.
    mesh: the mesh that it is drawn as.
    values: device id -> text, lines divided by newlines.
  """

  title: str
  mesh: Mesh
  values: Mapping[int, str]


def picture(
  shape: Sequence[int], sharding: Sharding, *, title: str = "", dims: Iterable[str] = ()
) -> Picture:
  """Returns how an array of this shape lies.

  Args:
    shape: global shape.
    sharding: a NamedSharding, or another one that maps devices to indices.
    title: such as the array's name.
    dims: a name per dim, `("batch", "model")` or `"BD"`.

  Raises:
    ValueError: as many names as there are dims are not given, or the sharding does not divide
      the shape.
  """
  shape, dims = tuple(shape), tuple(dims)
  if dims and len(dims) != len(shape):
    raise ValueError(f"dims {', '.join(dims)}: {len(dims)} names for shape {shape}")
  places = {
    device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    for device, index in sharding.devices_indices_map(shape).items()
  }
  holders: dict[tuple, list[int]] = {}
  for device, place in places.items():
    holders.setdefault(place, []).append(device.id)
  blocks = tuple(
    Block(tuple(slice(*ends) for ends in place), tuple(sorted(holders[place])))
    for place in sorted(holders)
  )
  mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
  spec = PartitionSpec(*(None,) * len(shape)) if mesh is None else _seen_spec(mesh, places)
  return Picture(title, shape, dims, spec, dict(mesh.shape) if mesh else {}, blocks)


def holdings(title: str, mesh: Mesh, values: Mapping[int, str]) -> Holdings:
  """Returns what each device holds, to be drawn as the mesh is.

  Args:
    title: one line.
    mesh: devices and their axes.
    values: device id -> text; a device that is not named holds nothing.

  Raises:
    ValueError: a device that the mesh does not have.
  """
  if unknown := sorted(set(values) - {device.id for device in mesh.devices.flat}):
    raise ValueError(f"{title}: the mesh has no device {', '.join(map(str, unknown))}")
  return Holdings(title, mesh, dict(values))


def _seen_spec(mesh: Mesh, places: Mapping[jax.Device, tuple]) -> PartitionSpec:
  """Returns, for each dim, the axes along which its place changes; the widest steps first."""
  rank = len(next(iter(places.values())))
  starts = np.zeros((rank, *mesh.devices.shape), np.int64)
  for position, device in np.ndenumerate(mesh.devices):
    starts[(slice(None), *position)] = [start for start, _ in places[device]]
  entries = []
  for start in starts:
    steps = {
      axis: np.abs(np.diff(start, axis=i)).max(initial=0) for i, axis in enumerate(mesh.axis_names)
    }
    axes = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
    entries.append(tuple(axes))
  return partition_spec(entries)


# ------------------------------ picture -> sheet ------------------------------


def sheet(drawn: Picture | Holdings) -> Sheet:
  """Returns the sheet of a picture: what terminal and SVG both draw."""
  return _sheet_of_array(drawn) if isinstance(drawn, Picture) else _sheet_of_mesh(drawn)


def _sheet_of_array(p: Picture) -> Sheet:
  """The last two dims that are split make the grid, further ones a panel per piece."""
  rank = len(p.shape)
  parts = [sorted({(b.index[d].start, b.index[d].stop) for b in p.blocks}) for d in range(rank)]
  split = [d for d in range(rank) if len(parts[d]) > 1]
  row, column = _grid_dims(rank, split)
  outer = [d for d in split if d not in (row, column)]
  panels: dict[str, dict] = {}
  for group, block in enumerate(p.blocks):
    ends = [(part.start, part.stop) for part in block.index]
    caption = ", ".join(f"{_name(p, d)} {ends[d][0]}:{ends[d][1]}" for d in outer)
    place = tuple(0 if d is None else parts[d].index(ends[d]) for d in (row, column))
    cell = Cell(numbers_text(block.devices), group, int(len(block.devices) > 1))
    panels.setdefault(caption, {})[place] = cell
  letters = "".join(p.dims) if all(len(name) == 1 for name in p.dims) else ""
  what = f"{letters} {list(p.shape)}" if rank else "(scalar)"
  return Sheet(
    " ".join(f"{p.title} {what}".split()),
    _edge(p, row, parts),
    _edge(p, column, parts),
    panels,
    _notes(p, [d for d in range(rank) if d not in (row, column)], parts),
    turnable=rank == 1,
  )


def _grid_dims(rank: int, split: list[int]) -> tuple[int | None, int | None]:
  """Returns the dims that are drawn downwards and across."""
  if rank < 2:
    return None, 0 if rank else None
  if len(split) > 1:
    return split[-2], split[-1]
  if split and split[0] < rank - 1:
    return split[0], rank - 1
  return rank - 2, rank - 1


def _name(p: Picture, d: int) -> str:
  return p.dims[d] if p.dims else f"dim {d}"


def _cut(p: Picture, d: int, parts: list) -> str:
  """Returns `over tensor (2 x 192)`."""
  if len(parts[d]) == 1:
    return "whole"
  lengths = {stop - start for start, stop in parts[d]}
  pieces = f"{len(parts[d])} x {lengths.pop()}" if len(lengths) == 1 else f"{len(parts[d])} pieces"
  axes = "+".join(spec_entries(p.spec)[d])
  return f"over {axes} ({pieces})" if axes else f"in {pieces}"


def _edge(p: Picture, d: int | None, parts: list) -> Edge:
  if d is None:
    return Edge()
  labels = tuple(f"{start}:{stop}" for start, stop in parts[d]) if len(parts[d]) > 1 else ("",)
  return Edge(f"{_name(p, d)} = {p.shape[d]}", _cut(p, d, parts), labels)


def _notes(p: Picture, undrawn: list[int], parts: list) -> tuple[str, ...]:
  notes = []
  for d in undrawn:
    if len(parts[d]) > 1:
      notes.append(f"a panel per piece of {_name(p, d)} = {p.shape[d]}, {_cut(p, d, parts)}")
  if whole := [f"{_name(p, d)} = {p.shape[d]}" for d in undrawn if len(parts[d]) == 1]:
    notes.append(f"whole, not drawn: {', '.join(whole)}")
  counts = sorted({len(block.devices) for block in p.blocks})
  if counts[-1] > 1:
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = "the array is" if len(p.blocks) == 1 else "each block is"
    along = f", copies along {' and '.join(p.copied)}" if p.copied else ""
    notes.append(f"{what} on {number} devices{along}")
  return tuple(notes)


def _sheet_of_mesh(h: Holdings) -> Sheet:
  """The last two axes larger than 1 make the grid, further ones a panel per position."""
  names, devices = h.mesh.axis_names, h.mesh.devices
  long = [i for i, size in enumerate(devices.shape) if size > 1]
  row = long[-2] if len(long) > 1 else None
  column = long[-1] if long else None
  counts: dict[str, int] = {}
  for text in filter(None, h.values.values()):
    counts[text] = counts.get(text, 0) + 1
  groups = {text: group for group, text in enumerate(counts)}
  hatches = {text: i + 1 for i, text in enumerate(t for t, count in counts.items() if count > 1)}
  panels: dict[str, dict] = {}
  for position, device in np.ndenumerate(devices):
    caption = ", ".join(f"{names[i]} {position[i]}" for i in long[:-2])
    place = tuple(0 if i is None else position[i] for i in (row, column))
    text = h.values.get(device.id)
    lines = _holding(device.id, text)
    cell = Cell(lines, groups.get(text, len(groups)), hatches.get(text, 0))
    panels.setdefault(caption, {})[place] = cell
  edges = [
    Edge() if i is None else Edge(f"{names[i]} = {devices.shape[i]}", "", ("",) * devices.shape[i])
    for i in (row, column)
  ]
  notes = ("in each box: the device, and what it holds",) if counts else ()
  return Sheet(h.title, *edges, panels, notes, turnable=row is None)


def _holding(number: int, text: str | None) -> tuple[str, ...]:
  """Returns `3: [0 1]`, further lines below the first; the number alone for an empty text."""
  if text == "":
    return (f"{number}",)
  head = f"{number}: "
  first, *more = (head + ("-" if text is None else text)).splitlines()
  lines = [first, *(" " * len(head) + line for line in more)]
  # Of one length, so that they stand below one another also where they are centred.
  return tuple(line.ljust(max(map(len, lines))) for line in lines)


# ------------------------------ sheet -> terminal, SVG ------------------------------


def svg(drawn: Picture | Holdings, *, width: int = 720) -> str:
  """Returns the picture as an SVG element that needs nothing else.

  Args:
    drawn: a picture or holdings.
    width: that it may take, in pixels; what does not fit is drawn with a gap.
  """
  return svg_drawing.draw(sheet(drawn), width)


def terminal(drawn: Picture | Holdings, *, width: int = 80) -> Text:
  """Returns the picture in box-drawing characters; what does not fit is drawn with a gap.

  Args:
    drawn: a picture or holdings.
    width: in characters. Long names are not cut for it.
  """
  s = sheet(drawn)
  if s.turnable and len(s.columns.labels) * (cell_width(s) + 3) + 1 > width:
    s = s.turned()
  tiles = [
    [gap_text(captions, len(s.panels))] if i is None else _panel(s, list(s.panels)[i], width)
    for captions in [shown(len(s.panels), TERMINAL_PANELS)]
    for i in captions
  ]
  lines = [*textwrap.wrap(s.title, width), *_side_by_side(tiles, width)]
  notes = [line for note in s.notes for line in textwrap.wrap(note, width)]
  return Text("\n".join([*lines, *notes]), no_wrap=True, overflow="ignore")


def _panel(s: Sheet, caption: str, width: int) -> list[str]:
  """Returns the lines of one panel."""
  gutter = max(map(len, (s.rows.title, s.rows.under, *s.rows.labels)))
  size = cell_width(s)
  columns = shown(len(s.columns.labels), (width - gutter - 2) // (size + 3))
  rows = shown(len(s.rows.labels), TERMINAL_ROWS)
  widths = [
    size if c is not None else len(gap_text(columns, len(s.columns.labels))) for c in columns
  ]
  labels = labels_text(s.columns, columns)
  title = ", ".join(filter(None, (s.columns.title, s.columns.under)))
  lines = [caption] if caption else []
  lines.append(f"{s.rows.title:>{gutter}}   {title}")
  lines.append(
    f"{s.rows.under:>{gutter}}   "
    + "   ".join(f"{label:<{w}}" for label, w in zip(labels, widths, strict=True))
  )
  lines = [line.rstrip() for line in lines if line.strip()]
  for i, (row, label) in enumerate(zip(rows, labels_text(s.rows, rows), strict=True)):
    lines.append(_rule(gutter, widths, "├┼┤" if i else "┌┬┐"))
    cells = [at(s, caption, row, column) for column in columns]
    for j in range(1 if row is None else cell_height(s)):
      texts = [cell.lines[j] if j < len(cell.lines) else "" for cell in cells]
      inside = " │ ".join(f"{text:<{w}}" for text, w in zip(texts, widths, strict=True))
      lines.append(f"{label if j == 0 else '':>{gutter}} │ {inside} │")
  return [*lines, _rule(gutter, widths, "└┴┘")]


def _rule(gutter: int, widths: list[int], corners: str) -> str:
  return (
    " " * (gutter + 1) + corners[0] + corners[1].join("─" * (w + 2) for w in widths) + corners[2]
  )


def _side_by_side(tiles: list[list[str]], width: int) -> list[str]:
  """Returns the lines of panels, as many beside one another as fit."""
  size = max(len(line) for tile in tiles for line in tile) + 3
  count = max(1, (width + 3) // size)
  lines = []
  for start in range(0, len(tiles), count):
    for parts in itertools.zip_longest(*tiles[start : start + count], fillvalue=""):
      lines.append("".join(f"{part:<{size}}" for part in parts).rstrip())
  return lines


# ------------------------------ the ways of a layout ------------------------------


def ways_text(placements: Iterable[Placement], mesh: Mesh, *, width: int = 120) -> str:
  """Returns one drawing for each way in which dims are cut, and the names of the arrays cut so.

  Args:
    placements: of parameters, optimizer state, batch.
    mesh: the mesh that their specs speak of.
    width: in characters.
  """
  ways: dict[frozenset, list[Picture]] = {}
  for p in placements:
    drawn = picture(p.shape, NamedSharding(mesh, p.spec), title=p.name, dims=p.letters)
    cut = [(_name(drawn, d), p.shape[d], entry) for d, entry in enumerate(drawn.spec) if entry]
    ways.setdefault(frozenset(cut), []).append(drawn)
  texts = []
  for members in (members for cut, members in ways.items() if cut):
    text = terminal(members[0], width=width).plain
    also = _names_text([p.title for p in members])
    also = textwrap.wrap(f"cut so: {also}", width) if len(members) > 1 else []
    texts.append("\n".join([text, *also]))
  if (whole := ways.get(frozenset())) and mesh.size > 1:
    names = _names_text([p.title for p in whole])
    texts.append("\n".join(textwrap.wrap(f"whole on each of {mesh.size} devices: {names}", width)))
  return "\n\n".join(texts)


def _names_text(names: Sequence[str]) -> str:
  """Returns the names; an optimizer's leaf that is cut like its parameter is not named."""
  kept = [name for name in names if not any(name.endswith(f"/{other}") for other in names)]
  more = " and their optimizer state" if len(kept) < len(names) else ""
  return ", ".join(kept) + more
