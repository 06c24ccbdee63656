"""`metrics.jsonl`: its lines, its file, and what writes them.

A file system, an editor or an interrupted copy may leave anything in the file. A valid line is a
JSON object in UTF-8 with a `step`. A last line that was cut short by a kill is dropped silently:
its step is computed again.
"""

import contextlib
import dataclasses
import errno
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from processes.coordination import current
from processes.workdir_lease import Ownership
from runtime import files, forms
from runtime.forms import FLAG, NUMBER, STEP, Each, Needs, is_number
from training.metrics.console import warn

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The log is read completely at a start. A larger file is refused, even a sparse one.
MOST_BYTES = 2**30
FILE, DAMAGED = "metrics.jsonl", "metrics.damaged.jsonl"
TIMES, ROLLED_BACK = "goodput", "rolled_back"  # keys that only one kind of line has
FORM = Needs({"step": STEP}, {ROLLED_BACK: STEP, "skipped_rows": [(STEP, STEP)]})
# A start adds to the numbers of the last line about goodput.
_OF_TIMES = Needs(
  {**FORM.keys, TIMES: NUMBER, "seconds": Each(NUMBER), "time": NUMBER, "done": FLAG}
)
# Of an evaluation: its examples, and their share of the split's.
EXAMPLES, SHARE = "eval_examples", "eval_share"
WHOLE_SPLIT = "the whole split"
_BEGINS = b'{"step": '  # every line that is written
LINES = "lines"  # of a checkpoint's record
_COUNTED = {"steps": "loss", "evaluations": "eval_loss"}  # kinds of lines that it counts, by a key


@dataclasses.dataclass(frozen=True)
class Line:
  """A valid line.

  Attributes:
    raw: its bytes, with the line break.
    values: its JSON object.
  """

  raw: bytes
  values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Damaged:
  """A line that is not valid.

  Attributes:
    number: of the line, counted from 1.
    raw: its bytes, with a line break.
    why: what is wrong with it.
  """

  number: int
  raw: bytes
  why: str


def made(values: Mapping[str, Any]) -> Line:
  """Returns the line with these values."""
  return Line(files.json_text(values).encode() + b"\n", values)


def split(content: bytes) -> tuple[list[Line], list[Damaged]]:
  """Returns the valid lines and the damaged ones of a file, each in their order."""
  sound, damaged = [], []
  *whole, rest = content.split(b"\n")
  for number, raw in enumerate([*whole, *([rest] if rest else [])], 1):
    try:
      sound.append(Line(raw + b"\n", _values(raw)))
    except ValueError as error:
      if number <= len(whole) or not _torn(raw):
        damaged.append(Damaged(number, raw + b"\n", str(error)))
  return sound, damaged


def _torn(rest: bytes) -> bool:
  """Returns whether what follows the last line break is a line that a kill cut short."""
  begins = rest.startswith(_BEGINS) or _BEGINS.startswith(rest)
  return begins and rest.isascii() and b"\0" not in rest


def _values(raw: bytes) -> dict[str, Any]:
  """Returns the values of a line.

  Raises:
    ValueError: it is damaged; with what is wrong, in a few words.
  """
  if not raw.strip():
    raise ValueError("it is empty")
  try:
    values = files.parse_json(raw)
  except UnicodeDecodeError:
    raise ValueError("it is not text") from None
  except ValueError as error:
    raise ValueError(f"it is not JSON: {error}") from None
  if not isinstance(values, dict):
    raise ValueError("it is not a JSON object")
  form = FORM
  if TIMES in values:
    form = _OF_TIMES if "boot" not in values else Needs({**_OF_TIMES.keys, "uptime": NUMBER})
  for why in forms.wrong(values, form):
    raise ValueError(why)
  return values


def standard_error(metric: str) -> str:
  """Returns the key of a metric's standard error: `eval_loss_stderr/code` of `eval_loss/code`."""
  name, slash, part = metric.partition("/")
  return f"{name}_stderr{slash}{part}"


def examples_text(values: Mapping[str, Any]) -> str:
  """Returns what an evaluation is over: `256 of 2,670 examples`; "" where its line lacks that."""
  if values.get(SHARE) == 1:
    return WHOLE_SPLIT
  try:
    return f"{values[EXAMPLES]:,} of {round(values[EXAMPLES] / values[SHARE]):,} examples"
  except (KeyError, TypeError, ValueError, ArithmeticError):
    return ""


def by_examples(
  lines: Iterable[Mapping[str, Any]], key: str
) -> list[tuple[str, list[Mapping[str, Any]]]]:
  """Returns (what they are over, lines) of the evaluations that have a metric, most lines first.

  Only the first are a curve: the others are estimates from other examples, and a line that joined
  them would show how the examples differ.
  """
  found: dict[str, list[Mapping[str, Any]]] = {}
  for values in lines:
    if is_number(values.get(key)):
      found.setdefault(examples_text(values), []).append(values)
  return sorted(found.items(), key=lambda item: -len(item[1]))


def until(lines: Sequence[Line], step: int, rollbacks: int = 0) -> list[Line]:
  """Returns the lines up to a step.

  Of lines about rollbacks, the first `rollbacks` are returned, whatever their step.
  """
  kept = []
  for line in lines:
    if ROLLED_BACK in line.values:
      rollbacks -= 1
      if rollbacks >= 0:
        kept.append(line)
    elif line.values["step"] <= step:
      kept.append(line)
  return kept


# ------------------------------ the file ------------------------------


class LogFile:
  """A file of lines that one process appends to or replaces.

  Lines that do not fit on a full disk stay in memory and are written, in order, as soon as there is
  space. Other errors are raised.

  Attributes:
    waiting: why lines are waiting in memory; "" where all are in the file.
  """

  def __init__(self, path: epath.Path, require: Callable[[], None] = files.always):
    """Takes a file, which need not exist, and a check that raises if it must not be written."""
    self._path, self._require, self.waiting = path, require, ""
    self._replacement: bytes | None = None  # the file's new content, until it is written
    self._more: list[bytes] = []  # lines to append after that

  def read(self) -> bytes:
    """Returns what is in the file, or will be."""
    held = self._replacement
    if held is None:
      try:
        held = files.read_bytes(self._path, most_bytes=MOST_BYTES)
      except FileNotFoundError:
        held = b""
    return held + b"".join(self._more)

  def append(self, line: bytes) -> None:
    """Adds a line, which ends with a line break."""
    self._more.append(line)
    self.flush()

  def replace(self, lines: Iterable[bytes]) -> None:
    """Replaces the file by these lines, atomically: a kill or a full disk leaves the old ones."""
    self._replacement, self._more = b"".join(lines), []
    self.flush()

  def flush(self) -> None:
    """Writes the buffered lines, as far as there is space.

    Raises:
      OSError: the file cannot be written, for another reason than a full disk; the path is named.
    """
    try:
      if self._replacement is not None:
        files.replace(self._path, self._replacement, require=self._require)
        self._replacement = None
      files.append(self._path, b"".join(self._more), require=self._require)
      self._more = []
    except OSError as error:
      if error.errno not in _FULL or isinstance(error, files.NotPlainError):
        raise
      self.waiting = f"{self._path} cannot be written: {error.strerror}"
    else:
      self.waiting = ""


# ------------------------------ the writer ------------------------------


def _summary_writer() -> Any:
  """Returns tensorboardX's writer, which imports PyTorch where it is installed.

  That takes seconds, and loads a second copy of CUDA's libraries: a run on a GPU with both ended
  with a segmentation fault in its first evaluation, whose attention is cuDNN's.
  """
  absent = {} if "torch" in sys.modules else {"torch": None}
  sys.modules.update(absent)
  try:
    from tensorboardX import SummaryWriter  # of those that write alone
  finally:
    for name in absent:
      del sys.modules[name]
  return SummaryWriter


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
    lines: how many lines there are about steps and about evaluations. A checkpoint's record has
      them: lines are written before their step is saved, so those that are missing were lost.
  """

  def __init__(
    self,
    workdir: epath.Path,
    *,
    step: int,
    tensorboard: bool,
    rollbacks: int = 0,
    owner: Ownership | None = None,
    sinks: Callable[[], Any] | None = None,
  ):
    """Opens the files of an existing workdir.

    Args:
      workdir: the run's folder.
      step: the step that the run starts from; 0 drops every line of later ones.
      tensorboard: also write event files.
      rollbacks: how many the checkpoint of that step knows of; it will reach later ones again.
      owner: of the workdir; each write requires it.
      sinks: opens the sinks (`training.metrics.sinks`), on process 0.
    """
    self._owner = owner or Ownership()
    self._lines = LogFile(workdir / FILE, self._owner.require)
    self._damaged = LogFile(workdir / DAMAGED, self._owner.require)
    self._board, self._boards, self.times = None, 0, None
    self.lines = dict.fromkeys(_COUNTED, 0)
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
    kept = [*until(self._sound(), step, rollbacks), *map(made, more)]
    self._lines.replace(line.raw for line in kept)
    times = [line.values for line in kept if TIMES in line.values]
    self.times = times[-1] if times else None
    for what, key in _COUNTED.items():
      self.lines[what] = sum(key in line.values for line in kept)
    if self._tensorboard:
      self._open_board(step + 1, rollbacks + len(more))

  def _sound(self) -> list[Line]:
    """Returns the valid lines; copies the damaged ones to their own file, and reports them.

    The copy comes first: a kill in between leaves damaged lines in both files, not in none.
    """
    sound, damaged = split(self._lines.read())
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
    self._board = _summary_writer()(
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

  def lost(self, record: Mapping[str, Any]) -> str:
    """Returns how many lines of finished steps are missing, in words; "" if none are known to be.

    Args:
      record: of the checkpoint that the run resumes from; {} without one.
    """
    known = record.get(LINES, {}) if current().first else {}
    return " and ".join(
      f"{count - self.lines[what]} of {count} about {what}"
      for what, count in known.items()
      if count > self.lines[what]
    )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; Python writes floats so that they read back to the same bits."""
    if not current().first:
      return
    self._append({"step": step, **values})
    for what, key in _COUNTED.items():
      self.lines[what] += key in values
    self._show(step, values)
    if self._sinks is not None:
      self._sinks.write(step, values)

  def _append(self, values: Mapping[str, Any]) -> None:
    self._lines.append(made(values).raw)
    if self._damaged.waiting:
      self._damaged.flush()

  def write_times(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes a goodput line; only the newest of a step is kept, after all its other lines."""
    if not current().first:
      return
    line = {"step": step, **values}
    if self.times is not None and self.times["step"] == step:
      others = [one.raw for one in self._sound() if one.values != self.times]
      self._lines.replace([*others, made(line).raw])
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
  sound, _ = split(LogFile(workdir / FILE).read())
  return any(line.values["step"] == step and "eval_loss" in line.values for line in sound)
