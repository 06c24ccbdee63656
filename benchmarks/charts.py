"""Charts of losses over steps, as SVG."""

import math
from collections.abc import Callable, Sequence
from html import escape

# Pixels. The card is white with dark ink, so that it is legible on light and dark pages.
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 44, 40
INK, FAINT = "#24292f", "#d0d7de"
TICKS = 6


def ticks(least: float, most: float) -> list[float]:
  """Returns round numbers from at most `least` to at least `most`, evenly spaced."""
  rough = (most - least) / TICKS or 1.0
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
  first = math.floor(least / step)
  last = max(math.ceil(most / step), first + 1)
  return [round(number * step, 10) for number in range(first, last + 1)]


def axes(
  title: str,
  steps: Sequence[float],
  losses: Sequence[float],
  x: Callable[[float], float],
  y: Callable[[float], float],
) -> list[str]:
  """Returns the card, its title, and the axes.

  Args:
    title: above the chart.
    steps: numbers below the axis of steps.
    losses: numbers beside the axis of losses.
    x: step -> pixels.
    y: loss -> pixels.
  """
  parts = [
    f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fff" '
    f'stroke="{FAINT}"/>',
    text(LEFT, 24, title, 'font-weight="600"'),
  ]
  for loss in losses:
    parts.append(
      f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}" stroke-width=".7"/>'
    )
    parts.append(text(LEFT - 8, y(loss) + 4, f"{loss:g}", 'text-anchor="end"'))
  for step in steps:
    parts.append(text(x(step), HEIGHT - BOTTOM + 18, f"{step:g}", 'text-anchor="middle"'))
  parts.append(text(x(steps[-1] / 2), HEIGHT - 6, "step", 'text-anchor="middle"'))
  return parts


def svg(title: str, parts: Sequence[str]) -> str:
  """Returns the file of a chart."""
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    f'height="{HEIGHT}" font-family="system-ui,sans-serif" font-size="13" fill="{INK}" role="img">'
    f"<title>{escape(title)}</title>{''.join(parts)}</svg>\n"
  )


def text(x: float, y: float, said: str, attributes: str = "") -> str:
  """Returns a text at a place, in pixels."""
  return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(said)}</text>'
