"""Sheets: a drawing before it is drawn. A grid of cells with two named edges, once or in panels."""

import dataclasses
from collections.abc import Mapping, Sequence

GAP = "..."  # stands where rows, columns or panels are left out


@dataclasses.dataclass(frozen=True)
class Cell:
  """What stands in one cell.

  Attributes:
    lines: its text.
    group: cells of one group hold the same; 0, 1, 2, ...
    hatch: 0 for what one device alone holds, otherwise a number of a hatching.
  """

  lines: tuple[str, ...]
  group: int = 0
  hatch: int = 0


@dataclasses.dataclass(frozen=True)
class Edge:
  """One edge of the grid: what runs along it, in two lines, and a label per row or column."""

  title: str = ""
  under: str = ""
  labels: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class Sheet:
  """A drawing in words.

  Attributes:
    title: one line above it.
    rows: the left edge.
    columns: the upper edge.
    panels: caption -> (row, column) -> Cell; more than one where there are further dims or axes.
    notes: lines below.
    turnable: whether a single row may be drawn as a column where it is too wide.
  """

  title: str
  rows: Edge
  columns: Edge
  panels: Mapping[str, Mapping[tuple[int, int], Cell]]
  notes: tuple[str, ...] = ()
  turnable: bool = False

  def turned(self) -> "Sheet":
    """Returns the sheet with rows for columns."""
    panels = {
      caption: {(column, row): cell for (row, column), cell in cells.items()}
      for caption, cells in self.panels.items()
    }
    return dataclasses.replace(self, rows=self.columns, columns=self.rows, panels=panels)


def shown(count: int, most: int) -> list[int | None]:
  """Returns the positions that are drawn, with None for the gap: the first ones and the last."""
  most = max(3, most)
  if count <= most:
    return list(range(count))
  return [*range(most - 2), None, count - 1]


def gap_text(positions: Sequence[int | None], count: int) -> str:
  """Returns `(29 more)`, how many a gap stands for."""
  return f"({count - len(positions) + 1} more)"


def labels_text(edge: Edge, positions: Sequence[int | None]) -> list[str]:
  """Returns the labels of the rows or columns that are drawn."""
  gap = gap_text(positions, len(edge.labels))
  return [gap if i is None else edge.labels[i] for i in positions]


def cell_width(sheet: Sheet) -> int:
  """Returns the characters of the widest cell or column label."""
  cells = [cell for panel in sheet.panels.values() for cell in panel.values()]
  texts = [line for cell in cells for line in cell.lines]
  return max(map(len, [*texts, *sheet.columns.labels]), default=1)


def cell_height(sheet: Sheet) -> int:
  """Returns the lines of the tallest cell."""
  return max(len(cell.lines) for panel in sheet.panels.values() for cell in panel.values())


def at(sheet: Sheet, caption: str, row: int | None, column: int | None) -> Cell:
  """Returns a cell of a panel; a gap's cell where one of the positions is None."""
  if row is None or column is None:
    return Cell((GAP,))
  return sheet.panels[caption].get((row, column), Cell(("-",)))


def numbers_text(numbers: Sequence[int]) -> tuple[str, ...]:
  """Returns device numbers in a line or two: `0-3`, `0, 4`, or `0, 16 ... 496` and `32 copies`."""
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
  return (f"{texts[0]}, {texts[1]} {GAP} {texts[-1]}", f"{len(numbers)} copies")
