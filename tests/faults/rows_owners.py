"""Rows 23 and 24: two starts in one workdir; an owner that was stopped, replaced and woken."""

import json
import pathlib
import random
import re
import signal
import time
from collections.abc import Iterator

from tests.faults import same
from tests.faults.harness import Run, aborted, refused, story
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried
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


def row_23(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Starts a run twice: the second is refused, or follows the first where that ends."""
  clean = Undisturbed(folder, *ENDLESS, steps=STEPS)

  def one(attempt: Attempt) -> None:
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
    beginning = [line for line in story(attempt.workdir) if line[0] <= EVERY]
    assert beginning == [line for line in clean.of(count).record.lines if line[0] <= EVERY]

  return tried(23, range(seed, seed + trials), folder, one)


def _newest_step(run: Run) -> int:
  return max(map(int, re.findall(r"^step (\d+)/", run.text(), re.MULTILINE)), default=0)


def _refused(attempt: Attempt, first: Run, second: Run) -> tuple[Run, Run]:
  """Waits until one of two is refused, by the name of the other; returns the other and it."""
  began = time.monotonic()
  while not first.poll() and not second.poll():
    assert time.monotonic() - began < 240, "none of the two is refused"
    time.sleep(0.1)
  owner, other = (first, second) if second.poll() else (second, first)
  assert refused(other.end()), other.codes
  attempt.seen.append(f"refused after {time.monotonic() - began:.0f} s")
  [pid] = {*re.findall(LIVE, other.text())}
  assert int(pid) == owner.pids()[0]
  assert "step 1/" not in other.text()
  return owner, other


def _each_step_once(workdir: pathlib.Path) -> None:
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  steps = [line["step"] for line in lines if "loss" in line]
  assert steps == [*range(1, len(steps) + 1)], "steps are missing or written twice"


# ------------------------------ an owner that wakes up ------------------------------


def _computing(run: Run, chance: random.Random) -> None:
  """In a step."""
  run.wait_for(f"step {chance.randint(5, STOPPED_STEPS // 3)}/")
  time.sleep(chance.uniform(0, 0.1))


def _saving(run: Run, chance: random.Random) -> None:
  """In a save."""
  folder, step = run.workdir / "checkpoints", same.SAVE_EVERY * chance.randint(1, 30)

  def seen() -> bool:
    return folder.is_dir() and any(path.name.startswith(f"{step}.") for path in folder.iterdir())

  run.wait_until(lambda: seen() or f"step {step + 50}/" in run.text(), f"the save of step {step}")
  time.sleep(chance.uniform(0, 0.02))


def _compiling(run: Run, chance: random.Random) -> None:
  """Between its claim and its first step."""
  run.wait_for("workdir:")
  time.sleep(chance.uniform(0, 2))


MOMENTS = (_computing, _saving, _saving, _compiling)


def row_24(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Stops all processes of a run for longer than its lease, starts another, and wakes the first."""
  flags = (*LEASE, *same.KEPT)
  clean = Undisturbed(folder, *flags, steps=STOPPED_STEPS)

  def one(attempt: Attempt) -> None:
    number, moment = attempt.number, MOMENTS[attempt.number % len(MOMENTS)]
    count, late = (2 if number % 5 == 4 else 1), bool(number // len(MOMENTS) % 2)
    when = "after the end of the second" if late else "while the second trains"
    attempt.does = f"{count} processes, {moment.__name__[1:]}, woken {when}"
    settings = {"count": count, "steps": STOPPED_STEPS, "flags": flags}
    with Run(attempt.workdir, **settings) as first:
      moment(first, attempt.chance)
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
    same.check(attempt.workdir, clean.of(count).record)

  return tried(24, range(seed, seed + trials), folder, one)
