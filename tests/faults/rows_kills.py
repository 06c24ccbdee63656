"""Rows 1, 3 and 4: SIGKILL of a process, of all, again during a restore; who notices, and when."""

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator

from tests.faults import moments, same
from tests.faults.harness import Run, aborted, saved, story
from tests.faults.opening import Opening
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

STEPS = 150
DRAWS = 5  # of a moment: a run may end before it

# ------------------------------ one, at any time ------------------------------


def row_1(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills a process at a random time; the launcher starts all again."""
  clean = Undisturbed(folder, *same.KEPT, steps=STEPS)

  def one(attempt: Attempt) -> None:
    count = 4 if attempt.number % 7 in (2, 5) else 2
    killed, late = attempt.chance.randrange(count), bool(attempt.number % 2)
    since = "the first step" if late else "the start"
    attempt.does = f"{count} processes, process {killed} at any time after {since}"
    _until_met(attempt, lambda workdir: _one_killed(attempt, clean, workdir, count, killed, late))

  return tried(1, range(seed, seed + trials), folder, one)


def _until_met(attempt: Attempt, once: Callable[[pathlib.Path], bool]) -> None:
  """Calls a function, with a new workdir each time, until no run has ended before its moment."""
  if not any(once(attempt.folder / f"run-{draw}") for draw in range(DRAWS)):
    raise AssertionError(f"the run has ended before each of {DRAWS} moments")


def _one_killed(
  attempt: Attempt, clean: Undisturbed, workdir: pathlib.Path, count: int, killed: int, late: bool
) -> bool:
  """Kills a process of a run; returns whether the run had not ended before."""
  pace = clean.of(count)
  share, began = attempt.chance.random(), time.monotonic()
  with Run(workdir, count=count, launcher=True, restarts=2, steps=STEPS, flags=same.KEPT) as run:
    run.wait_until(run.pids, "the processes")
    if late:
      run.wait_for("step 1/")
    if not run.sleep(share * (pace.end - (pace.first_step if late else 0))):
      assert "launch: restart" not in run.text(), "it has failed by itself"
      clean.ended(count, time.monotonic() - began, run.codes)
      return False
    where = run.last_line()
    with contextlib.suppress(ProcessLookupError):  # this one has ended, the launcher not yet
      run.signal(killed, signal.SIGKILL)
    if not run.said("launch: restart 1 of"):
      assert run.codes == [0], run.codes
      return False
    attempt.seen.append(f"killed at: {where}")
    done = max((step for step, _ in story(workdir)), default=0)
    assert run.end() == [0], run.codes
    text = run.text()
    assert f"process {killed} failed first: signal SIGKILL (9)" in text
    assert text.count("launch: restart") == 1
    assert run.left_behind() == []
    redone = done - resumed(text.partition("launch: restart 1 of")[2])
    attempt.seen.append(f"{redone} steps redone")
    assert redone <= 2 * same.SAVE_EVERY
  same.check(workdir, pace.record)
  assert not list((workdir / "checkpoints").glob("*.broken*"))
  return True


def resumed(text: str) -> int:
  """Returns the step from which the run goes on that has printed this."""
  found = re.search(r"resumes from the checkpoint of step (\d+)|starts from the first step", text)
  assert found, "nothing is said of where the run goes on from"
  return int(found[1] or 0)


# ------------------------------ all ------------------------------


def row_3(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills all processes at once; every third time again while the checkpoint is read."""
  clean = Undisturbed(folder, *same.KEPT, steps=STEPS)

  def one(attempt: Attempt) -> None:
    again, launcher = attempt.number % 3 == 2, bool(attempt.number % 2)
    count = 4 if attempt.number % 5 == 4 else 2
    whom = "processes and their launcher" if launcher else "processes"
    attempt.does = f"all of {count} {whom}{', again during the restore' if again else ''}"
    settings = {"count": count, "launcher": launcher, "steps": STEPS, "flags": same.KEPT}
    _until_met(attempt, lambda workdir: _all_killed(attempt, clean, workdir, settings, again))

  return tried(3, range(seed, seed + trials), folder, one)


def _all_killed(
  attempt: Attempt, clean: Undisturbed, workdir: pathlib.Path, settings: dict, again: bool
) -> bool:
  """Kills all processes of a run; returns whether it had not ended before."""
  pace = clean.of(settings["count"])
  share, began = attempt.chance.random(), time.monotonic()

  # ------------------------------ at any time ------------------------------
  with Run(workdir, **settings) as run:
    run.wait_until(run.pids, "the processes")
    if again:  # there must be something to restore, and something left to do
      run.wait_for(f"step {round(10 + share * (STEPS - 20))}/")
      run.wait_until(lambda: saved(workdir), "a checkpoint")
    elif not run.sleep(share * pace.end):
      clean.ended(settings["count"], time.monotonic() - began, run.codes)
      return False
    attempt.seen.append(f"killed at: {run.last_line()}")
    _kill_all(run)

  # ------------------------------ during the restore ------------------------------
  if again:
    assert any(_killed_in_restore(attempt, workdir, settings) for _ in range(DRAWS)), "too late"

  with Run(workdir, **settings) as run:
    assert set(run.end()) == {0}, run.codes
    attempt.seen.append(f"resumes from step {resumed(run.text())}")
    assert run.left_behind() == []
  same.check(workdir, pace.record)
  assert not list((workdir / "checkpoints").glob("*.broken*"))
  return True


def _killed_in_restore(attempt: Attempt, workdir: pathlib.Path, settings: dict) -> bool:
  """Kills all once they read the arrays of a checkpoint; returns whether they still did."""
  states = [workdir / "checkpoints" / str(step) / "state" for step in saved(workdir)]
  with Opening(states) as opening, Run(workdir, **settings) as run:
    run.wait_until(opening.seen, "a file of the checkpoint is opened")
    time.sleep(attempt.chance.uniform(0, 0.1))
    _kill_all(run)
    return "resumes from the checkpoint" not in run.text()


def _kill_all(run: Run) -> None:
  """Kills the launcher, where there is one, and all processes; checks that nobody is left."""
  run.meet()
  for pid in {*(popen.pid for popen in run.popens), *run.pids()}:
    with contextlib.suppress(ProcessLookupError):  # the launcher's reaper was faster
      os.kill(pid, signal.SIGKILL)
  run.end()
  until = time.monotonic() + 5
  while run.left_behind() and time.monotonic() < until:
    time.sleep(0.05)
  assert run.left_behind() == []


# ------------------------------ one, and the others ------------------------------


def row_4(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills a process in each phase of a run; the others end, and it is named."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    number = attempt.number
    count, killed = (4, number % 4) if number % 5 == 4 else (2, number % 2)
    moment = moments.RUNNING[number % len(moments.RUNNING)]
    launcher = number % 3 == 2
    attempt.does = f"{count} processes, process {killed}, {moments.title(moment)}"
    attempt.does += ", launcher" if launcher else ""
    settings = {"count": count, "launcher": launcher, "steps": clean.steps}
    with Run(attempt.workdir, **settings, flags=moments.flags(moment, same.KEPT)) as run:
      moment(run, attempt.chance)
      when = run.signal(killed, signal.SIGKILL)
      codes = run.end()
      attempt.seen.append(f"all ended after {max(run.ended) - when:.1f} s")
      assert None not in codes, codes
      if launcher:
        assert codes == [128 + signal.SIGKILL], codes
        assert f"process {killed} failed first: signal SIGKILL (9)" in run.text()
      else:
        assert codes[killed] == -signal.SIGKILL, codes
        assert all(aborted(code) for i, code in enumerate(codes) if i != killed), codes
      assert max(run.ended) - when < 25, f"{max(run.ended) - when:.1f} s"
      assert run.left_behind() == []
    with Run(attempt.workdir, **settings, flags=same.KEPT) as run:
      assert set(run.end()) == {0}, run.codes
    same.check(attempt.workdir, clean.of(count).record)

  return tried(4, range(seed, seed + trials), folder, one)
