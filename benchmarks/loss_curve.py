r"""Draws the losses of a run as an SVG: training as a line, evaluations as points.

  python -m benchmarks.loss_curve --run=runs/dp4_tp2_lm_bpe --output=loss.svg [--title=TEXT]

Reads WORKDIR/metrics.jsonl. docs/images/first_run.svg is the curve of `make train`.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence

from absl import app, flags

from benchmarks.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, svg, text, ticks

_WORKDIR = flags.DEFINE_string("run", None, "The run's folder.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The file to write.", required=True)
_TITLE = flags.DEFINE_string("title", "", "Written above the curve.")

TRAINING, EVALUATION = "#0969da", "#bc4c00"


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

  parts = axes(title, steps, heights, x, y)
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
      said = f"{name}: {end[1]:.2f} after {end[0]} steps"
      place = f'text-anchor="end" fill="{color}"'
      parts.append(text(WIDTH - RIGHT - 8, TOP + 18 + 18 * row, said, place))
  return svg(title, parts)


def main(_: Sequence[str]) -> None:
  """Writes the file."""
  losses = read(pathlib.Path(_WORKDIR.value))
  pathlib.Path(_OUTPUT.value).write_text(draw(losses, _TITLE.value))


if __name__ == "__main__":
  app.run(main)
