r"""Draws the losses of a run as an SVG: training as a line, evaluations as points.

  python -m benchmarks.loss_curve --workdir=runs/dp4_tp2_lm --output=loss.svg [--title=TEXT]

Reads WORKDIR/metrics.jsonl. docs/images/first_run.svg is the curve of `make train`.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from html import escape

from absl import app, flags

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The file to write.", required=True)
_TITLE = flags.DEFINE_string("title", "", "Written above the curve.")

# Pixels. The card is white with dark ink, so that it is legible on light and dark pages.
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 44, 40
INK, FAINT, TRAINING, EVALUATION = "#24292f", "#d0d7de", "#0969da", "#bc4c00"
TICKS = 6


def read(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
  """Returns the finite (step, loss) of training and evaluation.

  Raises:
    ValueError: there is no loss.
  """
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  found = {
    key: [(line["step"], line[key]) for line in lines if isinstance(line.get(key), float)]
    for key in ("loss", "eval_loss")
  }
  if not found["loss"]:
    raise ValueError(f"{workdir}/metrics.jsonl has no loss")
  return found


def ticks(least: float, most: float) -> list[float]:
  """Returns round numbers from at most `least` to at least `most`, evenly spaced."""
  rough = (most - least) / TICKS or 1.0
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
  first = math.floor(least / step)
  last = max(math.ceil(most / step), first + 1)
  return [round(number * step, 10) for number in range(first, last + 1)]


def draw(losses: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
  """Returns the SVG."""
  points = [*losses["loss"], *losses["eval_loss"]]
  steps = ticks(0, max(step for step, _ in points))
  heights = ticks(min(loss for _, loss in points), max(loss for _, loss in points))

  def x(step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]

  def y(loss: float) -> float:
    share = (loss - heights[0]) / (heights[-1] - heights[0])
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

  parts = [
    f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fff" '
    f'stroke="{FAINT}"/>',
    _text(LEFT, 24, title, 'font-weight="600"'),
  ]
  for loss in heights:
    parts.append(
      f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{FAINT}" stroke-width=".7"/>'
    )
    parts.append(_text(LEFT - 8, y(loss) + 4, f"{loss:g}", 'text-anchor="end"'))
  for step in steps:
    parts.append(_text(x(step), HEIGHT - BOTTOM + 18, f"{step:g}", 'text-anchor="middle"'))
  parts.append(_text(x(steps[-1] / 2), HEIGHT - 6, "step", 'text-anchor="middle"'))
  line = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in losses["loss"])
  parts.append(f'<path d="M{line}" fill="none" stroke="{TRAINING}" stroke-width="2"/>')
  parts += [
    f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{EVALUATION}"/>'
    for step, loss in losses["eval_loss"]
  ]
  last = losses["loss"][-1]
  legend = [("training loss", TRAINING, last), ("evaluation loss", EVALUATION, None)]
  if losses["eval_loss"]:
    legend[1] = ("evaluation loss", EVALUATION, losses["eval_loss"][-1])
  for row, (name, color, end) in enumerate(legend):
    if end:
      text = f"{name}: {end[1]:.2f} after {end[0]} steps"
      place = f'text-anchor="end" fill="{color}"'
      parts.append(_text(WIDTH - RIGHT - 8, TOP + 18 + 18 * row, text, place))
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    f'height="{HEIGHT}" font-family="system-ui,sans-serif" font-size="13" fill="{INK}" role="img">'
    f"<title>{escape(title)}</title>{''.join(parts)}</svg>\n"
  )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def main(_: Sequence[str]) -> None:
  """Writes the file."""
  losses = read(pathlib.Path(_WORKDIR.value))
  pathlib.Path(_OUTPUT.value).write_text(draw(losses, _TITLE.value))


if __name__ == "__main__":
  app.run(main)
