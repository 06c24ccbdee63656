"""Rows 32 and 33: processes that are replaced while the others stay."""

import contextlib
import pathlib
import re
import signal
from collections.abc import Iterator

from tests.faults import moments, same
from tests.faults.harness import Run
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

_REPLACEMENTS = 12  # in the worst case all of four processes die three times
# Once a process has ended well, what dies is not replaced.
_MOMENTS = tuple(one for one in moments.RUNNING if one not in moments.LAST)


def row_32(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills one process, process 0, or two, in each phase of a run."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    count = 4 if attempt.number % 3 == 0 else 2
    first = attempt.number % count
    killed = {first, (first + 1) % count} if attempt.number % 4 == 3 else {first}
    moment = _MOMENTS[attempt.number % len(_MOMENTS)]
    attempt.does = f"processes {sorted(killed)} of {count}, {moments.title(moment)}"
    with _run(attempt, count, clean.steps, moments.flags(moment, same.KEPT)) as run:
      moment(run, attempt.chance)
      for index in killed:
        run.signal(index, signal.SIGKILL)
      _ends_well(attempt, run)
    same.check(attempt.workdir, clean.of(count).record)

  return tried(32, range(seed, seed + trials), folder, one)


def row_33(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills a process in a step, and another one while the rest recovers."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    killed, later = attempt.chance.sample(range(4), 2)
    attempt.does = f"process {killed} of 4 in a step, process {later} during the recovery"
    with _run(attempt, 4, clean.steps, same.KEPT) as run:
      moments.step(run, attempt.chance)
      run.signal(killed, signal.SIGKILL)
      run.said(f"process {killed} ended: signal SIGKILL")
      run.sleep(attempt.chance.uniform(0, 8))
      with contextlib.suppress(ProcessLookupError):  # process 0 has died: JAX has ended it
        run.signal(later, signal.SIGKILL)
      _ends_well(attempt, run)
    same.check(attempt.workdir, clean.of(4).record)

  return tried(33, range(seed, seed + trials), folder, one)


def _run(attempt: Attempt, count: int, steps: int, flags: tuple[str, ...]) -> Run:
  settings = {"count": count, "launcher": True, "steps": steps, "flags": flags}
  return Run(attempt.workdir, **settings, replacements=_REPLACEMENTS)


def _ends_well(attempt: Attempt, run: Run) -> None:
  assert run.end() == [0], run.codes
  text = run.text()
  replaced = len(re.findall(r"replacement \d+ of", text))
  attempt.seen.append(f"{replaced} replaced, {text.count('abandons the step')} stayed")
  assert replaced, "nothing was replaced"
  assert run.left_behind() == []
