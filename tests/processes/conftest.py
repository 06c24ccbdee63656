"""Real processes: the application, or a script, as several that find one another."""

import json
import os
import subprocess
import sys

import pytest

from launch.local import free_port
from processes import heartbeat, tokens, watchdog
from tests.processes.clocks import Clock
from tests.processes.starting import ROOT, SECONDS, TOKEN, Ended, printed


@pytest.fixture
def clock(monkeypatch):
  """Returns the clock that the watchdog and the exchange look at."""
  made = Clock()
  monkeypatch.setattr(watchdog, "time", made)
  monkeypatch.setattr(heartbeat, "time", made)
  return made


@pytest.fixture(scope="session")
def forks():
  """Returns the server of tests/processes/server.py."""
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  del environment["NPROC"]  # as a person's shell: main.py sets it
  server = subprocess.Popen(
    # -P: the files beside it are no packages of the application.
    [sys.executable, "-P", str(ROOT / "tests" / "processes" / "server.py")],
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
        tokens.VARIABLE: TOKEN,
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
    return printed(start(count, *arguments, **settings))

  return run
