"""The metrics of a run: `metrics.jsonl`, TensorBoard events, sinks."""

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
from training.metrics.console import warn
from training.metrics.log_lines import FILE, TIMES, Line, LogFile
from training.metrics.sinks import Sinks

DAMAGED = "metrics.damaged.jsonl"


class MetricsWriter:
  """Appends to `metrics.jsonl` and to TensorBoard's event files; a context manager.

  Only process 0 writes. A line is about a step, an evaluation, a rollback, or goodput. On a start
  at step s, and on a rollback to it, lines past s are dropped, so that each step appears once.
  Lines about rollbacks stay.

  While the disk is full, lines are buffered in memory, and written once there is space.

  Lines that are damaged are moved to `metrics.damaged.jsonl`, byte for byte, and reported.

  Attributes:
    times: the newest valid line about goodput; None if there is none, and on processes that do not
      write.
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
    """Opens the files of an existing workdir.

    Args:
      workdir: the run's folder.
      step: the step that the run starts from; 0 drops every line of later ones.
      tensorboard: also write event files.
      rollbacks: how many the checkpoint of that step knows of; it will reach later ones again.
      owner: of the workdir; each write requires it.
      sinks: opens the sinks, on process 0.
    """
    self._owner = owner or Ownership()
    self._lines = LogFile(workdir / FILE, self._owner.require)
    self._damaged = LogFile(workdir / DAMAGED, self._owner.require)
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
    """Returns why lines are buffered in memory; "" if all are written."""
    return self._lines.waiting

  def news(self) -> list[str]:
    """Returns what the sinks have said since the last call, to be printed."""
    return self._sinks.news() if self._sinks is not None else []

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
    """Drops lines past a step, and rollbacks past a number; adds lines in the same replacement."""
    kept = [*log_lines.until(self._sound(), step, rollbacks), *map(log_lines.made, more)]
    self._lines.replace(line.raw for line in kept)
    times = [line.values for line in kept if TIMES in line.values]
    self.times = times[-1] if times else None
    if self._tensorboard:
      self._open_board(step + 1, rollbacks + len(more))

  def _sound(self) -> list[Line]:
    """Returns the valid lines; copies the damaged ones to their own file, and reports them.

    The copy comes first: a kill in between leaves damaged lines in both files, not in none.
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
    """Opens the `number`-th event file; it purges earlier events from step `purge` on."""
    self._close_board()
    self._scalars, self._boards = [], number
    self._board = SummaryWriter(
      str(self._workdir),
      purge_step=purge,
      filename_suffix=f".{number}",  # files of one second would have one name
      max_queue=0,  # without end: a full disk ends the thread that empties it
    )

  def _show(self, step: int, values: Mapping[str, float]) -> None:
    """Adds values to the event file; on a full disk, later and to a new file."""
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
    """Writes a goodput line; only the newest of a step is kept, after all its other lines."""
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
    """Drops lines past a restored step, and adds one about the rollback.

    Args:
      step: the restored step.
      number: of this rollback, counted from 1.
      values: of its line.
    """
    if current().first:
      self._cut(step, number - 1, {"step": step, **values})
      if self._sinks is not None:
        self._sinks.on_rollback(step)


def _detach(workdir: epath.Path) -> None:
  """Gives the event files of earlier starts new inodes.

  A former owner that was suspended and replaced may have buffered lines for a file it has open.
  """
  if not files.is_local(workdir):  # each write of an object makes a new one
    return
  for path in workdir.glob("events.out.tfevents.*"):
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.copyfile(path, temporary, follow_symlinks=False)
    temporary.replace(path)


def evaluated(workdir: epath.Path, step: int) -> bool:
  """Returns whether `metrics.jsonl` holds the evaluation of a step."""
  sound, _ = log_lines.split(LogFile(workdir / FILE).read())
  return any(line.values["step"] == step and "eval_loss" in line.values for line in sound)
