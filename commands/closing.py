"""What the end of a run prints: a loss curve, where things are, a sample, the next commands."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from inference.request import Request
from processes.coordination import current
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
  from reports import loss_curve  # only the end of a run draws

  lines, _ = log_lines.split(LogFile(workdir / log_lines.FILE).read())
  values = [line.values for line in lines]
  losses = [(one["step"], float(one["loss"])) for one in values if "loss" in one]
  (over, evaluations), *others = log_lines.by_examples(values, "eval_loss") or [("", [])]
  apart = [line for _, lines in others for line in lines]
  columns = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) - 10
  drawn = loss_curve.chart(
    losses, *map(_points, (evaluations, apart)), columns=max(columns, 20), dots=_can_show_dots()
  )
  if not drawn:
    return
  say("\n".join(["", *drawn]))
  letters = [loss_curve.EVALUATION, *[loss_curve.OTHERS] * len(others)]
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


def next_commands(job: Job, workdir: epath.Path, sample: Request | None) -> None:
  """Prints three commands to continue with.

  Args:
    job: of the run.
    workdir: of the run.
    sample: what the run has ended with; None where the model continues no texts.
  """
  given = _given(sys.argv[1:])
  reading = [word for word in given if not word.startswith("--accept")]  # is of `train` alone
  if sample is not None:
    look = "sample from it", ["sample", *reading, f"--prompt={sample.prompts[0]}"]
  else:
    look = "evaluate it", ["evaluate", *reading]
  steps = 2 * job.config.training.steps
  of_steps = ("--config.training.steps=", "--config.optimizer.schedule_on_resume=")
  longer = [word for word in given if not word.startswith(of_steps)]
  keys, restart = job.config.optimizer, f"{of_steps[1]}restart"
  ended = learning_rate_schedule(keys, job.config.training.steps)(steps)
  commands = [
    look,
    ("train for longer", [*longer, f"{of_steps[0]}{steps}", *([] if ended else [restart])]),
  ]
  texts = [(what, shlex.join(["python", "main.py", *words])) for what, words in commands]
  board = shlex.join(["tensorboard", f"--logdir={workdir}"])
  if job.config.metrics.tensorboard:
    texts.append(("see its metrics", board))
  else:
    texts.append(("see its layout", shlex.join(["python", "main.py", "layout", *reading])))
  lines = [f"  {what + ':':<18}{command}" for what, command in texts]
  if job.config.optimizer.schedule not in ("constant", "inverse_sqrt"):
    how = f"stays at {ended:.3g}; with {restart} it" if ended else "has ended at 0, and so"
    lines.insert(2, f"{'':20}(the learning rate {how} warms up again and decays)")
  say("\n".join(["\nnext:", *lines]))


def _given(argv: Sequence[str]) -> list[str]:
  """Returns the arguments of the command without its verb."""
  found = [*argv]
  if "train" in found:
    found.remove("train")
  return found
