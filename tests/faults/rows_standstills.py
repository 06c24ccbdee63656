"""Row 6: a process that stands still is noticed, named, shown by its stacks, and costs no step."""

import pathlib
import signal
from collections.abc import Iterator

from tests.faults import moments, same
from tests.faults.harness import Run, aborted, named
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

NOTICED_SECONDS = 45
NAMED = (*moments.WORKING, moments.save)


def row_6(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Stops a process (even trials), or the reading of its data (odd ones)."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    number = attempt.number // 2
    count, still = (4, number % 4) if number % 5 == 4 else (2, number % 2)
    settings = {"count": count, "launcher": number % 3 == 2, "steps": clean.steps}
    sleeps = attempt.number % 2
    among = moments.WORKING if sleeps else moments.RUNNING
    moment = among[number % len(among)]
    what = "the loader of process" if sleeps else "process"
    attempt.does = f"{count} processes, {what} {still}, {moments.title(moment)}"
    attempt.does += ", launcher" if settings["launcher"] else ""
    (_sleeping if sleeps else _stopped)(attempt, settings, moment, still)
    with Run(attempt.workdir, **settings, flags=same.KEPT) as run:
      assert set(run.end()) == {0}, run.codes
    same.check(attempt.workdir, clean.of(count).record)

  return tried(6, range(seed, seed + trials), folder, one)


def _stopped(attempt: Attempt, settings: dict, moment: moments.Moment, still: int) -> None:
  with Run(attempt.workdir, **settings, flags=moments.flags(moment, same.KEPT)) as run:
    moment(run, attempt.chance)
    when = run.signal(still, signal.SIGSTOP)
    if run.launcher:
      [code] = run.end()
      assert code in (1, 128 + signal.SIGABRT), code
      assert f"process {still} is stopped (SIGSTOP); killed" in run.text()
    else:
      others = [index for index in range(run.count) if index != still]
      run.end_of(others)
      assert all(aborted(run.codes[index]) for index in others), run.codes
    _in_time(attempt, run, when)
    if moment in NAMED:  # elsewhere JAX may be faster than what the watchdog has learned
      _told(run, still)
    if run.launcher:
      assert run.left_behind() == []


def _sleeping(attempt: Attempt, settings: dict, moment: moments.Moment, still: int) -> None:
  with Run(attempt.workdir, **settings, slow=still, flags=same.KEPT) as run:
    moment(run, attempt.chance)
    when = run.stall()
    assert set(run.end()) == {1}, run.codes
    _in_time(attempt, run, when)
    _told(run, still)
    assert run.left_behind() == []


def _in_time(attempt: Attempt, run: Run, when: float) -> None:
  seconds = max(run.ended) - when
  attempt.seen.append(f"noticed within {seconds:.1f} s")
  assert seconds < NOTICED_SECONDS, f"{seconds:.1f} s"


def _told(run: Run, still: int) -> None:
  assert named(run.text(), still), f"process {still} is not named"
  assert "Python stacks of all threads" in run.text()
