"""Row 22: what is slow and makes progress is never ended; what stands still is."""

import pathlib
import subprocess
import time
from collections.abc import Mapping

from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import SITES, Run

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


def _slow(folder: pathlib.Path, where: str, pause: float, size: int) -> dict[str, str]:
  """Returns the variables by which writes to some files are delayed; compiles what does it."""
  library = folder / "slow_writes.so"
  source = SITES / "outside" / "slow_writes.c"
  subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
  return {
    "LD_PRELOAD": str(library),
    "FAULTS_SLOW_PATH": where,
    "FAULTS_SLOW_BYTES": str(size),
    "FAULTS_SLOW_MICROSECONDS": str(int(pause * 1e6)),
    "FAULTS_STILL": str(folder / "still"),
  }


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
    run.ends(0)


def _still_disk(attempt: Attempt, count: int) -> None:
  environment = _slow(attempt.folder, "/checkpoints/", 0.02, 2048)
  with _run(attempt, count, environment) as run:
    run.wait_for(f"step {attempt.chance.choice((9, 10))}/")
    still = pathlib.Path(environment["FAULTS_STILL"])
    still.touch()
    began = time.monotonic()
    run.ends(1)
    attempt.seen.append(f"ended after {time.monotonic() - began:.1f} s without progress")
    assert "error: no progress for" in run.text()
    assert "sav" in run.text().partition("error: no progress for")[2][:60]
    still.unlink()
  with _run(attempt, count, {}) as run:
    run.ends(0)


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
    run.ends(0)


def _slow_input(attempt: Attempt, count: int) -> None:
  deadline = "--config.processes.deadline_seconds=3"
  with _run(attempt, count, {}, deadline, slow=0) as run:
    run.wait_for(f"step {attempt.chance.randint(2, 15)}/")
    run.stall()
    run.wait_for("WARNING: ")
    assert "waiting for its batch': the input is slow or hangs" in run.text()
    time.sleep(attempt.chance.uniform(TIMEOUT_SECONDS[count], 2 * TIMEOUT_SECONDS[count]))
    run.stalled.unlink()
    run.ends(0)


KINDS = (
  (_slow_disk, 1, "slow disk"),
  (_slow_disk, 2, "slow disk, 2 processes"),
  (_still_disk, 1, "disk that stands still"),
  (_slow_trace, 1, "slow trace"),
  (_slow_input, 1, "slow input"),
)


@row(
  22,
  fault="a slow disk (a save takes several times the start timeout), a hanging disk, a slow "
  "trace, a slow input",
  passes="a save or trace that progresses is never ended: exit 0, Same; one that hangs is, with "
  "exit 1; a slow input of a single process is warned about",
  trials=10,
  seconds=60,
  note="Writes are slowed to a few kilobytes at a time by a preloaded library (LD_PRELOAD). Needs "
  "a C compiler.",
)
def made_slow(attempt: Attempt) -> None:
  """Slows down one thing after the other."""
  disturb, count, attempt.does = KINDS[attempt.number % len(KINDS)]
  clean = attempt.clean(count, FLAGS, steps=STEPS)
  disturb(attempt, count)
  same.check(attempt.workdir, clean.record)
