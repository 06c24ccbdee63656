"""Runs the application as several processes on this machine, and returns the outcome."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from processes import preemption

ROOT = pathlib.Path(__file__).parents[2]
# Each takes seconds, or longer on a busy machine. A hang must not hang the tour.
LIMIT_SECONDS = 180
_STEP = re.compile(r"\] step \d+/")


@dataclasses.dataclass(frozen=True)
class Ended:
  """The outcome of several processes.

  Attributes:
    code: the launcher's exit code.
    codes: process -> its exit code, if it was not 0 and the process ended by itself.
    out: the output, each line prefixed with its process.
    seconds: until all had ended.
    stopped: the process that was sent SIGTERM.
    hung: the processes that did not end by themselves, and were ended.
    made: whether the workdir was created.
    saved: the steps of the checkpoints.
    logged: the steps in metrics.jsonl.
  """

  code: int
  codes: dict[int, int]
  out: str
  seconds: float
  stopped: int | None
  hung: tuple[int, ...]
  made: bool
  saved: tuple[int, ...]
  logged: tuple[int, ...]


def train(*arguments: str, second: str = "", stopped: int | None = None) -> Ended:
  """Runs main.py as two processes in a workdir that is removed in the end.

  Args:
    *arguments: of both.
    second: a further argument of process 1.
    stopped: a process that is sent SIGTERM when the first step has been made.
  """
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    command = [sys.executable, "main.py", *arguments, f"--workdir={workdir}"]
    if second:
      command = ["sh", "-c", with_second(second), "sh", *command]
    return start(command, workdir=workdir, stopped=stopped)


def with_second(argument: str) -> str:
  """Returns a shell script that adds an argument to its command, for process 1 alone."""
  return f'test "$JAX_PROCESS_ID" = 1 && exec "$@" {argument}; exec "$@"'


def start(
  command: Sequence[str],
  *,
  workdir: pathlib.Path | None = None,
  stopped: int | None = None,
  limit_seconds: float = LIMIT_SECONDS,
  grace_seconds: float = 30,
) -> Ended:
  """Runs a command as two processes; those that have not ended after the limit are ended.

  Args:
    command: of both.
    workdir: where it would leave its files.
    stopped: as of `train`.
    limit_seconds: they are asked to end then.
    grace_seconds: how long after that they are killed.
  """
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report"
    options = ["--processes=2", f"--grace_seconds={grace_seconds}", f"--report={report}"]
    return _run(options, command, report, workdir, stopped, limit_seconds)


def _run(
  options: Sequence[str],
  command: Sequence[str],
  report: pathlib.Path,
  workdir: pathlib.Path | None,
  stopped: int | None,
  limit_seconds: float,
) -> Ended:
  launcher = [sys.executable, "-m", "processes.launch", *options, "--"]
  began, lines = time.monotonic(), []
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  running = subprocess.Popen(
    [*launcher, *command],
    cwd=ROOT,
    env={**environment, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  limit = threading.Timer(limit_seconds, running.terminate)
  limit.start()
  # A stop of the tour ends these, too: the Ctrl-C of a terminal reaches them, SIGTERM does not.
  with preemption.undone(running.terminate), running:
    waiting = stopped is not None
    for line in running.stdout:
      lines.append(line)
      if waiting and _STEP.search(line):
        waiting = False
        os.kill(json.loads(report.read_text())["pids"][stopped], signal.SIGTERM)
  limit.cancel()
  ended = {"codes": [], "killed": []}
  if report.exists():
    ended |= json.loads(report.read_text().splitlines()[-1])
  return Ended(
    code=running.returncode,
    codes={i: c for i, c in enumerate(ended["codes"]) if c and i not in ended["killed"]},
    out="".join(lines),
    seconds=time.monotonic() - began,
    stopped=stopped,
    hung=tuple(ended["killed"]),
    made=workdir is not None and workdir.exists(),
    saved=_saved(workdir),
    logged=_logged(workdir),
  )


def _saved(workdir: pathlib.Path | None) -> tuple[int, ...]:
  if workdir is None or not (workdir / "checkpoints").exists():
    return ()
  names = (path.name for path in (workdir / "checkpoints").iterdir())
  return tuple(sorted(int(name) for name in names if name.isdigit()))


def _logged(workdir: pathlib.Path | None) -> tuple[int, ...]:
  with contextlib.suppress(OSError, TypeError):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return tuple(line["step"] for line in lines if "goodput" not in line)
  return ()
