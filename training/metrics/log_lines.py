"""`metrics.jsonl`: its lines, the file that they are appended to, and which lines it should have.

A file system, an editor or an interrupted copy may leave anything in the file. A valid line is a
JSON object in UTF-8 with a `step`. A last line that was cut short by a kill is dropped silently:
its step is computed again.
"""

import dataclasses
import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from runtime import files, forms
from runtime.forms import FLAG, NUMBER, STEP, Each, Needs, is_number

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The log is read completely at a start. A larger file is refused, even a sparse one.
MOST_BYTES = 2**30
FILE = "metrics.jsonl"
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


# ------------------------------ which lines there should be ------------------------------

# `metrics.every_steps` and `evaluation.every_steps` may change when a run resumes, so each
# checkpoint's record has their values and from which step on they applied. A line that was due and
# is missing was lost after it was written: lines are written before their step is saved.
SCHEDULES = "logged"  # of a checkpoint's record
_NAMED = 5  # so many steps are named in a message


@dataclasses.dataclass(frozen=True)
class Span:
  """The schedules from a step on.

  Attributes:
    first: the first step that they apply to.
    metrics: of metrics.every_steps.
    evaluation: of evaluation.every_steps.
  """

  first: int
  metrics: int
  evaluation: int


class LogSchedule:
  """The schedules of a run over all its starts."""

  def __init__(self, metrics: int, evaluation: int, record: Mapping[str, Any], done: int):
    """Continues those of a checkpoint's record ({} without a checkpoint) after `done` steps.

    If a record has none, it is not known what was logged, and no line counts as missing.

    Args:
      metrics: `metrics.every_steps`.
      evaluation: `evaluation.every_steps`.
      record: of the checkpoint.
      done: finished steps.
    """
    self._now = (metrics, evaluation)
    self._spans = tuple(Span(*values) for values in record.get(SCHEDULES, ()))
    self.roll_back(done)

  def roll_back(self, done: int) -> None:
    """Continues after step `done`."""
    kept = [span for span in self._spans if span.first <= done]
    if not kept or (kept[-1].metrics, kept[-1].evaluation) != self._now:
      kept.append(Span(done + 1, *self._now))
    self._spans = tuple(kept)

  def record(self) -> dict[str, Any]:
    """Returns its part of a checkpoint's record."""
    return {SCHEDULES: [list(dataclasses.astuple(span)) for span in self._spans]}

  def missing(
    self, done: int, steps: Collection[int], evaluations: Collection[int]
  ) -> tuple[list[int], list[int]]:
    """Returns the finished steps, and the evaluations after them, whose lines are missing.

    Args:
      done: number of finished steps. The evaluation after the last one may not have been made yet.
      steps: the steps that have a line.
      evaluations: the steps whose evaluation has a line.
    """
    made, evaluated = [], []
    for span, end in self._ends(done):
      made += [s for s in _multiples(span.metrics, span.first, end) if s not in steps]
      if span.first == 1 <= done and 1 not in steps and 1 not in made:
        made.insert(0, 1)  # the first step is logged whatever the schedule
      evaluated += [
        s for s in _multiples(span.evaluation, span.first, end) if s < done and s not in evaluations
      ]
    return made, evaluated

  def _ends(self, done: int) -> Iterator[tuple[Span, int]]:
    """Yields each span with its last finished step."""
    for span, after in zip(self._spans, [*self._spans[1:], None], strict=True):
      yield span, done if after is None else min(done, after.first - 1)


def _multiples(every: int, first: int, last: int) -> range:
  """Returns the multiples of `every` from `first` to `last`; none where it is 0."""
  return range(-(-first // every) * every, last + 1, every) if every > 0 else range(0)


def missing_text(missing: tuple[Sequence[int], Sequence[int]]) -> str:
  """Returns what is missing in words; "" if nothing is."""
  parts = [
    f"{len(found)} of {what} ({', '.join(map(str, found[:_NAMED]))}"
    f"{', ...' if len(found) > _NAMED else ''})"
    for found, what in zip(missing, ("steps", "evaluations"), strict=True)
    if found
  ]
  return " and ".join(parts)
