"""Real processes: the application, or a script, as several that find one another."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch.local import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
SECONDS = 120  # a bound for a machine that is busy; nothing here takes it


@dataclasses.dataclass(frozen=True)
class Ended:
  """What became of a process: exit code, what it printed, seconds from the common start."""

  code: int
  seconds: float
  out: str
  err: str


@pytest.fixture(scope="session")
def forks():
  """Returns the server of tests/processes/server.py."""
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  del environment["NPROC"]  # as a person's shell: main.py sets it
  server = subprocess.Popen(
    [sys.executable, str(ROOT / "tests" / "processes" / "server.py")],
    cwd=ROOT,
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  yield server
  server.stdin.close()
  server.wait()


@pytest.fixture(scope="session")
def start(forks):
  """Returns a function that runs main.py as several processes.

  It takes their number, the arguments of all, `more` (index -> further arguments of one) and
  `environments` (index -> variables of one); `script`, a file to run instead of main.py.
  """

  def run(count, *arguments, more=(), environments=(), script=None) -> list[Ended]:
    more, environments = dict(more), dict(environments)
    address = f"localhost:{free_port()}"
    processes = []
    for index in range(count):
      three = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
      }
      processes.append(
        {
          "arguments": [*map(str, arguments), *more.get(index, ())],
          "environment": {**three, **environments.get(index, {})},
        }
      )
    asked = {"processes": processes, "seconds": SECONDS, "script": script and str(script)}
    forks.stdin.write(json.dumps(asked) + "\n")
    forks.stdin.flush()
    return [Ended(**answer) for answer in json.loads(forks.stdout.readline())]

  return run


@pytest.fixture(scope="session")
def well(start):
  """Returns `start` for runs that must end with 0; it gives what each process has printed."""

  def run(count, *arguments, **settings) -> list[str]:
    ended = start(count, *arguments, **settings)
    if any(process.code for process in ended):
      pytest.fail(
        "\n".join(
          f"process {index}: exit code {one.code} after {one.seconds:.0f} s\n{one.out[-2000:]}"
          f"{one.err[-4000:]}"
          for index, one in enumerate(ended)
        ),
        pytrace=False,
      )
    return [process.out for process in ended]

  return run
