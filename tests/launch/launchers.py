"""Real launchers of tiny scripts, and what became of them."""

import os
import pathlib
import subprocess
import sys
import time

import psutil

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 60  # a bound for a machine that is busy; nothing here takes it
PRELUDE = """
import os, signal, sys, time
index = int(os.environ["JAX_PROCESS_ID"])

def wait_for(path):
  while not os.path.exists(path):
    time.sleep(0.01)

def mark(path):
  open(path, "w").close()

def on_sigterm(code):
  signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
"""


def wait_until(condition, what: str):
  """Waits until the condition is true and returns what it is."""
  until = time.monotonic() + TIMEOUT_SECONDS
  while not (found := condition()):
    assert time.monotonic() < until, f"waited in vain for {what}"
    time.sleep(0.01)
  return found


def runs(process: psutil.Process) -> bool:
  """Tells whether it has not ended; one whose end nobody took note of has."""
  try:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


class Launcher:
  """A launcher in a folder of its own, where its scripts run too."""

  def __init__(self, folder: pathlib.Path, options, command, before=(), **streams):
    """Starts it; its stdout and stderr go to files, unless `streams` says otherwise.

    Args:
      folder: an empty one.
      options: the launcher's.
      command: what it starts.
      before: a command that starts the launcher.
      **streams: as of Popen.
    """
    self.folder = folder
    self._out, self._err = folder / "launcher.out", folder / "launcher.err"
    with open(self._out, "wb") as out, open(self._err, "wb") as err:
      self.popen = subprocess.Popen(
        [*before, sys.executable, "-m", "processes.launch", *options, "--", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{"stdout": out, "stderr": err} | streams,
      )

  @property
  def out(self) -> str:
    """What it has written to stdout so far."""
    return self._out.read_text(errors="surrogateescape")

  @property
  def err(self) -> str:
    """What it has written to stderr so far."""
    return self._err.read_text(errors="surrogateescape")

  def wait_for(self, *texts: str) -> None:
    """Waits until it has written all these."""

    def written() -> bool:
      assert self.popen.poll() is None, self.out + self.err
      return all(text in self.out + self.err for text in texts)

    wait_until(written, texts)

  def family(self) -> list[psutil.Process]:
    """Returns its descendants: the reaper, the processes, and theirs."""
    return psutil.Process(self.popen.pid).children(recursive=True)

  def process(self, index: int) -> psutil.Process:
    """Returns one of the processes that it started."""
    [line] = [line for line in self.err.splitlines() if "launch: started" in line][-1:]
    return psutil.Process(int(line.split("(pid ")[1].split(")")[0].split(", ")[index]))

  def end(self) -> int:
    """Waits for its end and returns its exit code."""
    return self.popen.wait(TIMEOUT_SECONDS)
