"""What the end of a run prints: a loss curve, where things are, a sample, the next commands."""

import itertools
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from commands import flags
from input_pipeline import catalog
from processes.coordination import current
from runtime import files
from training import workdir_files
from training.metrics import log_lines
from training.metrics.console import say
from training.metrics.log_lines import LogFile
from training.schedules import learning_rate_schedule
from training.setup import Job

_WIDTH = 80


def curve(workdir: epath.Path) -> None:
  """Prints the loss curve of `metrics.jsonl`, and the last losses; nothing before two steps."""
  if not current().first:
    return
  lines, _ = log_lines.split(LogFile(workdir / log_lines.FILE).read())
  values = [line.values for line in lines]
  losses = [(one["step"], float(one["loss"])) for one in values if "loss" in one]
  (over, evaluations), *others = log_lines.by_examples(values, "eval_loss") or [("", [])]
  apart = [line for _, lines in others for line in lines]
  columns = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) - 10
  drawn = chart(
    losses, *map(_points, (evaluations, apart)), columns=max(columns, 20), dots=_can_show_dots()
  )
  if not drawn:
    return
  say("\n".join(["", *drawn]))
  letters = [EVALUATION, *[OTHERS] * len(others)]
  ends = [
    _evaluated(lines[-1], f"{letter}{': ' * bool(over)}{over}")
    for letter, (over, lines) in zip(letters, [(over, evaluations), *others], strict=True)
    if lines
  ]
  said = f"; on the evaluation split {', '.join(ends)}" if ends else ""
  say(f"loss {losses[-1][1]:.4f}{said}\n")


def _points(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
  return [(line["step"], float(line["eval_loss"])) for line in evaluations]


def _evaluated(line: Mapping[str, Any], what: str) -> str:
  """Returns the loss of an evaluation with its standard error."""
  error = line.get(log_lines.standard_error("eval_loss"))
  return f"{line['eval_loss']:.4f}{f' ± {error:.4f}' if error else ''} ({what})"


def _can_show_dots() -> bool:
  """Returns whether standard output takes Braille characters."""
  try:
    "\u28ff".encode(sys.stdout.encoding or "ascii")
  except UnicodeEncodeError:
    return False
  return True


def next_commands(job: Job, workdir: epath.Path, *, samples: bool) -> None:
  """Prints commands to continue with: the run's folder stands for its config.

  Args:
    job: of the run.
    workdir: of the run.
    samples: whether the model continues texts.
  """
  keys, steps = job.config.optimizer, 2 * job.config.training.steps
  ended = learning_rate_schedule(keys, job.config.training.steps)(steps)
  restart = "optimizer.schedule_on_resume=restart"
  longer = [f"training.steps={steps}", *([] if ended else [restart])]
  run = [str(workdir), *(["--simulate"] if flags.given(flags.SIMULATE) else [])]
  look = ("sample from it", "sample") if samples else ("evaluate it", "evaluate")
  chat = ["--chat"] if samples and job.config.data.name == catalog.CONVERSATIONS else []
  texts = [
    (look[0], _main(look[1], *run, *chat)),
    ("train for longer", _main("train", *run, *longer)),
  ]
  if keys.schedule not in ("constant", "inverse_sqrt"):
    how = f"stays at {ended:.3g}; with {restart} it" if ended else "has ended at 0, and so"
    texts.append(("", f"(the learning rate {how} warms up again and decays)"))
  texts.append(
    ("see its page", _page(workdir))
    if job.config.metrics.report
    else ("see its layout", _main("layout", *run))
  )
  if job.config.metrics.tensorboard and shutil.which("tensorboard"):
    texts.append(("see its metrics", shlex.join(["tensorboard", f"--logdir={workdir}"])))
  lines = [f"  {what + ':' * bool(what):<18}{command}" for what, command in texts]
  say("\n".join(["\nnext:", *lines]))


def _main(*words: str) -> str:
  return shlex.join(["python", "main.py", *words])


def _page(workdir: epath.Path) -> str:
  """Returns the command that shows the run's page, or its path where no browser is known."""
  page = workdir / workdir_files.REPORT
  opener = "open" if sys.platform == "darwin" else "xdg-open"
  here = files.is_local(workdir) and shutil.which(opener)
  return shlex.join([opener, str(page)]) if here else f"{page} (in a browser)"


# ------------------------------ the loss curve ------------------------------

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
