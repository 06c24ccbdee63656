"""Drawings of sharded arrays, by rich for terminals and as SVG: the devices of each shard.

They are computed from the sharding's map of devices to indices, not from its spec.
"""

import collections
import dataclasses
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from xml.sax.saxutils import escape

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import measure_renderables
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from partitioning.rules import partition_spec, spec_axes, spec_entries
from reports.grid import Cell, Edge, Panel, Sheet, color

# Larger numbers of rows or panels are drawn with a gap.
TERMINAL_ROWS = 8
TERMINAL_PANELS = 4

STROKES = "╱╲═│·┼"  # hatchings, taken in turn
THEME = TerminalTheme((255, 255, 255), (31, 35, 40), [(31, 35, 40)] * 8)
# rich's own frame is a terminal's window and loads a font. A dark page inverts the lightness.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="BOX" SIZE role="img">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{
  font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre;
}}
{styles}
@media (prefers-color-scheme: dark) {{ svg {{ filter: invert(.93) hue-rotate(180deg); }} }}
</style>
<defs>{lines}</defs>
<rect x="-12" y="-12" width="100%" height="100%" fill="#fff"/>
<g class="{unique_id}-matrix">
{matrix}
</g>
</svg>
"""


@dataclasses.dataclass(frozen=True)
class Block:
  """A shard of an array: its place in the global array, and the ids of all devices that have it."""

  index: tuple[slice, ...]
  devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Picture:
  """How one array is sharded.

  Attributes:
    title: such as the array's name.
    shape: global shape.
    dims: a name per dim, or nothing.
    spec: the mesh axes that shard each dim, as observed; None for an unsharded dim.
    sizes: mesh axis -> size; empty if the sharding has no mesh.
    blocks: the distinct shards, in the order of their places.
  """

  title: str
  shape: tuple[int, ...]
  dims: tuple[str, ...]
  spec: PartitionSpec
  sizes: Mapping[str, int]
  blocks: tuple[Block, ...]

  @property
  def copied(self) -> tuple[str, ...]:
    """Returns the mesh axes over which the array is replicated."""
    return tuple(a for a, size in self.sizes.items() if size > 1 and a not in spec_axes(self.spec))


@dataclasses.dataclass(frozen=True)
class Holdings:
  """A text for each device of a mesh, such as its shards.

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
  """Returns how an array of this shape is sharded.

  Args:
    shape: global shape.
    sharding: a NamedSharding, or another one that maps devices to indices.
    title: such as the array's name.
    dims: a name per dim, `("batch", "model")` or `"BD"`.

  Raises:
    ValueError: the number of names is not that of dims, or the sharding does not divide the shape.
  """
  shape, dims = tuple(shape), tuple(dims)
  if dims and len(dims) != len(shape):
    raise ValueError(f"dims {', '.join(dims)}: {len(dims)} names for shape {shape}")
  indices = sharding.devices_indices_map(shape)
  ends = np.array(
    [
      [
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip(index, shape, strict=True)
      ]
      for index in indices.values()
    ],
    np.int64,
  ).reshape(len(indices), 2 * len(shape))
  places, block_of = np.unique(ends, axis=0, return_inverse=True)
  holders: list[list[int]] = [[] for _ in places]
  for device, block in zip(indices, block_of.tolist(), strict=True):
    holders[block].append(device.id)
  blocks = tuple(
    Block(tuple(map(slice, place[::2], place[1::2])), tuple(sorted(ids)))
    for place, ids in zip(places.tolist(), holders, strict=True)
  )
  mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
  spec = (
    PartitionSpec(*(None,) * len(shape))
    if mesh is None
    else _seen_spec(mesh, dict(zip(indices, ends[:, ::2], strict=True)))
  )
  return Picture(title, shape, dims, spec, dict(mesh.shape) if mesh else {}, blocks)


def holdings(title: str, mesh: Mesh, values: Mapping[int, str]) -> Holdings:
  """Returns a text for each device, to be drawn on the mesh.

  Args:
    title: one line.
    mesh: devices and their axes.
    values: device id -> text; other devices are empty.

  Raises:
    ValueError: a device that is not in the mesh.
  """
  if unknown := sorted(set(values) - {device.id for device in mesh.devices.flat}):
    raise ValueError(f"{title}: the mesh has no device {', '.join(map(str, unknown))}")
  return Holdings(title, mesh, dict(values))


def _seen_spec(mesh: Mesh, starts_by_device: Mapping[jax.Device, np.ndarray]) -> PartitionSpec:
  """Returns, for each dim, the axes that shard it, outermost first."""
  starts = np.array([starts_by_device[device] for device in mesh.devices.flat])
  starts = starts.T.reshape(-1, *mesh.devices.shape)
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
  """Returns the sheet of a picture, which terminal and SVG both draw."""
  return _sheet_of_array(drawn) if isinstance(drawn, Picture) else _sheet_of_mesh(drawn)


def _sheet_of_array(p: Picture) -> Sheet:
  """The last two sharded dims make the grid, further ones a panel per shard."""
  rank = len(p.shape)
  parts = [sorted({(b.index[d].start, b.index[d].stop) for b in p.blocks}) for d in range(rank)]
  split = [d for d in range(rank) if len(parts[d]) > 1]
  row, column = _grid_dims(rank, split)
  outer = [d for d in split if d not in (row, column)]
  numbers = [{place: i for i, place in enumerate(each)} for each in parts]
  panels: dict[str, dict] = {}
  for block in p.blocks:
    ends = [(part.start, part.stop) for part in block.index]
    caption = ", ".join(f"{_name(p, d)} {ends[d][0]}:{ends[d][1]}" for d in outer)
    place = tuple(0 if d is None else numbers[d][ends[d]] for d in (row, column))
    cell = Cell(block.devices, hatch=int(len(block.devices) > 1))
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
    return "unsharded"
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
      notes.append(f"one panel per shard of {_name(p, d)} = {p.shape[d]}, {_cut(p, d, parts)}")
  if whole := [f"{_name(p, d)} = {p.shape[d]}" for d in undrawn if len(parts[d]) == 1]:
    notes.append(f"unsharded, not drawn: {', '.join(whole)}")
  counts = sorted({len(block.devices) for block in p.blocks})
  if counts[-1] > 1:
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    what = "the array is" if len(p.blocks) == 1 else "each block is"
    along = f", replicated over {' and '.join(p.copied)}" if p.copied else ""
    notes.append(f"{what} on {number} devices{along}")
  return tuple(notes)


def _sheet_of_mesh(h: Holdings) -> Sheet:
  """The last two axes larger than 1 make the grid, further ones a panel per position."""
  names, devices = h.mesh.axis_names, h.mesh.devices
  long = [i for i, size in enumerate(devices.shape) if size > 1]
  row = long[-2] if len(long) > 1 else None
  column = long[-1] if long else None
  counts = collections.Counter(filter(None, h.values.values()))
  several = (text for text, count in counts.items() if count > 1)
  hatches = {text: number for number, text in enumerate(several, start=1)}
  panels: dict[str, dict] = {}
  for position, device in np.ndenumerate(devices):
    caption = ", ".join(f"{names[i]} {position[i]}" for i in long[:-2])
    place = tuple(0 if i is None else position[i] for i in (row, column))
    text = h.values.get(device.id, "-")
    cell = Cell((device.id,), text, hatches.get(text, 0))
    panels.setdefault(caption, {})[place] = cell
  edges = [
    Edge() if i is None else Edge(f"{names[i]} = {devices.shape[i]}", "", ("",) * devices.shape[i])
    for i in (row, column)
  ]
  notes = ("in each box: the device, and what it holds",) if counts else ()
  return Sheet(h.title, *edges, panels, notes, turnable=row is None)


# ------------------------------ sheet -> terminal, SVG ------------------------------


def terminal(
  drawn: Picture | Holdings, *, width: int = 80, hatched: bool = False
) -> RenderableType:
  """Returns the drawing as rich tables; what does not fit is replaced by a gap.

  Args:
    drawn: a picture or holdings.
    width: in characters. Long names are not truncated.
    hatched: fills replicated shards with strokes.
  """
  s = sheet(drawn)
  extra = 3 if hatched else 0  # two strokes and a space
  if s.turnable and len(s.columns.labels) * (s.cell_width + extra + 3) + 1 > width:
    s = s.turned()
  gutter = max(map(len, (s.rows.title, s.rows.under, *s.rows.labels)))
  columns = (width - gutter - 2) // (s.cell_width + extra + 3)
  panels = s.visible(rows=TERMINAL_ROWS, columns=columns, panels=TERMINAL_PANELS)
  tiles = [_panel(s, panel, gutter, hatched=hatched) for panel in panels]
  console = Console(width=10_000)
  size = measure_renderables(console, console.options, tiles).maximum
  beside = Table.grid(padding=(0, 3, 0, 0))
  count = max(1, (width + 3) // (size + 3))
  for _ in range(min(count, len(tiles))):
    beside.add_column(min_width=size)
  for start in range(0, len(tiles), count):
    beside.add_row(*tiles[start : start + count])
  title = [_line(line, "bold") for line in textwrap.wrap(s.title, width)]
  notes = [_line(line) for note in s.notes for line in textwrap.wrap(note, width)]
  return Group(*title, beside, *notes)


def _line(text: str, style: str = "") -> Text:
  return Text(text, style, no_wrap=True, overflow="ignore")


def _panel(s: Sheet, panel: Panel, gutter: int, *, hatched: bool) -> RenderableType:
  """Returns one panel: its caption and edges around a table of cells."""
  if not panel.rows:
    return _line(panel.caption)
  cells = [
    [_cell_lines(cell, s.cell_width, hatched=hatched) for cell in row] for _, row in panel.rows
  ]
  extra = 3 if hatched and any(cell.hatch for _, row in panel.rows for cell in row) else 0
  grid = Table(box=box.SQUARE, show_header=False, show_lines=True, border_style="dim")
  for label in panel.columns:
    grid.add_column(no_wrap=True, min_width=max(len(label), s.cell_width + extra))
  heights = [max(map(len, row)) for row in cells]
  for row in cells:
    grid.add_row(*(Text("\n").join(lines) for lines in row))
  labels = [
    f"{label:>{gutter}}" + "\n" * height
    for (label, _), height in zip(panel.rows, heights, strict=True)
  ]
  widths = [max(len(label), s.cell_width + extra) for label in panel.columns]
  around = Table.grid(padding=(0, 1, 0, 0))
  title = ", ".join(filter(None, (s.columns.title, s.columns.under)))
  under = "   ".join(f"{label:<{w}}" for label, w in zip(panel.columns, widths, strict=True))
  for left, right in ((s.rows.title, title), (s.rows.under, under)):
    if left or right.strip():
      around.add_row(_line(f"{left:>{gutter}}"), _line(f"  {right}"))
  around.add_row(_line("\n" + "\n".join(labels)), grid)
  return Group(*([_line(panel.caption, "bold")] if panel.caption else []), around)


def _cell_lines(cell: Cell, width: int, *, hatched: bool) -> list[Text]:
  """Returns the lines of a cell, each device in its color."""
  lines = []
  for i, line in enumerate(cell.lines):
    text = Text(line)
    if i == 0:  # the numbers of devices, and after a colon the device's text
      for found in re.finditer("[0-9]+", line.partition(":")[0]):
        text.stylize(f"bold {color(int(found[0]))}", *found.span())
    if hatched and cell.hatch:
      stroke = STROKES[(cell.hatch - 1) % len(STROKES)]
      text.append(" " + stroke * (width + 2 - len(line)), style="dim")
    lines.append(text)
  return lines


def plain(renderable: RenderableType) -> str:
  """Returns what rich renders as plain text, as wide as it needs to be."""
  # Plain: rich would read the brackets of a pattern as markup, and truncate wide lines.
  off = {"color_system": None, "markup": False, "emoji": False, "highlight": False}
  console = Console(file=io.StringIO(), width=10_000, **off)
  console.print(renderable)
  return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def svg(drawn: Picture | Holdings, *, width: int = 80) -> str:
  """Returns the drawing as an SVG that needs nothing else and follows a dark color scheme.

  Args:
    drawn: a picture or holdings.
    width: in characters; what does not fit is drawn with a gap.
  """
  rendered = terminal(drawn, width=width, hatched=True)
  lines = plain(rendered).splitlines()
  columns = max(map(len, lines))
  console = Console(
    file=io.StringIO(), record=True, width=columns, force_terminal=True, color_system="truecolor"
  )
  console.print(rendered)
  text = console.export_svg(theme=THEME, code_format=SVG, font_aspect_ratio=0.6)
  width, height = 12 * columns + 24, round(24.4 * len(lines)) + 24  # rich's pixels of a character
  values = {
    "TITLE": escape(sheet(drawn).title),
    "BOX": f"-12 -12 {width} {height}",
    "SIZE": f'width="{round(0.62 * width)}" height="{round(0.62 * height)}"',
  }
  return re.sub("TITLE|BOX|SIZE", lambda found: values[found[0]], text, count=3)
