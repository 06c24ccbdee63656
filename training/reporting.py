"""What a run says: one progress line, `metrics.jsonl`, TensorBoard events."""

import json
import sys
from collections.abc import Mapping

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

from processes.group import current

FILE = "metrics.jsonl"


class MetricsWriter:
  """Appends to `metrics.jsonl` and to TensorBoard's event files; a context manager.

  Process 0 alone writes.

  On a start at step s, lines past s are dropped first, so that a step stands once.
  """

  def __init__(self, workdir: epath.Path, *, step: int, tensorboard: bool):
    """Opens the files of a workdir that exists.

    Args:
      workdir: the run's folder.
      step: the step that the run starts from; 0 drops every line.
      tensorboard: also write event files.
    """
    self._path, self._board = workdir / FILE, None
    if not current().first:
      return
    replace_text(self._path, "".join(_lines_until(self._path, step)))
    if tensorboard:
      self._board = SummaryWriter(str(workdir), purge_step=step + 1)

  def __enter__(self) -> "MetricsWriter":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Closes the event file."""
    if self._board is not None:
      self._board.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; Python writes floats so that they read back to the same bits."""
    if not current().first:
      return
    line = json.dumps({"step": step, **values}, allow_nan=False)
    with self._path.open("a") as file:
      file.write(line + "\n")
    if self._board is not None:
      for name, value in values.items():
        self._board.add_scalar(name, value, step)


def evaluated(workdir: epath.Path, step: int) -> bool:
  """Tells whether `metrics.jsonl` holds the evaluation of a step."""
  lines = map(json.loads, _lines_until(workdir / FILE, step))
  return any(line["step"] == step and "eval_loss" in line for line in lines)


def _lines_until(path: epath.Path, step: int) -> list[str]:
  """Returns the lines up to a step; a last line that a kill has torn is dropped."""
  kept = []
  for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
    if line.endswith("\n") and json.loads(line)["step"] <= step:
      kept.append(line)
  return kept


def replace_text(path: epath.Path, text: str) -> None:
  """Writes a file whole or not at all: a kill or a full disk leaves what was there.

  Raises:
    OSError: it cannot be written; the path is named.
  """
  temporary = path.with_name(f"{path.name}.tmp")
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise type(error)(error.errno, error.strerror, str(path)) from error


class ProgressLine:
  """One line that is rewritten on a terminal; plain lines where there is none."""

  def __init__(self, steps: int):
    """Starts the line; `steps` is the number of the last step."""
    self._steps = steps
    self._bar = None
    if sys.stdout.isatty() and current().first:
      columns = (BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
      self._bar = Progress(*columns, console=Console(soft_wrap=True), auto_refresh=False)
      self._task = self._bar.add_task("", total=steps, text="")
      self._bar.start()

  def __enter__(self) -> "ProgressLine":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Leaves the last line standing."""
    if self._bar is not None:
      self._bar.stop()

  def update(self, step: int, text: str) -> None:
    """Shows the newest numbers."""
    if self._bar is None:
      say(text)
    else:
      self._bar.update(self._task, completed=step, text=text, refresh=True)

  def note(self, text: str) -> None:
    """Prints a line that stays, above the progress line."""
    if self._bar is None:
      say(text)
    else:
      self._bar.console.print(text, highlight=False)


def say(text: str) -> None:
  """Prints a line at once, also into a pipe; process 0 speaks for all."""
  if current().first:
    print(text, flush=True)


def duration(seconds: float) -> str:
  """Returns `1:02:03` or `2:03`."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
