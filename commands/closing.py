"""What the end of a run prints: a loss curve, where things are, a sample, the next commands."""

import shlex
import shutil
import sys
from collections.abc import Sequence

from etils import epath

from inference.request import Request
from processes.coordination import current
from reports import loss_curve
from training.metrics import log_lines
from training.metrics.append_log import Lines
from training.metrics.console import say
from training.setup import Job

_WIDTH = 80


def curve(workdir: epath.Path) -> None:
  """Prints the loss curve of `metrics.jsonl`, and the last losses; nothing before two steps."""
  if not current().first:
    return
  lines, _ = log_lines.split(Lines(workdir / log_lines.FILE).read())
  losses, evaluations = (
    [(line.values["step"], float(line.values[key])) for line in lines if key in line.values]
    for key in ("loss", "eval_loss")
  )
  columns = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) - 10
  drawn = loss_curve.chart(losses, evaluations, columns=max(columns, 20), dots=_can_show_dots())
  if not drawn:
    return
  say("\n".join(["", *drawn]))
  last = f"loss {losses[-1][1]:.4f}"
  if evaluations:
    last += f", on the evaluation split {evaluations[-1][1]:.4f} (o)"
  say(f"{last}\n")


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
  longer = [word for word in given if not word.startswith("--config.training.steps=")]
  commands = [
    look,
    ("train for longer", [*longer, f"--config.training.steps={steps}"]),
  ]
  texts = [(what, shlex.join(["python", "main.py", *words])) for what, words in commands]
  board = shlex.join(["tensorboard", f"--logdir={workdir}"])
  if job.config.metrics.tensorboard:
    texts.append(("see its metrics", board))
  else:
    texts.append(("see its layout", shlex.join(["python", "main.py", "layout", *reading])))
  say("\n".join(["\nnext:", *(f"  {what + ':':<18}{command}" for what, command in texts)]))


def _given(argv: Sequence[str]) -> list[str]:
  """Returns the arguments of the command without its verb."""
  found = [*argv]
  if "train" in found:
    found.remove("train")
  return found
