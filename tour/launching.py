"""Starts the application as several processes on this machine, and returns what became of them."""

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

ROOT = pathlib.Path(__file__).parent.parent
# Each takes seconds; a busy machine is slower. What hangs shall not hang the tour.
LIMIT_SECONDS = 180
_STEP = re.compile(r"\] step \d+/")
_END = re.compile(
  r"process (\d+) (?:ended|failed first): (?:exit code (\d+)|signal [\w ]+ \((\d+)\))"
)
# What the launcher says of a process that it ends.
_ENDS = re.compile(r"process (\d+) (?:still runs|has not ended|is stopped)")
_PIDS = re.compile(r"\(pid ([\d, ]+)\)")


@dataclasses.dataclass(frozen=True)
class Ended:
  """What became of several processes.

  Attributes:
    code: the launcher's exit code.
    codes: process -> its exit code, where that was not 0.
    out: all that was printed, each line with its process in front.
    seconds: until all had ended.
    stopped: the process that was sent SIGTERM.
    hung: the processes that did not end by themselves, and were ended.
    made: whether the workdir was made.
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
  options = ["--processes=2", f"--grace_seconds={grace_seconds}"]
  launcher = [sys.executable, "-m", "launch.local", *options, "--"]
  began, lines, pids = time.monotonic(), [], []
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
      if found := _PIDS.search(line):
        pids = [int(pid) for pid in found[1].split(",")]
      if waiting and _STEP.search(line):
        waiting = False
        os.kill(pids[stopped], signal.SIGTERM)
  limit.cancel()
  out = "".join(lines)
  return Ended(
    code=running.returncode,
    codes={int(found[1]): int(found[2] or 128 + int(found[3])) for found in _END.finditer(out)},
    out=out,
    seconds=time.monotonic() - began,
    stopped=stopped,
    hung=tuple(sorted({int(index) for index in _ENDS.findall(out)})),
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
