r"""Draws the losses of a run as an SVG: training as a line, evaluations as points.

Evaluations over other examples than most, such as a final one of the whole split, are diamonds.

  python -m benchmarks.loss_curve --run=runs/dp4_tp2_lm_bpe --output=loss.svg [--title=TEXT]

Reads WORKDIR/metrics.jsonl. docs/images/first_run.svg is the curve of `make train`.
"""

import contextlib
import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.metrics import log_lines

_WORKDIR = flags.DEFINE_string("run", None, "The run's folder.")
_OUTPUT = flags.DEFINE_string("output", None, "The file to write.")
_TITLE = flags.DEFINE_string("title", "", "Written above the curve.")

TRAINING, EVALUATION = "#0969da", "#bc4c00"
# The card is white with dark ink, so that it is legible on light and dark pages.
STYLE = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "meshwright",  # ids are the same each time
  "font.family": "sans-serif",
  "axes.edgecolor": "#d0d7de",
  "axes.titlesize": 12,
  "axes.titlelocation": "left",
  "text.color": "#24292f",
}


@contextlib.contextmanager
def chart(title: str, x: str = "step") -> Iterator[tuple[Axes, io.StringIO]]:
  """Yields axes to draw losses on, and the file that has their SVG afterwards."""
  file = io.StringIO()
  with matplotlib.rc_context(STYLE):
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, weight="bold")
    axes.set_xlabel(x)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes, file
    axes.legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})


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
  with chart(title) as (axes, file):
    last = f"{losses[-1][1]:.2f} after {losses[-1][0]} steps"
    axes.plot(*zip(*losses, strict=True), color=TRAINING, label=f"training loss: {last}")
    for number, (over, some) in enumerate(log_lines.by_examples(lines, "eval_loss")):
      end = some[-1]
      error = end.get(log_lines.standard_error("eval_loss"))
      said = f"{end['eval_loss']:.2f}{f' ± {error:.2f}' if error else ''} after {end['step']} steps"
      axes.plot(
        [one["step"] for one in some],
        [one["eval_loss"] for one in some],
        "D" if number else "o",
        color=EVALUATION,
        label=f"evaluation loss{f' ({over})' if over else ''}: {said}",
      )
  return file.getvalue()


def main(_: Sequence[str]) -> None:
  """Writes the file."""
  lines = read(pathlib.Path(_WORKDIR.value))
  pathlib.Path(_OUTPUT.value).write_text(draw(lines, _TITLE.value))


if __name__ == "__main__":
  flags.mark_flags_as_required(["run", "output"])
  app.run(main)
