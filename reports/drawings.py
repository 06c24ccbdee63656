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

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import measure_renderables
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from reports.grid import Cell, Edge, Panel, Sheet, color

Place = tuple[tuple[int, int], ...]  # of a shard: (start, stop) by dim

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


def blocks(shape: Sequence[int], sharding: Sharding) -> dict[Place, tuple[int, ...]]:
  """Returns the place of each shard -> ids of the devices that have it, in the order of places.

  A place is (start, stop) by dim.

  Raises:
    ValueError: the sharding does not divide the shape.
  """
  found: dict[Place, list[int]] = {}
  for device, index in sharding.devices_indices_map(tuple(shape)).items():
    place = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    found.setdefault(place, []).append(device.id)
  return {place: tuple(sorted(ids)) for place, ids in sorted(found.items())}


def cutting_axes(found: Mapping[Place, Sequence[int]], mesh: Mesh) -> list[tuple[str, ...]]:
  """Returns, for each dim, the mesh axes that shard it, outermost first: as `blocks` shows it."""
  starts_of = {i: [start for start, _ in place] for place, ids in found.items() for i in ids}
  starts = np.array([starts_of[device.id] for device in mesh.devices.flat], np.int64)
  entries = []
  for start in starts.T.reshape(-1, *mesh.devices.shape):
    steps = {
      axis: np.abs(np.diff(start, axis=i)).max(initial=0) for i, axis in enumerate(mesh.axis_names)
    }
    axes = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
    entries.append(tuple(axes))
  return entries


@dataclasses.dataclass(frozen=True)
class _Dim:
  """A dim of an array: its name and size, where it is cut, and the mesh axes that cut it."""

  name: str
  size: int
  parts: Sequence[tuple[int, int]]
  axes: tuple[str, ...]

  @property
  def text(self) -> str:
    """Returns `feedforward = 384`."""
    return f"{self.name} = {self.size}"

  @property
  def cut(self) -> str:
    """Returns `over tensor (2 x 192)`."""
    count, lengths = len(self.parts), {stop - start for start, stop in self.parts}
    if count == 1:
      return "unsharded"
    pieces = f"{count} x {lengths.pop()}" if len(lengths) == 1 else f"{count} pieces"
    return f"over {'+'.join(self.axes)} ({pieces})" if self.axes else f"in {pieces}"

  @property
  def edge(self) -> Edge:
    """Returns the edge of the grid along which it is drawn."""
    several = len(self.parts) > 1
    labels = tuple(f"{start}:{stop}" for start, stop in self.parts) if several else ("",)
    return Edge(self.text, self.cut, labels)


def picture(
  shape: Sequence[int], sharding: Sharding, *, title: str = "", dims: Iterable[str] = ()
) -> Sheet:
  """Returns the drawing of an array of this shape: which devices have each of its shards.

  The last two sharded dims make the grid, further ones a panel per shard.

  Args:
    shape: global shape.
    sharding: a NamedSharding, or another one that maps devices to indices.
    title: such as the array's name.
    dims: a name per dim, `("batch", "model")` or `"BD"`.

  Raises:
    ValueError: the number of names is not that of dims, or the sharding does not divide the shape.
  """
  rank, names = len(shape), tuple(dims)
  if names and len(names) != rank:
    raise ValueError(f"dims {', '.join(names)}: {len(names)} names for shape {tuple(shape)}")
  found = blocks(shape, sharding)
  mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
  axes = [()] * rank if mesh is None else cutting_axes(found, mesh)
  every = [
    _Dim(names[d] if names else f"dim {d}", size, sorted({place[d] for place in found}), axes[d])
    for d, size in enumerate(shape)
  ]
  split = [d for d, dim in enumerate(every) if len(dim.parts) > 1]
  grid = _grid_dims(rank, split)
  panels: dict[str, list[Cell]] = {}
  for place, ids in found.items():
    ends = ((every[d].name, *place[d]) for d in split if d not in grid)
    caption = ", ".join(f"{name} {start}:{stop}" for name, start, stop in ends)
    panels.setdefault(caption, []).append(Cell(ids, hatch=int(len(ids) > 1)))
  letters = "".join(names) if all(len(name) == 1 for name in names) else ""
  what = f"{letters} {list(shape)}" if rank else "(scalar)"
  notes = _notes([dim for d, dim in enumerate(every) if d not in grid])
  counts = sorted({len(ids) for ids in found.values()})
  if counts[-1] > 1:
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    each = "the array is" if len(found) == 1 else "each block is"
    sizes, cut = dict(mesh.shape) if mesh else {}, {axis for some in axes for axis in some}
    over = " and ".join(axis for axis, size in sizes.items() if size > 1 and axis not in cut)
    notes.append(f"{each} on {number} devices{over and ', replicated over '}{over}")
  edges = (Edge() if d is None else every[d].edge for d in grid)
  name = " ".join(f"{title} {what}".split())
  return Sheet(name, *edges, _frozen(panels), tuple(notes), turnable=rank == 1)


def _grid_dims(rank: int, split: list[int]) -> tuple[int | None, int | None]:
  """Returns the dims that are drawn downwards and across."""
  if rank < 2:
    return None, 0 if rank else None
  if len(split) > 1:
    return split[-2], split[-1]
  if split and split[0] < rank - 1:
    return split[0], rank - 1
  return rank - 2, rank - 1


def _notes(undrawn: Sequence[_Dim]) -> list[str]:
  """Returns what is said of dims that the grid does not show."""
  split = [dim for dim in undrawn if len(dim.parts) > 1]
  notes = [f"one panel per shard of {dim.text}, {dim.cut}" for dim in split]
  if whole := [dim.text for dim in undrawn if dim not in split]:
    notes.append(f"unsharded, not drawn: {', '.join(whole)}")
  return notes


def _frozen(panels: Mapping[str, Iterable[Cell]]) -> dict[str, tuple[Cell, ...]]:
  return {caption: tuple(cells) for caption, cells in panels.items()}


def holdings(title: str, mesh: Mesh, values: Mapping[int, str]) -> Sheet:
  """Returns the drawing of a mesh with a text for each device, such as what it has.

  The last two axes larger than 1 make the grid, further ones a panel per position.

  Args:
    title: one line.
    mesh: devices and their axes.
    values: device id -> text, lines divided by newlines; other devices are empty.

  Raises:
    ValueError: a device that is not in the mesh.
  """
  if unknown := sorted(set(values) - {device.id for device in mesh.devices.flat}):
    raise ValueError(f"{title}: the mesh has no device {', '.join(map(str, unknown))}")
  names, shape = mesh.axis_names, mesh.devices.shape
  long = [i for i, size in enumerate(shape) if size > 1]
  counts = collections.Counter(filter(None, values.values()))
  several = (text for text, count in counts.items() if count > 1)
  hatches = {text: number for number, text in enumerate(several, start=1)}
  panels: dict[str, list[Cell]] = {}
  for position, device in np.ndenumerate(mesh.devices):
    caption = ", ".join(f"{names[i]} {position[i]}" for i in long[:-2])
    text = values.get(device.id, "-")
    panels.setdefault(caption, []).append(Cell((device.id,), text, hatches.get(text, 0)))
  edges = [Edge(f"{names[i]} = {shape[i]}", "", ("",) * shape[i]) for i in long[-2:]]
  edges = [Edge()] * (2 - len(edges)) + edges
  notes = ("in each box: the device, and what it holds",) if counts else ()
  return Sheet(title, *edges, _frozen(panels), notes, turnable=len(long) < 2)


# ------------------------------ sheet -> terminal, SVG ------------------------------


def terminal(s: Sheet, *, width: int = 80, hatched: bool = False) -> RenderableType:
  """Returns the drawing as rich tables; what does not fit is replaced by a gap.

  Args:
    s: the drawing.
    width: in characters. Long names are not truncated.
    hatched: fills replicated shards with strokes.
  """
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


def svg(s: Sheet, *, width: int = 80) -> str:
  """Returns the drawing as an SVG that needs nothing else and follows a dark color scheme.

  Args:
    s: the drawing.
    width: in characters; what does not fit is drawn with a gap.
  """
  rendered = terminal(s, width=width, hatched=True)
  lines = plain(rendered).splitlines()
  columns = max(map(len, lines))
  console = Console(
    file=io.StringIO(), record=True, width=columns, force_terminal=True, color_system="truecolor"
  )
  console.print(rendered)
  text = console.export_svg(theme=THEME, code_format=SVG, font_aspect_ratio=0.6)
  width, height = 12 * columns + 24, round(24.4 * len(lines)) + 24  # rich's pixels of a character
  values = {
    "TITLE": escape(s.title),
    "BOX": f"-12 -12 {width} {height}",
    "SIZE": f'width="{round(0.62 * width)}" height="{round(0.62 * height)}"',
  }
  return re.sub("TITLE|BOX|SIZE", lambda found: values[found[0]], text, count=3)
