"""Memory against the time of a step as an SVG: a point per setting, a line for the Pareto front."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from planning.search_results import Found, Row
from reports.search_text import describe, numbers, step_text

# Pixels.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 80, 20, 16, 44
LETTER, LINE = 9, 16  # of the labels, on narrow screens
TICKS = 5
FARTHEST = 1.6  # of the fastest: slower settings are left out of the picture
GIB = 2**30


def svg(found: Found) -> str:
  """Returns the picture, in the colors of the page it is on.

  Small points are by formula; large ones were compiled or run, and are numbered as in the table.
  """
  rows = [row for row in found.rows if row.seconds is not None]
  if not rows:
    return ""
  per_step = rows[0].estimate.tokens  # with several batch sizes, all as if with the fastest one's
  most = FARTHEST * rows[0].seconds_per_token * per_step
  faint = [
    (one.bytes / GIB, one.seconds_per_token * per_step)
    for one in found.estimates
    if one.fits(found.limit) and one.seconds_per_token * per_step <= most
  ]
  bold = [(row.bytes / GIB, row.seconds_per_token * per_step) for row in rows]
  across = _ticks([0.0, *(x for x, _ in [*faint, *bold])])
  up = _ticks([y for _, y in [*faint, *bold]])

  def at(x: float, y: float) -> tuple[float, float]:
    return (
      LEFT + (WIDTH - LEFT - RIGHT) * (x - across[0]) / (across[-1] - across[0]),
      HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - up[0]) / (up[-1] - up[0]),
    )

  parts = [*_axes(across, up, at)]
  parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in (at(*p) for p in faint)]
  front = sorted(point for point, row in zip(bold, rows, strict=True) if row.front)
  if len(front) > 1:
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in front))
    parts.append(f'<polyline class="front" points="{steps}"/>')
  places = [at(*point) for point in bold]
  for place, (point, row) in enumerate(zip(places, rows, strict=True), start=1):
    parts.append(_point(place, point, found, row))
  parts += [
    f'<text x="{x + 9:.1f}" y="{y - 6:.1f}">{numbers_text(some)}</text>'
    for (x, y), some in _labels(places)
  ]
  title = f"memory and time of a step on {found.topology}"
  return (
    f'<svg class="search" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
  )


def _point(place: int, at: tuple[float, float], found: Found, row: Row) -> str:
  x, y = at
  kind = "ahead" if row.front else "tried"
  text = escape(f"{place}: {describe(row)}, {numbers(found, row)}")
  return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{text}</title></circle>'


def _labels(
  places: Sequence[tuple[float, float]],
) -> list[tuple[tuple[float, float], list[int]]]:
  """Returns where labels are, and the points of each, from 1: those that would overlap are one."""
  found: list[tuple[tuple[float, float], list[int]]] = []
  for number in sorted(range(len(places)), key=lambda i: places[i]):
    x, y = places[number]
    for (left, up), some in found:
      if abs(y - up) < LINE and x - left < LETTER * (1 + len(numbers_text(some))):
        some.append(number + 1)
        break
    else:
      found.append(((x, y), [number + 1]))
  return found


def numbers_text(some: Sequence[int]) -> str:
  """Returns `1-3,7` of 1, 2, 3 and 7, in any order."""
  runs: list[list[int]] = []
  for number in sorted(some):
    if runs and runs[-1][-1] == number - 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _axes(across: Sequence[float], up: Sequence[float], at) -> list[str]:
  parts = []
  for x in across:
    left, bottom = at(x, up[0])
    parts.append(f'<path d="M{left:.1f} {bottom:.1f}V{TOP}"/>')
    parts.append(f'<text x="{left:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:g}</text>')
  for y in up:
    left, bottom = at(across[0], y)
    parts.append(f'<path d="M{left:.1f} {bottom:.1f}H{WIDTH - RIGHT}"/>')
    text = escape(step_text(y))
    parts.append(f'<text x="{left - 6:.1f}" y="{bottom + 4:.1f}" text-anchor="end">{text}</text>')
  middle = (LEFT + WIDTH - RIGHT) / 2
  under = "peak memory of a device, GiB"
  parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{under}</text>')
  return parts


def _ticks(values: Sequence[float]) -> list[float]:
  """Returns round numbers from at most the smallest value to at least the largest."""
  low, high = min(values), max(values)
  wide = (high - low) or abs(high) or 1.0
  step = 10.0 ** math.floor(math.log10(wide / TICKS))
  step = next(step * m for m in (1, 2, 5, 10) if wide / (step * m) <= TICKS)
  first, last = math.floor(low / step), math.ceil(high / step)
  return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]
