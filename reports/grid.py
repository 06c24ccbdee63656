"""The grid of a drawing: cells with the devices of a shard, two named edges, panels.

Terminals (rich), pages (HTML tables) and the documentation's SVG all draw this model.
"""

import colorsys
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

GAP = "..."  # replaces omitted rows, columns or panels
NAMED = 16  # devices of a cell that a page names one by one


@dataclasses.dataclass(frozen=True)
class Cell:
  """A block of an array, or a device of the mesh.

  Attributes:
    devices: ids of its devices; none in a gap.
    text: of a single device; None: the cell only names its devices.
    hatch: 0 for a shard of a single device, else the number of a hatching.
  """

  devices: tuple[int, ...] = ()
  text: str | None = None
  hatch: int = 0

  @property
  def lines(self) -> tuple[str, ...]:
    """Returns the text in the cell: `0, 2, 4, 6`, or `3: [0 1]` with further lines below."""
    if not self.devices:
      return (GAP,)
    if self.text is None:
      return numbers_text(self.devices)
    if not self.text:
      return (f"{self.devices[0]}",)
    head = f"{self.devices[0]}: "
    first, *more = (head + self.text).splitlines()
    return (first, *(" " * len(head) + line for line in more))

  @property
  def badges(self) -> list[tuple[str, int | None]]:
    """Returns (text, device) for a page; of many devices a summary that names none of them."""
    if len(self.devices) <= NAMED:
      return [(str(device), device) for device in self.devices]
    return [(line, None) for line in numbers_text(self.devices)]


@dataclasses.dataclass(frozen=True)
class Edge:
  """One edge of the grid: its name, in two lines, and a label per row or column."""

  title: str = ""
  under: str = ""
  labels: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class Panel:
  """The drawn part of a panel. A gap among its columns or rows has a label with its size.

  Attributes:
    caption: above it; of a gap between panels, how many are omitted.
    columns: labels.
    rows: (label, cells); none if the panel is a gap.
  """

  caption: str
  columns: tuple[str, ...] = ()
  rows: tuple[tuple[str, tuple[Cell, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Sheet:
  """A drawing: one grid, or several panels with the same edges.

  Attributes:
    title: one line above it.
    rows: the left edge.
    columns: the upper edge.
    panels: caption -> cells, row after row; more than one if there are further dims or axes.
    notes: lines below.
    turnable: whether a single row may be drawn as a column if it is too wide.
  """

  title: str
  rows: Edge
  columns: Edge
  panels: Mapping[str, tuple[Cell, ...]]
  notes: tuple[str, ...] = ()
  turnable: bool = False

  @property
  def cell_width(self) -> int:
    """Returns the characters of the widest cell or column label."""
    cells = (cell for panel in self.panels.values() for cell in panel)
    texts = [line for cell in cells for line in cell.lines]
    return max(map(len, [*texts, *self.columns.labels]), default=1)

  def turned(self) -> "Sheet":
    """Returns the sheet with rows and columns exchanged."""
    wide = len(self.columns.labels)
    panels = {
      caption: tuple(cell for column in range(wide) for cell in cells[column::wide])
      for caption, cells in self.panels.items()
    }
    return dataclasses.replace(self, rows=self.columns, columns=self.rows, panels=panels)

  def visible(self, *, rows: int, columns: int, panels: int) -> list[Panel]:
    """Returns the panels that fit into this many rows and columns; the rest becomes gaps."""
    captions = list(self.panels)
    down = shown(len(self.rows.labels), rows)
    across = shown(len(self.columns.labels), columns)
    tiles = shown(len(captions), panels)
    return [
      Panel(gap_text(tiles, len(captions)))
      if tile is None
      else Panel(
        captions[tile],
        _labels(self.columns, across),
        tuple(
          (label, tuple(self._cell(captions[tile], row, column) for column in across))
          for row, label in zip(down, _labels(self.rows, down), strict=True)
        ),
      )
      for tile in tiles
    ]

  def _cell(self, caption: str, row: int | None, column: int | None) -> Cell:
    if row is None or column is None:
      return Cell()  # of a gap
    return self.panels[caption][row * len(self.columns.labels) + column]


def from_json(values: Mapping[str, Any]) -> Sheet:
  """Returns the drawing whose `dataclasses.asdict` was written as JSON.

  Raises:
    ValueError: a panel has not a cell for each row and column.
  """
  edges = {
    name: Edge(**{**values[name], "labels": tuple(values[name]["labels"])})
    for name in ("rows", "columns")
  }
  panels = {
    caption: tuple(Cell(tuple(one["devices"]), one["text"], one["hatch"]) for one in cells)
    for caption, cells in values["panels"].items()
  }
  count = math.prod(len(edge.labels) for edge in edges.values())
  if any(len(cells) != count for cells in panels.values()):
    raise ValueError(f"{values['title']}: a panel has not {count} cells")
  return Sheet(**{**values, **edges, "panels": panels, "notes": tuple(values["notes"])})


def shown(count: int, most: int) -> list[int | None]:
  """Returns the positions that are drawn, with None for the gap: the first ones and the last."""
  most = max(3, most)
  if count <= most:
    return list(range(count))
  return [*range(most - 2), None, count - 1]


def gap_text(positions: Sequence[int | None], count: int) -> str:
  """Returns `(29 more)`, the size of a gap."""
  return f"({count - len(positions) + 1} more)"


def _labels(edge: Edge, positions: Sequence[int | None]) -> tuple[str, ...]:
  gap = gap_text(positions, len(edge.labels))
  return tuple(gap if i is None else edge.labels[i] for i in positions)


def numbers_text(numbers: Sequence[int]) -> tuple[str, ...]:
  """Returns device numbers in a line or two: `0-3`, `0, 4`, or `0, 16 ... 496`, `32 replicas`."""
  runs: list[list[int]] = []
  for number in sorted(numbers):
    if runs and number == runs[-1][-1] + 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  texts = []
  for run in runs:
    texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
  if len(texts) <= 4:
    return (", ".join(texts),)
  return (f"{texts[0]}, {texts[1]} {GAP} {texts[-1]}", f"{len(numbers)} replicas")


def hue(device: int) -> int:
  """Returns the hue of a device in degrees, the same in every drawing; neighbours are far apart."""
  return round(device * 137.508 + 210) % 360


def color(device: int) -> str:
  """Returns a device's color as `#rrggbb`, dark enough for paper, light enough for a terminal."""
  parts = colorsys.hls_to_rgb(hue(device) / 360, 0.45, 0.75)
  return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
