"""Rows 23 and 24: two starts in one workdir; an owner that was stopped, replaced and woken."""

import pathlib
import re
import signal
import time

from tests.faults import moments, same
from tests.faults.frame import Attempt, row
from tests.faults.harness import Run, aborted, lines_of, refused, story
from tests.training.checkpointing.states import contents

STOPPED, REFUSED = 75, 2
LEASE_SECONDS = 10
LEASE = (
  f"--config.processes.lease_seconds={LEASE_SECONDS}",
  "--config.processes.owner_wait_seconds=10",
)
# A run without end makes the same steps as a short one.
EVERY, STEPS, WITHOUT_END = 150, 160, 1_000_000
ENDLESS = (
  *LEASE,
  "--config.optimizer.schedule=constant",
  "--config.optimizer.warmup_steps=0",
  f"--config.evaluation.every_steps={EVERY}",
  f"--config.checkpoint.every_steps={EVERY}",
)
FARTHEST_SECONDS = 60
LIVE = r"belongs to another run that is alive: process (\d+) on \S+, since 20\d\d-"
REPLACED = "this workdir now belongs to another run: process"
STOPPED_STEPS = 400
ENDS = ("nobody ends it", "it is asked to stop", "it is killed")


@row(
  23,
  fault="two starts in one workdir, 0-60 s apart; the first continues, is stopped, or is killed",
  passes="one of them trains, each step appears once, Same; the other is refused with 2, naming "
  "the owner, or takes over once the first has ended",
  trials=20,
  seconds=70,
)
def started_twice(attempt: Attempt) -> None:
  """Starts a run twice: the second is refused, or follows the first where that ends."""
  number = attempt.number
  count, end = (2 if number % 4 == 3 else 1), ENDS[number % len(ENDS)]
  apart = FARTHEST_SECONDS * (7 * number % 20) / 19  # each of 20 once, and few cover the range
  attempt.does = f"{count} processes each, the second {apart:.1f} s after the first, {end}"
  settings = {"count": count, "steps": WITHOUT_END, "flags": ENDLESS}
  with Run(attempt.workdir, **settings) as first:
    assert first.sleep(apart) or not apart, first.codes
    for index in range(count if number % len(ENDS) else 0):
      first.signal(index, signal.SIGTERM if number % len(ENDS) == 1 else signal.SIGKILL)
    with Run(attempt.workdir, **settings) as second:
      if number % len(ENDS):
        owner, other = second, first
      else:
        owner, other = _refused(attempt, first, second)
      # It may resume beyond that step, on a machine that makes many in the time between.
      owner.wait_until(lambda: _newest_step(owner) >= STEPS, f"step {STEPS} or a later one")
      assert None not in other.end(), other.codes
      attempt.seen.append(f"the other ended with {other.codes}")
      owner.signal(0, signal.SIGTERM)
      assert {*owner.end()} == {STOPPED}, owner.codes
  _each_step_once(attempt.workdir)
  clean = attempt.clean(count, ENDLESS, steps=STEPS).record
  beginning = [line for line in story(attempt.workdir) if line[0] <= EVERY]
  assert beginning == [line for line in clean.lines if line[0] <= EVERY]


def _newest_step(run: Run) -> int:
  return max(map(int, re.findall(r"^step (\d+)/", run.text(), re.MULTILINE)), default=0)


def _refused(attempt: Attempt, first: Run, second: Run) -> tuple[Run, Run]:
  """Waits until one of two is refused, by the name of the other; returns the other and it."""
  began = time.monotonic()
  first.until(second.poll)  # or until the first has ended: of two at once either is refused
  assert first.poll() or second.poll(), "none of the two is refused"
  owner, other = (first, second) if second.poll() else (second, first)
  assert refused(other.end()), other.codes
  attempt.seen.append(f"refused after {time.monotonic() - began:.0f} s")
  [pid] = {*re.findall(LIVE, other.text())}
  assert int(pid) == owner.pids()[0]
  assert "step 1/" not in other.text()
  return owner, other


def _each_step_once(workdir: pathlib.Path) -> None:
  steps = [line["step"] for line in lines_of(workdir) if "loss" in line]
  assert steps == [*range(1, len(steps) + 1)], "steps are missing or written twice"


# ------------------------------ an owner that wakes up ------------------------------


def computing(run: Run, attempt: Attempt) -> None:
  """In a step."""
  run.wait_for(f"step {attempt.chance.randint(5, STOPPED_STEPS // 3)}/")
  time.sleep(attempt.chance.uniform(0, 0.1))


def saving(run: Run, attempt: Attempt) -> None:
  """In a save, or some steps later."""
  folder, step = attempt.workdir / "checkpoints", same.SAVE_EVERY * attempt.chance.randint(1, 30)
  later = f"step {step + 50}/"
  run.wait_until(lambda: any(folder.glob(f"{step}.*")) or later in run.text(), f"a save of {step}")
  time.sleep(attempt.chance.uniform(0, 0.02))


MOMENTS = (computing, saving, saving, moments.compiling)


@row(
  24,
  fault="an owner suspended by SIGSTOP, replaced after its lease, resumed",
  passes="it writes nothing more and ends with 2; Same",
  trials=16,
  seconds=50,
  note="Of 2 suspended processes JAX may end some by SIGABRT before they notice.",
)
def owner_wakes(attempt: Attempt) -> None:
  """Stops all processes of a run for longer than its lease, starts another, and wakes the first."""
  flags = (*LEASE, *same.KEPT)
  number, moment = attempt.number, MOMENTS[attempt.number % len(MOMENTS)]
  count, late = (2 if number % 5 == 4 else 1), bool(number // len(MOMENTS) % 2)
  when = "after the end of the second" if late else "while the second trains"
  attempt.does = f"{count} processes, {moments.title(moment)}, woken {when}"
  settings = {"count": count, "steps": STOPPED_STEPS, "flags": flags}
  with Run(attempt.workdir, **settings) as first:
    moment(first, attempt)
    for index in range(count):
      first.signal(index, signal.SIGSTOP)
    attempt.seen.append(f"stopped at: {first.last_line()}")
    began, said = time.monotonic(), len(first.text())
    with Run(attempt.workdir, **settings) as second:
      second.wait_for("workdir:")
      attempt.seen.append(f"replaced after {time.monotonic() - began:.0f} s")
      if late:
        assert {*second.end()} == {0}, second.codes
        before = contents(attempt.workdir)
      else:
        second.wait_for(f"step {STOPPED_STEPS // 2}/")
      for index in range(count):
        first.signal(index, signal.SIGCONT)
      first.end()
      attempt.seen.append(f"woken, it ended with {first.codes}")
      if late:
        assert contents(attempt.workdir) == before, "the first has written"
      assert {*second.end()} == {0}, second.codes
    if count == 1:
      assert first.codes == [REFUSED], first.codes
      assert REPLACED in first.text()[said:]
    else:  # JAX may notice the silence first
      assert all(code == REFUSED or aborted(code) for code in first.codes), first.codes
  same.check(attempt.workdir, attempt.clean(count, flags, steps=STOPPED_STEPS).record)
