"""What a run says: one progress line, `metrics.jsonl`, TensorBoard events."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from tensorboardX import SummaryWriter

from processes.coordination import current
from processes.workdir_lease import Ownership
from runtime import files
from training.metrics import log_lines
from training.metrics.append_log import Lines
from training.metrics.console import warn
from training.metrics.log_lines import TIMES, Line
from training.metrics.sinks import Sinks

FILE, DAMAGED = "metrics.jsonl", "metrics.damaged.jsonl"


class MetricsWriter:
  """Appends to `metrics.jsonl` and to TensorBoard's event files; a context manager.

  Process 0 alone writes. A line is about a step, an evaluation, a rollback, or where the
  time went. On a start at step s, and on going back to it, lines past s are dropped, so that a
  step appears once. Those of rollbacks stay.

  While the disk is full, what it does not take is kept in memory, and written once there is space.

  Lines that are damaged are moved to `metrics.damaged.jsonl`, byte for byte, and reported.

  Attributes:
    times: the newest valid line of where the time went; None where there is none, and on
      processes that do not write.
  """

  def __init__(
    self,
    workdir: epath.Path,
    *,
    step: int,
    tensorboard: bool,
    rollbacks: int = 0,
    owner: Ownership | None = None,
    sinks: Callable[[], Sinks] | None = None,
  ):
    """Opens the files of a workdir that exists.

    Args:
      workdir: the run's folder.
      step: the step that the run starts from; 0 drops every line of later ones.
      tensorboard: also write event files.
      rollbacks: how many the checkpoint of that step knows of; it will reach later ones again.
      owner: of the workdir; each write requires it.
      sinks: opens what is given the same numbers, on process 0.
    """
    self._owner = owner or Ownership()
    self._lines = Lines(workdir / FILE, self._owner.require)
    self._damaged = Lines(workdir / DAMAGED, self._owner.require)
    self._board, self._boards, self.times = None, 0, None
    self._workdir, self._tensorboard = workdir, tensorboard
    self._sinks = sinks() if sinks is not None and current().first else None
    self._scalars: list[tuple[str, float, int]] = []  # for the board, while the disk is full
    if current().first:
      if self._owner.replaced:
        _detach(workdir)
      self._cut(step, rollbacks)

  def __enter__(self) -> "MetricsWriter":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Closes the event file and the sinks."""
    self.close()

  @property
  def waiting(self) -> str:
    """Returns why lines are kept in memory, "" where all are written."""
    return self._lines.waiting

  def close(self) -> None:
    """Closes the event file and the sinks."""
    self._close_board()
    if self._sinks is not None:
      self._sinks.close()

  def _close_board(self) -> None:
    if self._board is not None:
      with contextlib.suppress(OSError):  # a full disk: `metrics.jsonl` has all of it too
        self._board.close()

  def _cut(self, step: int, rollbacks: int, *more: Mapping[str, Any]) -> None:
    """Drops lines past a step, and rollbacks past a number of them; adds lines in the same move."""
    kept = [*log_lines.until(self._sound(), step, rollbacks), *map(log_lines.made, more)]
    self._lines.replace(line.raw for line in kept)
    times = [line.values for line in kept if TIMES in line.values]
    self.times = times[-1] if times else None
    if self._tensorboard:
      self._open_board(step + 1, rollbacks + len(more))

  def _sound(self) -> list[Line]:
    """Returns the sound lines; copies the damaged ones to where they are kept, and reports them.

    They come first: a kill before the others are written leaves them in both files, or in one.
    """
    sound, damaged = log_lines.split(self._lines.read())
    if damaged:
      self._damaged.append(b"".join(line.raw for line in damaged))
      first, count = damaged[0], len(damaged)
      lines = "line" if count == 1 else "lines"
      warn(
        f"{self._workdir / FILE}: {count} damaged {lines} moved to {DAMAGED}, the first of them "
        f"line {first.number}: {first.why}"
      )
    return sound

  def _open_board(self, purge: int | None, number: int) -> None:
    """Opens the `number`-th event file; events before it from a step on count no more."""
    self._close_board()
    self._scalars, self._boards = [], number
    self._board = SummaryWriter(
      str(self._workdir),
      purge_step=purge,
      filename_suffix=f".{number}",  # files of one second would have one name
      max_queue=0,  # without end: a full disk ends the thread that empties it
    )

  def _show(self, step: int, values: Mapping[str, float]) -> None:
    """Adds values to the event file; what a full disk would not take, later and to another one."""
    if self._board is None:
      return
    due = [*self._scalars, *((name, value, step) for name, value in values.items())]
    if self.waiting:
      self._scalars = due
      return
    self._owner.require()
    if self._scalars:
      self._open_board(None, self._boards + 1)
    for name, value, number in due:
      self._board.add_scalar(name, value, number)

  def logged(self) -> tuple[set[int], set[int]]:
    """Returns the steps that have a line, and those after which an evaluation has one."""
    lines, _ = log_lines.split(self._lines.read())
    keys = ("loss", "eval_loss")
    steps, evaluations = ({x.values["step"] for x in lines if key in x.values} for key in keys)
    return steps, evaluations

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; Python writes floats so that they read back to the same bits."""
    if not current().first:
      return
    self._append({"step": step, **values})
    self._show(step, values)
    if self._sinks is not None:
      self._sinks.write(step, values)

  def _append(self, values: Mapping[str, Any]) -> None:
    self._lines.append(log_lines.made(values).raw)
    if self._damaged.waiting:
      self._damaged.flush()

  def write_times(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes where the time went; of a step the newest such line is kept, after all others."""
    if not current().first:
      return
    line = {"step": step, **values}
    if self.times is not None and self.times["step"] == step:
      others = [one.raw for one in self._sound() if one.values != self.times]
      self._lines.replace([*others, log_lines.made(line).raw])
    else:
      self._append(line)
    self.times = line
    self._show(step, {TIMES: values[TIMES]})

  def roll_back(self, step: int, number: int, values: Mapping[str, Any]) -> None:
    """Goes back to a step, and says so.

    Args:
      step: gone back to.
      number: of this rollback, counted from 1.
      values: of its line.
    """
    if current().first:
      self._cut(step, number - 1, {"step": step, **values})
      if self._sinks is not None:
        self._sinks.on_rollback(step)


def _detach(workdir: epath.Path) -> None:
  """Gives the event files of earlier starts new inodes.

  An owner that was stopped and replaced may have lines in memory for the file that it has open.
  """
  if not files.is_local(workdir):  # each write of an object makes a new one
    return
  for path in workdir.glob("events.out.tfevents.*"):
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.copyfile(path, temporary, follow_symlinks=False)
    temporary.replace(path)


def evaluated(workdir: epath.Path, step: int) -> bool:
  """Returns whether `metrics.jsonl` holds the evaluation of a step."""
  sound, _ = log_lines.split(Lines(workdir / FILE).read())
  return any(line.values["step"] == step and "eval_loss" in line.values for line in sound)
