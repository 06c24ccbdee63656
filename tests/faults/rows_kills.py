"""Rows 1, 3, 4, 32 and 33: SIGKILL of one process, of all; who notices, and who is replaced."""

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.faults import moments, same
from tests.faults.frame import Attempt, Pace, row
from tests.faults.harness import Run, aborted, saved, story
from tests.faults.opening import Opening

STEPS = 150
DRAWS = 5  # of a moment: a run may end before it

# ------------------------------ one, at any time ------------------------------


@row(
  1,
  fault="SIGKILL of a random process at a random time",
  passes="resumes by itself; Same; at most two checkpoint intervals redone; no process left behind",
  trials=70,
  seconds=26,
  note="50 trials with 2 processes, 20 with 4, under `processes.launch --restarts`. Every other "
  "kill comes after the first step: most of a run this short is its start.",
)
def one_is_killed(attempt: Attempt) -> None:
  """Kills a process at a random time; the launcher starts all again."""
  count = 4 if attempt.number % 7 in (2, 5) else 2
  killed, late = attempt.chance.randrange(count), bool(attempt.number % 2)
  since = "the first step" if late else "the start"
  attempt.does = f"{count} processes, process {killed} at any time after {since}"
  clean = attempt.clean(count, same.KEPT, steps=STEPS)
  _until_met(attempt, lambda workdir: kill_one(attempt, clean, workdir, count, killed, late))


def _until_met(attempt: Attempt, once: Callable[[pathlib.Path], bool]) -> None:
  """Calls a function, with a new workdir each time, until no run has ended before its moment."""
  if not any(once(attempt.folder / f"run-{draw}") for draw in range(DRAWS)):
    raise AssertionError(f"the run has ended before each of {DRAWS} moments")


def kill_one(
  attempt: Attempt, clean: Pace, workdir: pathlib.Path, count: int, killed: int, late: bool
) -> bool:
  """Kills a process of a run; returns whether the run had not ended before."""
  share, began = attempt.chance.random(), time.monotonic()
  with Run(workdir, count=count, launcher=True, restarts=2, steps=STEPS, flags=same.KEPT) as run:
    run.wait_until(run.pids, "the processes")
    if late:
      run.wait_for("step 1/")
    if not run.sleep(share * (clean.end - (clean.first_step if late else 0))):
      assert "launch: restart" not in run.text(), "it has failed by itself"
      clean.saw_end(time.monotonic() - began, run.codes)
      return False
    where = run.last_line()
    with contextlib.suppress(ProcessLookupError):  # this one has ended, the launcher not yet
      run.signal(killed, signal.SIGKILL)
    if not run.said("launch: restart 1 of"):
      assert run.codes == [0], run.codes
      return False
    attempt.seen.append(f"killed at: {where}")
    done = max((step for step, _ in story(workdir)), default=0)
    run.ends(0)
    text = run.text()
    assert f"process {killed} failed first: signal SIGKILL (9)" in text
    assert text.count("launch: restart") == 1
    redone = done - resumed(text.partition("launch: restart 1 of")[2])
    attempt.seen.append(f"{redone} steps redone")
    assert redone <= 2 * same.SAVE_EVERY
  same.check(workdir, clean.record)
  assert not list((workdir / "checkpoints").glob("*.broken*"))
  return True


def resumed(text: str) -> int:
  """Returns the step from which the run goes on that has printed this."""
  found = re.search(r"resumes from the checkpoint of step (\d+)|starts from the first step", text)
  assert found, "nothing is said of where the run goes on from"
  return int(found[1] or 0)


# ------------------------------ all ------------------------------


@row(
  3,
  fault="SIGKILL of all; again during restore",
  passes="Same",
  trials=30,
  seconds=30,
  note="Every third trial kills a second time, while checkpoints are read. Odd trials kill the "
  "launcher too.",
)
def all_are_killed(attempt: Attempt) -> None:
  """Kills all processes at once; every third time again while the checkpoint is read."""
  again, launcher = attempt.number % 3 == 2, bool(attempt.number % 2)
  count = 4 if attempt.number % 5 == 4 else 2
  whom = "processes and their launcher" if launcher else "processes"
  attempt.does = f"all of {count} {whom}{', again during the restore' if again else ''}"
  settings = {"count": count, "launcher": launcher, "steps": STEPS, "flags": same.KEPT}
  clean = attempt.clean(count, same.KEPT, steps=STEPS)
  _until_met(attempt, lambda workdir: _all_killed(attempt, clean, workdir, settings, again))


def _all_killed(
  attempt: Attempt, clean: Pace, workdir: pathlib.Path, settings: dict[str, Any], again: bool
) -> bool:
  """Kills all processes of a run; returns whether it had not ended before."""
  share, began = attempt.chance.random(), time.monotonic()
  with Run(workdir, **settings) as run:
    run.wait_until(run.pids, "the processes")
    if again:  # there must be something to restore, and something left to do
      run.wait_for(f"step {round(10 + share * (STEPS - 20))}/")
      run.wait_until(lambda: saved(workdir), "a checkpoint")
    elif not run.sleep(share * clean.end):
      clean.saw_end(time.monotonic() - began, run.codes)
      return False
    attempt.seen.append(f"killed at: {run.last_line()}")
    kill_all(run)
  if again:
    assert any(_killed_in_restore(attempt, workdir, settings) for _ in range(DRAWS)), "too late"
  with Run(workdir, **settings) as run:
    run.ends(0)
    attempt.seen.append(f"resumes from step {resumed(run.text())}")
  same.check(workdir, clean.record)
  assert not list((workdir / "checkpoints").glob("*.broken*"))
  return True


def _killed_in_restore(attempt: Attempt, workdir: pathlib.Path, settings: dict[str, Any]) -> bool:
  """Kills all once they read the arrays of a checkpoint; returns whether they still did."""
  states = [workdir / "checkpoints" / str(step) / "state" for step in saved(workdir)]
  with Opening(states) as opening, Run(workdir, **settings) as run:
    run.wait_until(opening.seen, "a file of the checkpoint is opened")
    time.sleep(attempt.chance.uniform(0, 0.1))
    kill_all(run)
    return "resumes from the checkpoint" not in run.text()


def kill_all(run: Run) -> None:
  """Kills the launcher, where there is one, and all processes; checks that nobody is left."""
  run.meet()
  for pid in {*(popen.pid for popen in run.popens), *run.pids()}:
    with contextlib.suppress(ProcessLookupError):  # the launcher's reaper was faster
      os.kill(pid, signal.SIGKILL)
  run.end()
  assert run.left_behind() == []


# ------------------------------ one, and the others ------------------------------


@row(
  4,
  fault="SIGKILL of process 0, or of another process",
  passes="all others end within 25 s (JAX aborts them); the launcher names the one that died "
  "first; Same after restart",
  trials=20,
  seconds=28,
)
def others_end(attempt: Attempt) -> None:
  """Kills a process in each phase of a run; the others end, and it is named."""
  number = attempt.number
  count, killed = (4, number % 4) if number % 5 == 4 else (2, number % 2)
  moment = moments.RUNNING[number % len(moments.RUNNING)]
  launcher = number % 3 == 2
  attempt.does = f"{count} processes, process {killed}, {moments.title(moment)}"
  attempt.does += ", launcher" if launcher else ""
  flags = moments.flags(moment, same.KEPT)
  with Run(attempt.workdir, count=count, launcher=launcher, flags=flags) as run:
    moment(run, attempt)
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
  clean = attempt.clean(count, same.KEPT)
  attempt.ends_as(clean, count=count, launcher=launcher, flags=same.KEPT)


# ------------------------------ one, which is replaced ------------------------------

_REPLACEMENTS = 12  # in the worst case all of four processes die three times
# Once a process has ended well, what dies is not replaced.
_MOMENTS = tuple(one for one in moments.RUNNING if one not in moments.LAST)


@row(
  32,
  fault="SIGKILL of one process, of process 0, or of two, in each phase, under "
  "`processes.launch --replacements`",
  passes="what died is replaced and the others stay, or JAX ends all, which are replaced; exit 0; "
  "Same; no process left behind",
  trials=40,
  seconds=30,
  note="If process 0 dies, JAX ends the others, and the launcher replaces them, too.",
)
def one_or_two_are_replaced(attempt: Attempt) -> None:
  """Kills one process, process 0, or two, in each phase of a run."""
  count = 4 if attempt.number % 3 == 0 else 2
  first = attempt.number % count
  killed = {first, (first + 1) % count} if attempt.number % 4 == 3 else {first}
  moment = _MOMENTS[attempt.number % len(_MOMENTS)]
  attempt.does = f"processes {sorted(killed)} of {count}, {moments.title(moment)}"
  with _replacing(attempt, count, moments.flags(moment, same.KEPT)) as run:
    moment(run, attempt)
    for index in killed:
      run.signal(index, signal.SIGKILL)
    _ends_well(attempt, run, attempt.clean(count, same.KEPT))


@row(
  33,
  fault="SIGKILL of one of four processes, and of another one during the recovery",
  passes="as in row 32",
  trials=20,
  seconds=45,
)
def another_dies_in_the_recovery(attempt: Attempt) -> None:
  """Kills a process in a step, and another one while the rest recovers."""
  killed, later = attempt.chance.sample(range(4), 2)
  attempt.does = f"process {killed} of 4 in a step, process {later} during the recovery"
  with _replacing(attempt, 4, same.KEPT) as run:
    moments.step(run, attempt)
    run.signal(killed, signal.SIGKILL)
    run.said(f"process {killed} ended: signal SIGKILL")
    run.sleep(attempt.chance.uniform(0, 8))
    with contextlib.suppress(ProcessLookupError):  # process 0 has died: JAX has ended it
      run.signal(later, signal.SIGKILL)
    _ends_well(attempt, run, attempt.clean(4, same.KEPT))


def _replacing(attempt: Attempt, count: int, flags: tuple[str, ...]) -> Run:
  settings = {"launcher": True, "replacements": _REPLACEMENTS}
  return Run(attempt.workdir, count=count, flags=flags, **settings)


def _ends_well(attempt: Attempt, run: Run, clean: Pace) -> None:
  run.ends(0)
  text = run.text()
  replaced = len(re.findall(r"replacement \d+ of", text))
  attempt.seen.append(f"{replaced} replaced, {text.count('abandons the step')} stayed")
  assert replaced, "nothing was replaced"
  same.check(attempt.workdir, clean.record)
