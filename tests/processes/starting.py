"""Starts main.py, or a script, as several processes that find one another, and waits for them."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from processes import tokens
from processes.listening import free_port
from tests.helpers.forks import Fork

ROOT = pathlib.Path(__file__).parent.parent.parent
SECONDS = 240  # a bound for a machine that is busy; nothing here takes it
TOKEN = "the same for all that a test starts"  # as of a launcher
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@dataclasses.dataclass(frozen=True)
class Ended:
  """What became of a process: exit code, what it printed, seconds from the common start."""

  code: int
  seconds: float
  out: str
  err: str


def start(
  count: int,
  *arguments: str,
  more: Mapping[int, Sequence[str]] | None = None,
  environments: Mapping[int, Mapping[str, str]] | None = None,
  script: pathlib.Path | None = None,
  trees: Mapping[int, pathlib.Path] | None = None,
) -> list[Ended]:
  """Runs them as fresh processes.

  Args:
    count: how many.
    arguments: of all.
    more: index -> further arguments of one.
    environments: index -> variables of one.
    script: a file to run instead of main.py.
    trees: index -> the root of another tree of the project that one runs from.
  """
  address, began = f"localhost:{free_port()}", time.monotonic()
  inherited = {key: value for key, value in os.environ.items() if key != "NPROC"}
  with contextlib.ExitStack() as stack:
    popens, outputs = [], []
    for index in range(count):
      tree = (trees or {}).get(index, ROOT)
      own = dict(zip(VARIABLES, (address, str(count), str(index)), strict=True))
      own[tokens.VARIABLE] = TOKEN
      if script:  # which may lie anywhere in the tree
        own["PYTHONPATH"] = str(tree)
      # Files and not pipes: a process that waits for a reader would be late.
      out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
      outputs.append((out, err))
      popen = subprocess.Popen(
        # -P: the files beside a script are no packages of the application.
        [
          sys.executable,
          *(["-P", str(script)] if script else ["main.py"]),
          *arguments,
          *(more or {}).get(index, ()),
        ],
        cwd=tree,
        env={**inherited, **own, **(environments or {}).get(index, {})},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
      )
      stack.callback(popen.kill)  # nothing to one that has ended
      popens.append(popen)
    seconds = wait(popens, began)
    said = [[_whole(file) for file in files] for files in outputs]
  return [Ended(popens[index].returncode, seconds[index], *said[index]) for index in range(count)]


def wait(popens: Sequence[subprocess.Popen | Fork], began: float) -> list[float]:
  """Returns the seconds after which each has ended; kills those that take too long."""
  seconds = [0.0] * len(popens)
  while not all(seconds):
    for index, popen in enumerate(popens):
      if time.monotonic() - began > SECONDS:
        popen.kill()
      if not seconds[index] and popen.poll() is not None:
        seconds[index] = time.monotonic() - began
    time.sleep(0.02)
  return seconds


def well(count: int, *arguments: str, **settings) -> list[str]:
  """Runs them as `start` does; they must end with 0. Returns what each has printed."""
  return printed(start(count, *arguments, **settings))


def printed(ended: Sequence[Ended]) -> list[str]:
  """Returns what each process has printed; fails unless all have ended with 0."""
  if any(process.code for process in ended):
    raise AssertionError(
      "\n".join(
        f"process {index}: exit code {one.code} after {one.seconds:.0f} s\n{one.out[-2000:]}"
        f"{one.err[-4000:]}"
        for index, one in enumerate(ended)
      )
    )
  return [process.out for process in ended]


def _whole(file) -> str:
  file.seek(0)
  return file.read()
