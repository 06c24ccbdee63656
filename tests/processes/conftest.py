"""Real processes: the application, or a script, as several that find one another."""

import os
import time

import pytest

from processes import heartbeat, tokens, watchdog
from processes.listening import free_port
from tests.processes.clocks import Clock
from tests.processes.starting import TOKEN, VARIABLES, Ended, printed, wait


@pytest.fixture
def clock(monkeypatch):
  """Returns the clock that the watchdog and the exchange look at."""
  made = Clock()
  monkeypatch.setattr(watchdog, "time", made)
  monkeypatch.setattr(heartbeat, "time", made)
  return made


@pytest.fixture(scope="session")
def start(forks, tmp_path_factory):
  """Returns a function that runs main.py as several processes.

  It takes their number, the arguments of all, `more` (index -> further arguments of one) and
  `environments` (index -> variables of one); `script`, a file to run instead of main.py.
  """
  inherited = {key: value for key, value in os.environ.items() if key != "NPROC"}

  def run(count, *arguments, more=(), environments=(), script=None) -> list[Ended]:
    more, environments = dict(more), dict(environments)
    address, folder = f"localhost:{free_port()}", tmp_path_factory.mktemp("processes")
    began, started = time.monotonic(), []
    for index in range(count):
      own = dict(zip(VARIABLES, (address, str(count), str(index)), strict=True))
      started.append(
        forks.start(
          [script or "main.py", *arguments, *more.get(index, ())],
          environment={**inherited, **own, tokens.VARIABLE: TOKEN, **environments.get(index, {})},
          out=folder / f"{index}.out",
          err=folder / f"{index}.err",
        )
      )
    seconds = wait(started, began)
    return [
      Ended(
        code=process.returncode,
        seconds=seconds[index],
        out=(folder / f"{index}.out").read_text(),
        err=(folder / f"{index}.err").read_text(),
      )
      for index, process in enumerate(started)
    ]

  return run


@pytest.fixture(scope="session")
def well(start):
  """Returns `start` for runs that must end with 0; it gives what each process has printed."""

  def run(count, *arguments, **settings) -> list[str]:
    return printed(start(count, *arguments, **settings))

  return run
