"""Runs the application as several processes on this machine, and returns the outcome."""

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
from typing import Any

from processes import preemption
from reports import run_files

ROOT = pathlib.Path(__file__).parents[2]
# Each takes seconds, or longer on a busy machine. A hang must not hang the tour.
LIMIT_SECONDS = 180
_STEP = re.compile(r"\] step \d+/")


@dataclasses.dataclass(frozen=True)
class Ended:
  """The outcome of two processes.

  Attributes:
    code: the launcher's exit code.
    codes: process -> its exit code, if it was not 0 and the process ended by itself.
    out: the output, each line prefixed with its process.
    seconds: until both had ended.
    hung: the processes that did not end by themselves, and were ended.
  """

  code: int
  codes: dict[int, int]
  out: str
  seconds: float
  hung: tuple[int, ...]


def train(*arguments: str, **how: Any) -> tuple[Ended, run_files.Run | None]:
  """Runs main.py as two processes in a workdir that is removed in the end.

  Args:
    *arguments: of both.
    **how: of `start`.

  Returns:
    The outcome, and what the files of the workdir say; None if it was not created.
  """
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    ended = start([sys.executable, "main.py", *arguments, f"--workdir={workdir}"], **how)
    return ended, run_files.read(workdir) if workdir.exists() else None


def start(
  command: Sequence[str],
  *,
  second: str = "",
  stopped: int | None = None,
  limit_seconds: float = LIMIT_SECONDS,
  grace_seconds: float = 30,
) -> Ended:
  """Runs a command as two processes; those that have not ended after the limit are ended.

  Args:
    command: of both.
    second: a further argument of process 1.
    stopped: a process that is sent SIGTERM when the first step has been made.
    limit_seconds: they are asked to end then.
    grace_seconds: how long after that they are killed.
  """
  if second:
    script = f'test "$JAX_PROCESS_ID" = 1 && exec "$@" {second}; exec "$@"'
    command = ["sh", "-c", script, "sh", *command]
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report"
    options = ["--processes=2", f"--grace_seconds={grace_seconds}", f"--report={report}"]
    began, lines = time.monotonic(), []
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    running = subprocess.Popen(
      [sys.executable, "-m", "processes.launch", *options, "--", *command],
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
      for line in running.stdout:
        lines.append(line)
        if stopped is not None and _STEP.search(line):
          os.kill(json.loads(report.read_text())["pids"][stopped], signal.SIGTERM)
          stopped = None
    limit.cancel()
    ended = {"codes": [], "killed": []}
    if report.exists():
      ended |= json.loads(report.read_text().splitlines()[-1])
  killed = tuple(ended["killed"])
  codes = {i: code for i, code in enumerate(ended["codes"]) if code and i not in killed}
  return Ended(running.returncode, codes, "".join(lines), time.monotonic() - began, killed)
