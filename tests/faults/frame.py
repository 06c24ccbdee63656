"""The rows of the plan of faults, and how their trials are made, beside undisturbed runs."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pathlib
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.faults import same
from tests.faults.harness import FLAGS, STEPS, Run

LONGEST_SECONDS = 3600.0  # of a row: one that would take longer runs with fewer trials
LAST_LINES = 25


@dataclasses.dataclass(frozen=True)
class Trial:
  """What became of one trial.

  Attributes:
    name: what was done, with what it takes to do it again (the seed, the moment, the process).
    passed: whether everything that the row asks for held.
    note: where it failed, what was seen; else what was measured, or "".
    seconds: that it took.
  """

  name: str
  passed: bool
  note: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the plan.

  Attributes:
    number: of the row.
    make: makes trials, of `(trials, folder)`, and gives them one after the other; with a third
      argument `seed`, the number of the first.
    fault: what is done to the run.
    passes: when a trial has passed.
    trials: how often, by the plan.
    seconds: that a trial takes on two quiet cores: a guess, until the row has been run.
    usual: how many trials without --trials, where not those of the plan.
    note: what is to be known of it; for people.
  """

  number: int
  make: Callable[..., Iterable[Trial]]
  fault: str
  passes: str
  trials: int
  seconds: float
  usual: int | None = None
  note: str = ""

  @property
  def seeded(self) -> bool:
    """Returns whether its trials have numbers, by which they can be made again."""
    return "seed" in inspect.signature(self.make).parameters

  def default(self, seconds: float) -> int:
    """Returns how many trials are made where nobody says, when each takes so many seconds."""
    return max(1, min(self.usual or self.trials, int(LONGEST_SECONDS / seconds)))


_ROWS: dict[int, Row] = {}


def row(number: int, **given: Any) -> Callable:
  """Makes a row of a function: of one trial, `one(attempt)`, or of all, as `Row.make` is.

  Args:
    number: of the row.
    **given: its attributes.
  """

  def register(made: Callable) -> Callable:
    of_one = [*inspect.signature(made).parameters] == ["attempt"]
    make = functools.partial(tried, made, number) if of_one else made
    _ROWS[number] = Row(number, make, **given)
    return made

  return register


def rows() -> list[Row]:
  """Returns the rows of all files beside this one, in order."""
  for path in pathlib.Path(__file__).parent.glob("rows_*.py"):
    importlib.import_module(f"tests.faults.{path.stem}")
  return [_ROWS[number] for number in sorted(_ROWS)]


# ------------------------------ a trial ------------------------------


@dataclasses.dataclass
class Pace:
  """A run without a fault: what it has left, and when it came where.

  Attributes:
    workdir: its own.
    record: what it has left.
    first_step: seconds from its start to its first step.
    end: seconds to its end.
  """

  workdir: pathlib.Path
  record: same.Record
  first_step: float
  end: float

  def saw_end(self, seconds: float, codes: Sequence[int | None]) -> None:
    """Takes note that such a run has ended, before anything was done to it.

    The machine was slower when the pace was measured, or compiled what it has kept since: times
    are scaled, or moments that are drawn of them would fall beyond most ends.

    Args:
      seconds: from its start to its end.
      codes: of what was started; one that is not 0 is a failure, and no pace.
    """
    assert set(codes) == {0}, f"ended by itself, with {codes}"
    share = min(1.0, seconds / self.end)
    self.first_step, self.end = self.first_step * share, self.end * share


class Shared(contextlib.ExitStack):
  """What the trials of a row share: made when the first one needs it, closed after the last."""

  def __init__(self, folder: pathlib.Path):
    """Has nothing yet; `folder` gets a folder for each thing."""
    super().__init__()
    self._folder, self._made = folder, {}

  def once(self, make: Callable, *given: Any) -> Any:
    """Returns what `make(folder, *given)` has returned, or entered, at the first call."""
    key = (make, *given)
    if key not in self._made:
      folder = self._folder / f"shared-{make.__name__.strip('_')}-{len(self._made)}"
      shutil.rmtree(folder, ignore_errors=True)  # of a call that has failed
      folder.mkdir(parents=True)
      made = make(folder, *given)
      self._made[key] = self.enter_context(made) if hasattr(made, "__exit__") else made
    return self._made[key]


def _undisturbed(folder: pathlib.Path, count: int, *more: Any) -> Pace:
  workdir, began = folder / "run", time.monotonic()
  settings = dict(zip(("flags", "steps", "common"), more, strict=True))
  with Run(workdir, count=count, **settings) as run:
    run.wait_for("step 1/")
    first = time.monotonic() - began
    assert set(run.end()) == {0}, "the run that nothing disturbs has failed"
  return Pace(workdir, same.record(workdir), first, time.monotonic() - began)


class Attempt:
  """A trial that is being made.

  Attributes:
    number: its number, which is its seed.
    folder: its own; it exists.
    workdir: of its run, in the folder.
    chance: what is left to chance in it.
    does: what is done, in words; the row says it.
    seen: what was seen on the way.
    once: as of `Shared`.
  """

  def __init__(self, row: int, number: int, folder: pathlib.Path, shared: Shared | None = None):
    """Makes the folder."""
    self.number, self.folder, self.workdir = number, folder, folder / "run"
    self.chance = random.Random(f"row {row}, trial {number}")
    self.does, self.seen = "", []
    self.once = (shared or Shared(folder.parent)).once
    folder.mkdir(parents=True)

  def clean(
    self,
    count: int = 2,
    flags: Sequence[str] = (),
    *,
    steps: int = STEPS,
    common: Sequence[str] = FLAGS,
  ) -> Pace:
    """Returns the run that nothing disturbs, with these settings, made once for the row."""
    return self.once(_undisturbed, count, tuple(flags), steps, tuple(common))

  def ends_as(self, clean: Pace, **settings: Any) -> None:
    """Lets the run in `workdir` go on to its end, which must be that of the undisturbed one."""
    with Run(self.workdir, **settings) as run:
      run.ends(0)
    same.check(self.workdir, clean.record)


def tried(
  one: Callable[[Attempt], None], row: int, trials: int, folder: pathlib.Path, seed: int = 0
) -> Iterator[Trial]:
  """Yields trials, each as it ends; one that fails leaves its folder.

  Args:
    one: makes a trial; what it raises is its failure.
    row: its number.
    trials: how many.
    folder: gets a folder for each.
    seed: the number of the first.
  """
  with Shared(folder) as shared:
    for number in range(seed, seed + trials):
      attempt = Attempt(row, number, folder / f"trial-{number}", shared)
      began, failure = time.monotonic(), ""
      try:
        one(attempt)
      except Exception as error:  # whatever it is, the next trial is made
        failure = _failure(error)
      seconds = time.monotonic() - began
      note = "; ".join([*filter(None, [failure]), *attempt.seen])
      yield Trial(f"seed {number}: {attempt.does}", not failure, note, seconds)
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
