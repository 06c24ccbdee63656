"""A sheet as SVG: text in every cell, hatching where several devices hold the same.

Colours only repeat what text and hatching say. A page around it may set `--ink` and `--paper`;
alone, it is black on white.
"""

import hashlib
import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

from reports.grid import (
  Cell,
  Edge,
  Sheet,
  at,
  cell_height,
  cell_width,
  gap_text,
  labels_text,
  shown,
)

# Pixels. Text is set in a monospaced font, whose characters are 0.6 of its size wide.
TEXT = 12
CHARACTER = 0.61 * TEXT
LINE = 16
MARGIN = 10
LEAST_WIDTH, LEAST_HEIGHT = 150, 84  # of a grid, so that a block that is not cut looks like one
ROWS, PANELS = 16, 6  # more of them are drawn with a gap

FONT = 'ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace'
INK, PAPER = "var(--ink,#111)", "var(--paper,#fff)"

MIDDLE = 'text-anchor="middle"'
# An outline of paper, so that hatching does not run through the text; spaces count.
HALO = (
  f'style="paint-order:stroke;stroke:{PAPER};stroke-width:5;stroke-linejoin:round;white-space:pre"'
)

# Paths inside a tile of 8 by 8 pixels, taken in turn.
HATCHES = (
  "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4",
  "M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4",
  "M0,4 h8",
  "M4,0 v8",
  "M3,4 h2 M4,3 v2",
  "M0,4 h8 M4,0 v8",
)


def draw(sheet: Sheet, width: int) -> str:
  """Returns an SVG element at most as wide as `width` pixels, where its smallest cells fit that.

  Args:
    sheet: what to draw.
    width: in pixels; columns that do not fit are drawn with a gap.
  """
  size = cell_width(sheet) * CHARACTER + 10
  if sheet.turnable and len(sheet.columns.labels) * size + 2 * MARGIN > width:
    sheet = sheet.turned()
  panels = _Panels(sheet, width)
  parts, right, y = [], 0.0, float(MARGIN)
  for line in _wrapped(sheet.title, width):
    y += LINE
    parts.append(_text(MARGIN, y - 4, line, 'font-weight="bold"'))
    right = max(right, MARGIN + len(line) * CHARACTER)
  captions = list(sheet.panels)
  tiles = shown(len(captions), PANELS)
  across = max(1, int(width // (panels.width + 2 * MARGIN)))
  for start in range(0, len(tiles), across):
    for i, tile in enumerate(tiles[start : start + across]):
      x = MARGIN + i * (panels.width + 2 * MARGIN)
      if tile is None:
        parts.append(_text(x, y + 2 * LINE, gap_text(tiles, len(captions))))
      else:
        parts.append(panels.draw(x, y, captions[tile]))
      right = max(right, x + panels.width)
    y += panels.height + 6
  for note in sheet.notes:
    for line in _wrapped(note, width):
      y += LINE
      parts.append(_text(MARGIN, y - 4, line))
      right = max(right, MARGIN + len(line) * CHARACTER)
  return _element(panels, right + MARGIN, y + MARGIN, parts)


def _element(panels: "_Panels", width: float, height: float, parts: Sequence[str]) -> str:
  patterns = "".join(
    f'<pattern id="{panels.name}-{i}" width="8" height="8" patternUnits="userSpaceOnUse">'
    f'<path d="{HATCHES[i]}" style="stroke:{INK};stroke-width:.8;stroke-opacity:.55;fill:none"/>'
    "</pattern>"
    for i in sorted(panels.hatched)
  )
  size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
    f"style='font:{TEXT}px {FONT};background:{PAPER};max-width:100%'>"
    f"<title>{escape(panels.sheet.title)}</title><defs>{patterns}</defs>"
    f'<rect width="100%" height="100%" style="fill:{PAPER}"/>'
    f'<g style="fill:{INK}">{"".join(parts)}</g></svg>'
  )


class _Panels:
  """The measures of a sheet's panels, which are all alike; keeps the hatchings they used."""

  def __init__(self, sheet: Sheet, width: int):
    """Decides which rows and columns are drawn, and how large they are."""
    self.sheet = sheet
    self.hatched: set[int] = set()
    # The ids of one drawing on a page must not be those of another.
    self.name = "h" + hashlib.sha256(f"{width} {sheet}".encode()).hexdigest()[:8]
    row_heads, column_heads = _heads(sheet.rows), _heads(sheet.columns)
    row_labels = _wide(sheet.rows.labels)
    self.left = LINE * len(row_heads) + row_labels + (14 if row_labels else 6)
    lines = any(sheet.panels) + len(column_heads) + any(sheet.columns.labels)
    self.top = LINE * lines + 4

    least = cell_width(sheet) * CHARACTER + 10
    room = width - 2 * MARGIN - self.left
    self.columns = shown(len(sheet.columns.labels), int(room // least))
    self.rows = shown(len(sheet.rows.labels), ROWS)
    if None in self.columns:
      least = max(least, _wide([gap_text(self.columns, len(sheet.columns.labels))]) + 8)
    across = max(LEAST_WIDTH, _wide(column_heads), len(self.columns) * least)
    down = max(LEAST_HEIGHT if row_heads else 0, _wide(row_heads) + 8)
    down = max(down, len(self.rows) * (cell_height(sheet) * LINE + 10))
    self.cell_x, self.cell_y = across / len(self.columns), down / len(self.rows)
    self.width, self.height = self.left + across, self.top + down

  def draw(self, x: float, y: float, caption: str) -> str:
    """Returns one panel, its upper left corner at (x, y)."""
    left, top = x + self.left, y + self.top
    middle_x, middle_y = (left + x + self.width) / 2, (top + y + self.height) / 2
    parts = [_text(x, y + LINE - 4, caption, 'font-weight="bold"')] if caption else []
    columns, rows = self.sheet.columns, self.sheet.rows
    above = top - 6
    if any(columns.labels):
      for i, label in enumerate(labels_text(columns, self.columns)):
        parts.append(_text(left + (i + 0.5) * self.cell_x, above, label, MIDDLE))
      above -= LINE
    for head in reversed(_heads(columns)):
      parts.append(_text(middle_x, above, head, MIDDLE))
      above -= LINE
    for i, head in enumerate(_heads(rows)):
      place = x + (i + 0.8) * LINE
      turned = f'transform="rotate(-90 {place:.0f} {middle_y:.0f})"'
      parts.append(_text(place, middle_y, head, f"{MIDDLE} {turned}"))
    for i, label in enumerate(labels_text(rows, self.rows)):
      place = top + (i + 0.5) * self.cell_y + 4
      parts.append(_text(left - 6, place, label, 'text-anchor="end"') if label else "")
    for i, row in enumerate(self.rows):
      for j, column in enumerate(self.columns):
        corner = left + j * self.cell_x, top + i * self.cell_y
        cell = at(self.sheet, caption, row, column)
        parts.append(self._cell(*corner, cell, None in (row, column)))
    return "".join(parts)

  def _cell(self, x: float, y: float, cell: Cell, gap: bool) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{self.cell_x:.1f}" height="{self.cell_y:.1f}"'
    line = f"stroke:{INK};stroke-width:1.2"
    tint = f"fill:hsl({cell.group * 137 % 360} 70% 50%);fill-opacity:.13"
    parts = [f'<rect {box} style="{line};{"fill:none;stroke-dasharray:3 3" if gap else tint}"/>']
    if cell.hatch:
      hatch = (cell.hatch - 1) % len(HATCHES)
      self.hatched.add(hatch)
      parts.append(f'<rect {box} fill="url(#{self.name}-{hatch})"/>')
    start = y + self.cell_y / 2 - len(cell.lines) * LINE / 2 + LINE - 4
    for i, text in enumerate(cell.lines):
      place = start + i * LINE
      parts.append(_text(x + self.cell_x / 2, place, text, f"{MIDDLE} {HALO}"))
    return "".join(parts)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _wrapped(text: str, width: int) -> list[str]:
  return textwrap.wrap(text, max(20, int((width - 2 * MARGIN) / CHARACTER)))


def _heads(edge: Edge) -> list[str]:
  return [text for text in (edge.title, edge.under) if text]


def _wide(texts: Sequence[str]) -> float:
  return max(map(len, texts), default=0) * CHARACTER
