"""Rows 5 and 18: SIGTERM to whichever process and whenever; ends that are far apart."""

import dataclasses
import pathlib
import signal
import time
from collections.abc import Iterator

from tests.faults import moments, same
from tests.faults.harness import EVALUATE_EVERY, Run, saved, story
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

STOPPED = 75
STOP_SECONDS = 30
# The same run: a process that is stopped for 20 s must not pass for dead.
PATIENT = (*same.KEPT, "--config.processes.heartbeat_seconds=100")
FARTHEST_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Stop:
  """When a run is asked to stop.

  Attributes:
    moment: what the run is doing.
    stalled: whether a reader stalls before.
    late: whether it may be too late to change anything.
  """

  moment: moments.Moment
  stalled: bool = False
  late: bool = False

  def title(self) -> str:
    """Returns it in words."""
    return moments.title(self.moment) + (", a reader stalls" if self.stalled else "")


def _evaluation_without_input(run: Run, chance) -> None:
  """In an evaluation whose reader stalls."""
  run.wait_for(f"step {2 * EVALUATE_EVERY - 1}/")
  run.stall()
  run.wait_for(f"step {2 * EVALUATE_EVERY}/")
  time.sleep(chance.uniform(0.5, 1.5))


def _step_without_input(run: Run, chance) -> None:
  """In a step that waits for its batch; the watchdog ends the run after 3 s."""
  moments.step(run, chance)
  run.stall()
  time.sleep(chance.uniform(0.1, 1.5))


def _waiting(run: Run, chance) -> None:
  """While the others are waited for at the end."""
  moments.sampling(run, chance)
  run.signal(1, signal.SIGSTOP)
  time.sleep(1.5)


STOPS = (
  Stop(moments.preflight),
  Stop(moments.compiling),
  Stop(moments.first_step),
  Stop(moments.step),
  Stop(moments.evaluation),
  Stop(moments.save),
  Stop(_step_without_input, stalled=True),
  Stop(_evaluation_without_input, stalled=True),
  Stop(moments.last_evaluation, late=True),
  Stop(moments.last_save, late=True),
  Stop(moments.sampling, late=True),
  Stop(_waiting, late=True),
  Stop(moments.step),
  Stop(moments.evaluation),
  Stop(moments.save),
)


def row_5(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Asks a run to stop in each phase: by SIGTERM to one process, or to the launcher."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    number, stop = attempt.number, STOPS[attempt.number % len(STOPS)]
    turn = number + number // len(STOPS)  # so that a moment does not always meet the same
    count = 4 if turn % 5 == 4 and not stop.stalled else 2
    whom, launcher = turn % count, turn % 4 == 3 and stop.moment is not _waiting
    slow = turn // 2 % 2 if stop.stalled else None
    asked = "the launcher" if launcher else f"process {whom}"
    attempt.does = f"{count} processes, SIGTERM to {asked}, {stop.title()}"
    settings = {"count": count, "launcher": launcher, "steps": clean.steps}
    flags = moments.flags(stop.moment, same.KEPT)
    with Run(attempt.workdir, **settings, slow=slow, flags=flags) as run:
      stop.moment(run, attempt.chance)
      attempt.seen.append(f"asked at: {run.last_line()}")
      when = _ask(run, 0 if stop.moment is _waiting else whom)
      if stop.moment is _waiting:
        time.sleep(1)
        run.signal(1, signal.SIGCONT)
      codes = set(run.end())
      attempt.seen.append(f"ended after {max(run.ended) - when:.1f} s with {codes}")
      assert codes == {STOPPED} or (stop.late and codes == {0}), codes
      assert max(run.ended) - when < STOP_SECONDS, f"{max(run.ended) - when:.1f} s"
      assert run.left_behind() == []
      done = [step for step, _ in story(run.workdir)]
      assert saved(run.workdir)[-1:] == done[-1:], f"saved {saved(run.workdir)}, done {done[-1:]}"
    with Run(attempt.workdir, count=count, steps=clean.steps, flags=same.KEPT) as run:
      assert set(run.end()) == {0}, run.codes
    same.check(attempt.workdir, clean.of(count).record)

  return tried(5, range(seed, seed + trials), folder, one)


def _ask(run: Run, whom: int) -> float:
  """Sends SIGTERM to a process, or to the launcher where one has started them; returns when."""
  if run.launcher:
    run.popens[0].send_signal(signal.SIGTERM)
    return time.monotonic()
  return run.signal(whom, signal.SIGTERM)


def row_18(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Stops one process for 0 to 20 s at the end of a run."""
  clean = Undisturbed(folder, *PATIENT)

  def one(attempt: Attempt) -> None:
    number = attempt.number
    count, late = (4, number % 4) if number % 5 == 4 else (2, number % 2)
    moment, launcher = moments.LAST[number % len(moments.LAST)], number % 4 == 3
    seconds = FARTHEST_SECONDS * (number % 50) / 49
    attempt.does = f"{count} processes, process {late} {seconds:.1f} s late, "
    attempt.does += moments.title(moment) + (", launcher" if launcher else "")
    settings = {"count": count, "launcher": launcher, "steps": clean.steps}
    with Run(attempt.workdir, **settings, flags=PATIENT) as run:
      moment(run, attempt.chance)
      run.signal(late, signal.SIGSTOP)
      time.sleep(seconds)
      run.signal(late, signal.SIGCONT)
      assert set(run.end()) == {0}, run.codes
      assert run.left_behind() == []
    same.check(attempt.workdir, clean.of(count).record)

  return tried(18, range(seed, seed + trials), folder, one)
