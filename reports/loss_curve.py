"""A small chart of a run's loss, for the end of a terminal's output."""

import itertools
import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille cell, by row
_BRAILLE = 0x2800
EVALUATION, OTHERS = "o", "x"


def chart(
  losses: Points,
  evaluations: Points = (),
  others: Points = (),
  *,
  columns: int = 64,
  rows: int = 8,
  dots: bool = True,
) -> list[str]:
  """Returns the lines of a chart: the training loss as a curve, evaluations as `o` and `x`.

  Args:
    losses: (step, loss), in order; what is not finite is left out.
    evaluations: likewise.
    others: evaluations over other examples, likewise.
    columns: of the plot, without its labels.
    rows: of the plot.
    dots: draw with Braille characters, eight dots each; otherwise with `*`.

  Returns:
    `rows` lines and one with the steps; [] with fewer than two losses.
  """
  losses, evaluations, others = map(_finite, (losses, evaluations, others))
  if len(losses) < 2:
    return []
  every = [*losses, *evaluations, *others]
  left, right = (pick(step for step, _ in every) for pick in (min, max))
  bottom, top = (pick(loss for _, loss in every) for pick in (min, max))
  wide, high = (2 * columns, 4 * rows) if dots else (columns, rows)

  def place(point: tuple[float, float]) -> tuple[int, int]:
    """Returns column and row of the finest grid, from the left and from the top."""
    x = (point[0] - left) / ((right - left) or 1)
    y = (top - point[1]) / ((top - bottom) or 1)
    return round(x * (wide - 1)), round(y * (high - 1))

  cells = [[0] * columns for _ in range(rows)]
  for x, y in _curve([place(point) for point in losses]):
    row, column = (y // 4, x // 2) if dots else (y, x)
    cells[row][column] |= _DOTS[y % 4][x % 2] if dots else 1
  drawn = [[_cell(cell, dots) for cell in row] for row in cells]
  for points, letter in ((evaluations, EVALUATION), (others, OTHERS)):
    for x, y in map(place, points):
      drawn[y // 4 if dots else y][x // 2 if dots else x] = letter
  labels = {0: f"{top:.2f}", rows - 1: f"{bottom:.2f}"}
  width = max(map(len, labels.values()))
  lines = [
    f"{labels.get(row, ''):>{width}} {''.join(cells)}".rstrip() for row, cells in enumerate(drawn)
  ]
  ends = f"{left:g}", f"step {right:g}"
  return [*lines, f"{'':>{width}} {ends[0]}{ends[1]:>{columns - len(ends[0])}}"]


def _finite(points: Points) -> list[tuple[float, float]]:
  return [point for point in points if math.isfinite(point[1])]


def _curve(places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
  """Returns the points of the grid on the lines from each place to the next."""
  found = set(places)
  for (x, y), (to_x, to_y) in itertools.pairwise(places):
    count = max(abs(to_x - x), abs(to_y - y), 1)
    found |= {
      (round(x + (to_x - x) * i / count), round(y + (to_y - y) * i / count)) for i in range(count)
    }
  return found


def _cell(bits: int, dots: bool) -> str:
  if not bits:
    return " "
  return chr(_BRAILLE | bits) if dots else "*"
