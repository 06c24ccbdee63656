r"""Draws the losses of a run as an SVG: training as a line, evaluations as points.

Evaluations over other examples than most, such as a final one of the whole split, are diamonds.

  python -m benchmarks.loss_curve --run=runs/dp4_tp2_lm_bpe --output=loss.svg [--title=TEXT]

Reads WORKDIR/metrics.jsonl. docs/images/first_run.svg is the curve of `make train`.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from benchmarks.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, svg, text, ticks
from training.metrics import log_lines

_WORKDIR = flags.DEFINE_string("run", None, "The run's folder.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The file to write.", required=True)
_TITLE = flags.DEFINE_string("title", "", "Written above the curve.")

TRAINING, EVALUATION = "#0969da", "#bc4c00"


def read(workdir: pathlib.Path) -> list[Mapping[str, Any]]:
  """Returns the lines of `metrics.jsonl`.

  Raises:
    ValueError: there is no loss.
  """
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  if not any(isinstance(line.get("loss"), float) for line in lines):
    raise ValueError(f"{workdir}/metrics.jsonl has no loss")
  return lines


def draw(lines: Sequence[Mapping[str, Any]], title: str) -> str:
  """Returns the SVG of the finite losses."""
  losses = [(one["step"], one["loss"]) for one in lines if isinstance(one.get("loss"), float)]
  evaluations = log_lines.by_examples(lines, "eval_loss")
  points = [*losses, *((one["step"], one["eval_loss"]) for _, some in evaluations for one in some)]
  steps = ticks(0, max(step for step, _ in points))
  heights = ticks(min(loss for _, loss in points), max(loss for _, loss in points))

  def x(step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]

  def y(loss: float) -> float:
    share = (loss - heights[0]) / (heights[-1] - heights[0])
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

  parts = axes(title, steps, heights, x, y)
  line = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in losses)
  parts.append(f'<path d="M{line}" fill="none" stroke="{TRAINING}" stroke-width="2"/>')
  legend = [("training loss", TRAINING, f"{losses[-1][1]:.2f} after {losses[-1][0]} steps")]
  for number, (over, some) in enumerate(evaluations):
    parts += [_point(x(one["step"]), y(one["eval_loss"]), round_=not number) for one in some]
    last = some[-1]
    error = last.get(log_lines.standard_error("eval_loss"))
    said = f"{last['eval_loss']:.2f}{f' ± {error:.2f}' if error else ''} after {last['step']} steps"
    shape = " ◆" if number else " ●"
    legend.append((f"evaluation loss{shape}{f' ({over})' if over else ''}", EVALUATION, said))
  for row, (name, color, end) in enumerate(legend):
    place = f'text-anchor="end" fill="{color}"'
    parts.append(text(WIDTH - RIGHT - 8, TOP + 18 + 18 * row, f"{name}: {end}", place))
  return svg(title, parts)


def _point(x: float, y: float, *, round_: bool) -> str:
  """Returns a circle, or a diamond."""
  if round_:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{EVALUATION}"/>'
  return f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z" fill="{EVALUATION}"/>'


def main(_: Sequence[str]) -> None:
  """Writes the file."""
  lines = read(pathlib.Path(_WORKDIR.value))
  pathlib.Path(_OUTPUT.value).write_text(draw(lines, _TITLE.value))


if __name__ == "__main__":
  app.run(main)
