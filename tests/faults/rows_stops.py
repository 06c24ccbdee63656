"""Rows 5, 6, 18 and 21: runs that are asked to stop, by SIGTERM or Ctrl-C; that stand still."""

import dataclasses
import os
import re
import signal
import sys
import time
from typing import Any

import psutil

from tests.faults import moments, same
from tests.faults.frame import Attempt, Pace, row
from tests.faults.harness import (
  EVALUATE_EVERY,
  FLAGS,
  STEPS,
  Run,
  aborted,
  arguments,
  named,
  saved,
  story,
)
from tests.faults.moments import Moment, after
from tests.helpers.terminals import Terminal, main

STOPPED, INTERRUPTED = 75, 130
STOP_SECONDS = 30

# ------------------------------ SIGTERM ------------------------------


def evaluation_without_input(run: Run, attempt: Attempt) -> None:
  """In an evaluation whose reader stalls."""
  run.wait_for(f"step {2 * EVALUATE_EVERY - 1}/")
  run.stall()
  run.wait_for(f"step {2 * EVALUATE_EVERY}/")
  time.sleep(attempt.chance.uniform(0.5, 1.5))


def step_without_input(run: Run, attempt: Attempt) -> None:
  """In a step that waits for its batch; the watchdog ends the run after 3 s."""
  moments.step(run, attempt)
  run.stall()
  time.sleep(attempt.chance.uniform(0.1, 1.5))


def waiting(run: Run, attempt: Attempt) -> None:
  """While the others are waited for at the end."""
  moments.sampling(run, attempt)
  run.signal(1, signal.SIGSTOP)
  time.sleep(1.5)


STALLED = (step_without_input, evaluation_without_input)
LATE = (*moments.LAST, waiting)  # it may be too late to change anything
STOPS = (
  *(moments.preflight, moments.compiling, moments.first_step, *moments.WORKING, moments.save),
  *STALLED,
  *LATE,
  *(*moments.WORKING, moments.save),
)


@row(
  5,
  fault="SIGTERM at any time, also during evaluation, compilation, a save, a stalled input",
  passes="exit 75 within 30 s, one common step saved, no step lost; Same after restart",
  trials=30,
  seconds=25,
  note="A stop after the last step may come too late to change anything: then all exit with 0.",
)
def asked_to_stop(attempt: Attempt) -> None:
  """Asks a run to stop in each phase: by SIGTERM to one process, or to the launcher."""
  number, moment = attempt.number, STOPS[attempt.number % len(STOPS)]
  turn = number + number // len(STOPS)  # so that a moment does not always meet the same
  count = 4 if turn % 5 == 4 and moment not in STALLED else 2
  whom, launcher = turn % count, turn % 4 == 3 and moment is not waiting
  slow = turn // 2 % 2 if moment in STALLED else None
  asked = "the launcher" if launcher else f"process {whom}"
  attempt.does = f"{count} processes, SIGTERM to {asked}, {moments.title(moment)}"
  flags = moments.flags(moment, same.KEPT)
  with Run(attempt.workdir, count=count, launcher=launcher, slow=slow, flags=flags) as run:
    moment(run, attempt)
    attempt.seen.append(f"asked at: {run.last_line()}")
    if launcher:
      run.popens[0].send_signal(signal.SIGTERM)
      when = time.monotonic()
    else:
      when = run.signal(0 if moment is waiting else whom, signal.SIGTERM)
    if moment is waiting:
      time.sleep(1)
      run.signal(1, signal.SIGCONT)
    codes = set(run.end())
    attempt.seen.append(f"ended after {max(run.ended) - when:.1f} s with {codes}")
    assert codes == {STOPPED} or (moment in LATE and codes == {0}), codes
    assert max(run.ended) - when < STOP_SECONDS, f"{max(run.ended) - when:.1f} s"
    assert run.left_behind() == []
    _no_step_lost(attempt)
  attempt.ends_as(attempt.clean(count, same.KEPT), count=count, flags=same.KEPT)


def _no_step_lost(attempt: Attempt) -> None:
  there, done = saved(attempt.workdir), [step for step, _ in story(attempt.workdir)]
  assert there[-1:] == done[-1:], f"saved {there}, done {done[-1:]}"


# The same run: a process that is stopped for 20 s must not pass for dead.
PATIENT = (*same.KEPT, "--config.processes.heartbeat_seconds=100")
FARTHEST_SECONDS = 20


@row(
  18,
  fault="clean ends with 0-20 s of skew between processes",
  passes="exit code 0",
  trials=50,
  seconds=28,
)
def ends_apart(attempt: Attempt) -> None:
  """Stops one process for 0 to 20 s at the end of a run."""
  number = attempt.number
  count, late = (4, number % 4) if number % 5 == 4 else (2, number % 2)
  moment, launcher = moments.LAST[number % len(moments.LAST)], number % 4 == 3
  seconds = FARTHEST_SECONDS * (number % 50) / 49
  attempt.does = f"{count} processes, process {late} {seconds:.1f} s late, "
  attempt.does += moments.title(moment) + (", launcher" if launcher else "")
  with Run(attempt.workdir, count=count, launcher=launcher, flags=PATIENT) as run:
    moment(run, attempt)
    run.signal(late, signal.SIGSTOP)
    time.sleep(seconds)
    run.signal(late, signal.SIGCONT)
    run.ends(0)
  same.check(attempt.workdir, attempt.clean(count, PATIENT).record)


# ------------------------------ standing still ------------------------------

NOTICED_SECONDS = 45
NAMED = (*moments.WORKING, moments.save)


@row(
  6,
  fault="SIGSTOP of one process; a sleep in one loader",
  passes="noticed within 45 s, the process named, stacks dumped; Same after restart",
  trials=40,
  seconds=35,
  note="Where JAX's own heartbeat expires before the deadline that the watchdog has learned (at "
  "the start and at the end), the others are ended without naming the stopped process, unless "
  "the launcher names it. A stop in a step, an evaluation or a save is always named.",
)
def stands_still(attempt: Attempt) -> None:
  """Stops a process (even trials), or the reading of its data (odd ones)."""
  number, sleeps = attempt.number // 2, attempt.number % 2
  count, still = (4, number % 4) if number % 5 == 4 else (2, number % 2)
  settings = {"count": count, "launcher": number % 3 == 2}
  among = moments.WORKING if sleeps else moments.RUNNING
  moment = among[number % len(among)]
  what = "the loader of process" if sleeps else "process"
  attempt.does = f"{count} processes, {what} {still}, {moments.title(moment)}"
  attempt.does += ", launcher" if settings["launcher"] else ""
  slow = still if sleeps else None
  flags = moments.flags(moment, same.KEPT)
  with Run(attempt.workdir, **settings, slow=slow, flags=flags) as run:
    moment(run, attempt)
    if sleeps:
      when = run.stall()
      assert set(run.end()) == {1}, run.codes
    else:
      when = run.signal(still, signal.SIGSTOP)
      _stopped(run, still)
    seconds = max(run.ended) - when
    attempt.seen.append(f"noticed within {seconds:.1f} s")
    assert seconds < NOTICED_SECONDS, f"{seconds:.1f} s"
    if sleeps or moment in NAMED:  # elsewhere JAX may be faster than what the watchdog has learned
      assert named(run.text(), still), f"process {still} is not named"
      assert "Python stacks of all threads" in run.text()
    if sleeps or run.launcher:
      assert run.left_behind() == []
  attempt.ends_as(attempt.clean(count, same.KEPT), **settings, flags=same.KEPT)


def _stopped(run: Run, still: int) -> None:
  """Waits until a process that is stopped has ended the run, or the other processes."""
  if run.launcher:
    [code] = run.end()
    assert code in (1, 128 + signal.SIGABRT), code
    assert f"process {still} is stopped (SIGSTOP); killed" in run.text()
  else:
    others = [index for index in range(run.count) if index != still]
    run.end(others)
    assert all(aborted(run.codes[index]) for index in others), run.codes


# ------------------------------ Ctrl-C ------------------------------


@dataclasses.dataclass(frozen=True)
class Phase:
  """When, and of what, Ctrl-C is pressed.

  Attributes:
    moment: waits for it; its name is for people.
    verb: of main.py.
    late: whether it may be too late to change anything.
    nothing: whether nothing is to be saved: one line says so.
    launcher: whether `processes.launch` starts two processes.
    twice: whether it is pressed again once that was announced.
    fresh: whether the data are prepared, in a folder of the trial.
    flags: more of them.
  """

  moment: Moment
  verb: str = "train"
  late: bool = False
  nothing: bool = False
  launcher: bool = False
  twice: bool = False
  fresh: bool = False
  flags: tuple[str, ...] = ()


PHASES = (
  Phase(after("imports", "", 2), nothing=True),
  Phase(after("data preparation", "preparing", 1.5), nothing=True, fresh=True),
  Phase(moments.compiling, nothing=True, flags=("--config.compilation_cache_dir=",)),
  Phase(moments.first_step, late=True),
  *map(Phase, NAMED),
  Phase(moments.last_evaluation, late=True),
  Phase(after("the sample at the end", "sample from the trained model", 2), late=True),
  Phase(moments.step, twice=True),
  Phase(moments.step, launcher=True),
  Phase(after("imports", "started 2 processes", 4), launcher=True),
  Phase(after("evaluate", "", 9), "evaluate", late=True),
  Phase(after("sample", "", 9), "sample", late=True, flags=("--max_new_tokens=8",)),
  Phase(after("layout", "", 5), "layout", late=True),
  Phase(after("compare", "", 15), "compare", late=True, flags=("--against=configs/single.py",)),
  Phase(after("tour", "", 20), "tour", late=True),
)


@row(
  21,
  fault="Ctrl-C in a real terminal, at a random moment of each phase: imports, data preparation, "
  "compilation, steps, evaluation, a save, the end; of each verb; under processes.launch; twice",
  passes="exit 75 without a traceback, the last step saved, one line where nothing is to be saved; "
  "twice: 130; Same after restart",
  trials=42,
  seconds=25,
  note="A stop after the last step may come too late to change anything: then it exits with 0.",
)
def ctrl_c(attempt: Attempt) -> None:
  """Presses Ctrl-C in each phase; runs that train are continued, and compared."""
  phase = PHASES[attempt.number % len(PHASES)]
  attempt.does = f"Ctrl-C, {moments.title(phase.moment)}{', twice' * phase.twice}"
  attempt.does += ", under processes.launch" * phase.launcher
  count = 2 if phase.launcher else 1
  clean = attempt.clean(count, same.KEPT)
  environment = {"TFDS_DATA_DIR": str(attempt.folder / "data")} if phase.fresh else {}
  with Terminal(_command(phase, attempt, clean), environment=environment) as terminal:
    phase.moment(terminal, attempt)
    attempt.seen.append(f"pressed at: {terminal.text().splitlines()[-1:]}")
    when = terminal.press()
    if phase.twice:
      terminal.wait_for("press Ctrl-C again")
      time.sleep(1.5)
      if terminal.popen.poll() is None:  # a step is soon over, and saved
        terminal.press()
    code, text = terminal.end(), terminal.text()
    seconds = time.monotonic() - when
    left = _left_behind(terminal.popen.pid)
  attempt.seen.append(f"ended after {seconds:.1f} s with {code}")
  codes = {STOPPED, *([0] if phase.late else []), *([INTERRUPTED] if phase.twice else [])}
  assert code in codes, f"{code}: {text[-1500:]}"
  assert seconds < STOP_SECONDS, f"{seconds:.1f} s"
  for sign in ("Traceback", "Exception ignored", "KeyboardInterrupt"):
    assert sign not in text, text[-1500:]
  assert left == [], left
  done = story(attempt.workdir)
  if phase.nothing and not done:  # a machine may be faster than the moment was drawn for
    assert text.count("there was nothing to save") == 1, text[-1500:]
  if phase.verb == "train":
    if code == STOPPED and done:
      _no_step_lost(attempt)
    attempt.ends_as(clean, count=count, flags=same.KEPT, environment=environment)
    assert not list(attempt.folder.rglob("*.tmp")), "what was half prepared is left"


def _command(phase: Phase, attempt: Attempt, clean: Pace) -> list[str]:
  if phase.verb == "tour":
    return main("tour", "--simulate")
  trains = phase.verb == "train"
  settings: dict[str, Any] = {"count": 2 if phase.launcher else 1, "steps": STEPS, "common": FLAGS}
  workdir = attempt.workdir if trains else clean.workdir
  told = arguments(workdir, flags=(*same.KEPT, *phase.flags), **settings)
  if phase.verb == "compare":  # all but the mesh holds for both sides
    told = [re.sub(r"^--config\.(?!mesh)", "--set=", flag) for flag in told]
  command = main(*([] if trains else [phase.verb]), *told)
  before = [sys.executable, "-m", "processes.launch", "--processes=2", "--"]
  return [*before, *command] if phase.launcher else command


def _left_behind(session: int) -> list[str]:
  """Returns what still runs in a session, or was started from it, a moment after its end."""
  time.sleep(1)
  found = []
  for process in psutil.process_iter():
    try:
      if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
        found.append(" ".join(process.cmdline())[:100])
    except (OSError, psutil.Error):
      continue
  return found
