"""Row 22: what is slow and makes progress is never ended; what stands still is."""

import pathlib
import subprocess
import time
from collections.abc import Iterator, Mapping

from tests.faults import same
from tests.faults.harness import OUTSIDE, Run
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried

STEPS = 20
# processes.start_timeout_seconds, by the number of processes: two have to find one another first.
TIMEOUT_SECONDS = {1: 10, 2: 25}
FLAGS = (
  "--config.checkpoint.every_steps=10",
  "--config.evaluation.every_steps=0",
  "--config.evaluation.sample_tokens=0",
  "--config.processes.heartbeat_seconds=100",
)
TRACE = ("--config.profile.start_step=5", "--config.profile.steps=2")
KINDS = (
  "slow disk",
  "slow disk, 2 processes",
  "disk that stands still",
  "slow trace",
  "slow input",
)


def _slow(folder: pathlib.Path, where: str, pause: float, size: int) -> dict[str, str]:
  """Returns the variables by which writes to some files are delayed; compiles what does it."""
  library = folder / "slow_writes.so"
  source = OUTSIDE / "slow_writes.c"
  subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
  return {
    "LD_PRELOAD": str(library),
    "FAULTS_SLOW_PATH": where,
    "FAULTS_SLOW_BYTES": str(size),
    "FAULTS_SLOW_MICROSECONDS": str(int(pause * 1e6)),
    "FAULTS_STILL": str(folder / "still"),
  }


def row_22(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Slows down one thing after the other."""
  clean = Undisturbed(folder, *FLAGS, steps=STEPS)

  def one(attempt: Attempt) -> None:
    kind = KINDS[attempt.number % len(KINDS)]
    attempt.does = kind
    count = 2 if "2 processes" in kind else 1
    reference = clean.of(count)
    {
      "slow disk": _slow_disk,
      "slow disk, 2 processes": _slow_disk,
      "disk that stands still": _still_disk,
      "slow trace": _slow_trace,
      "slow input": _slow_input,
    }[kind](attempt, count)
    same.check(attempt.workdir, reference.record)

  return tried(22, range(seed, seed + trials), folder, one)


def _run(attempt: Attempt, count: int, environment: Mapping[str, str], *more: str, **settings):
  return Run(
    attempt.workdir,
    count=count,
    steps=STEPS,
    flags=(*FLAGS, f"--config.processes.start_timeout_seconds={TIMEOUT_SECONDS[count]}", *more),
    environment=environment,
    **settings,
  )


def _slow_disk(attempt: Attempt, count: int) -> None:
  """Arrays are written at a few kilobytes a second: a save takes several times the timeout."""
  timeout = TIMEOUT_SECONDS[count]
  size = attempt.chance.randint(400, 600)
  environment = _slow(attempt.folder, "/checkpoints/", 0.02 * timeout, size)
  with _run(attempt, count, environment) as run:
    run.wait_for("step 10/")
    began = time.monotonic()
    done = attempt.workdir / "checkpoints" / "10"
    run.wait_until(done.exists, "the slow save of step 10")
    seconds = time.monotonic() - began
    attempt.seen.append(f"a save took {seconds:.0f} s; without progress {timeout} s end it")
    assert seconds > 2 * timeout, f"the save was not slow: {seconds:.1f} s"
    assert set(run.end()) == {0}, run.text()[-1500:]


def _still_disk(attempt: Attempt, count: int) -> None:
  environment = _slow(attempt.folder, "/checkpoints/", 0.02, 2048)
  with _run(attempt, count, environment) as run:
    run.wait_for(f"step {attempt.chance.choice((9, 10))}/")
    still = pathlib.Path(environment["FAULTS_STILL"])
    still.touch()
    began = time.monotonic()
    assert set(run.end()) == {1}, run.codes
    attempt.seen.append(f"ended after {time.monotonic() - began:.1f} s without progress")
    assert "error: no progress for" in run.text()
    assert "sav" in run.text().partition("error: no progress for")[2][:60]
    still.unlink()
  with _run(attempt, count, {}) as run:
    assert set(run.end()) == {0}, run.text()[-1500:]


def _slow_trace(attempt: Attempt, count: int) -> None:
  environment = _slow(attempt.folder, "/profile/", 0.5, 4096)
  with _run(attempt, count, environment, *TRACE, "--config.processes.deadline_seconds=5") as run:
    run.wait_for("step 5/")
    began = time.monotonic()
    run.wait_for("trace in")
    attempt.seen.append(
      f"the trace took {time.monotonic() - began:.0f} s, the deadline of a step 5"
    )
    assert time.monotonic() - began > 10, "the trace was not slow"
    assert set(run.end()) == {0}, run.text()[-1500:]


def _slow_input(attempt: Attempt, count: int) -> None:
  deadline = "--config.processes.deadline_seconds=3"
  with _run(attempt, count, {}, deadline, slow=0) as run:
    run.wait_for(f"step {attempt.chance.randint(2, 15)}/")
    run.stall()
    run.wait_for("WARNING: ")
    assert "waiting for its batch': the input is slow or hangs" in run.text()
    time.sleep(attempt.chance.uniform(TIMEOUT_SECONDS[count], 2 * TIMEOUT_SECONDS[count]))
    run.stalled.unlink()
    assert set(run.end()) == {0}, run.text()[-1500:]
