"""Makes the trials of a row, whatever becomes of each, beside a run that nothing disturbs."""

import dataclasses
import pathlib
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from tests.faults import same
from tests.faults.harness import Run
from tests.faults.plan import Trial

STEPS = 100
LAST_LINES = 25


@dataclasses.dataclass(frozen=True)
class Pace:
  """What a run without a fault has left, and when it came where.

  Attributes:
    record: what it has left.
    first_step: seconds from its start to its first step.
    end: seconds to its end.
  """

  record: same.Record
  first_step: float
  end: float


class Undisturbed:
  """Runs that nothing disturbs, to compare with: one for each number of processes.

  Attributes:
    steps: that they make.
  """

  def __init__(self, folder: pathlib.Path, *flags: str, steps: int = STEPS):
    """Runs nothing yet; in this folder, with these flags besides those that all runs have."""
    self.steps, self._folder, self._flags = steps, folder, flags
    self._paces: dict[int, Pace] = {}

  def of(self, count: int) -> Pace:
    """Returns the run of so many processes, made at the first call."""
    if count not in self._paces:
      workdir = self._folder / f"undisturbed-{count}" / "run"
      shutil.rmtree(workdir.parent, ignore_errors=True)  # one that has failed
      workdir.parent.mkdir(parents=True)
      began = time.monotonic()
      with Run(workdir, count=count, steps=self.steps, flags=self._flags) as run:
        run.wait_for("step 1/")
        first = time.monotonic() - began
        assert set(run.end()) == {0}, "the run that nothing disturbs has failed"
      self._paces[count] = Pace(same.record(workdir), first, time.monotonic() - began)
    return self._paces[count]

  def ended(self, count: int, seconds: float, codes: Sequence[int | None]) -> None:
    """Takes note that a run of so many processes has ended, before anything was done to it.

    The machine was slower when the pace was measured, or compiled what it has kept since: times
    are scaled, or moments that are drawn of them would fall beyond most ends.

    Args:
      count: of the processes.
      seconds: from its start to its end.
      codes: of what was started; one that is not 0 is a failure, and no pace.
    """
    assert set(codes) == {0}, f"ended by itself, with {codes}"
    pace = self.of(count)
    share = min(1.0, seconds / pace.end)
    self._paces[count] = Pace(pace.record, pace.first_step * share, pace.end * share)


class Attempt:
  """A trial that is being made.

  Attributes:
    number: its number, which is its seed.
    folder: its own; it exists.
    workdir: of its run, in the folder.
    chance: what is left to chance in it.
    does: what is done, in words; the row says it.
    seen: what was seen on the way.
  """

  def __init__(self, row: int, number: int, folder: pathlib.Path):
    """Makes the folder."""
    self.number, self.folder, self.workdir = number, folder, folder / "run"
    self.chance = random.Random(f"row {row}, trial {number}")
    self.does, self.seen = "", []
    folder.mkdir(parents=True)


def tried(
  row: int, numbers: range, folder: pathlib.Path, one: Callable[[Attempt], None]
) -> Iterator[Trial]:
  """Yields trials, each as it ends; one that fails leaves its folder.

  Args:
    row: its number.
    numbers: of the trials.
    folder: gets a folder for each.
    one: makes a trial; what it raises is its failure.
  """
  for number in numbers:
    attempt = Attempt(row, number, folder / f"trial-{number}")
    began, failure = time.monotonic(), ""
    try:
      one(attempt)
    except Exception as error:  # whatever it is, the next trial is made
      failure = _failure(error)
    seconds = time.monotonic() - began
    name = f"seed {number}: {attempt.does}"
    yield Trial(name, not failure, "; ".join([*filter(None, [failure]), *attempt.seen]), seconds)
    if not failure:
      shutil.rmtree(attempt.folder)


def _failure(error: Exception) -> str:
  """Returns the line that has failed, and the beginning of what it said."""
  frames = traceback.extract_tb(error.__traceback__)
  in_rows = [frame for frame in frames if pathlib.Path(frame.filename).name.startswith("rows_")]
  frame = (in_rows or frames)[-1]
  said = str(error).strip().partition("\n")[0][:300]
  kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
  return f"{pathlib.Path(frame.filename).name}:{frame.lineno}: {frame.line} | {kind}{said}"


def last_lines(folder: pathlib.Path, since: float) -> str:
  """Returns the last lines of what runs in a folder have printed since a time, oldest first."""
  times = {path: path.stat().st_mtime for path in folder.rglob("*.out")}
  parts = []
  for path in sorted((path for path in times if times[path] >= since), key=times.get):
    lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
    parts.append("\n".join([f"----- {path}", *lines]))
  return "\n".join(parts)
