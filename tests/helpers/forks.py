"""Processes of the application that start at once: forks, of a server that has imported it."""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]


class Forks:
  """Starts them; a context manager that leaves none behind."""

  def __init__(self):
    """Starts nothing yet."""
    self._server: subprocess.Popen | None = None
    self._text = b""
    self._pids: list[int] = []
    self._codes: dict[int, int] = {}

  def __enter__(self) -> "Forks":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Ends the server, and with it the forks."""
    if self._server is not None:
      self._server.stdin.close()
      self._server.wait()
      self._server.stdout.close()

  def start(
    self,
    command: Sequence[str],
    *,
    out: pathlib.Path,
    err: pathlib.Path | None = None,
    environment: Mapping[str, str] = os.environ,
    folder: pathlib.Path = ROOT,
  ) -> "Fork":
    """Starts `python *command`.

    Args:
      command: a file or `-m` and a module, and its arguments.
      out: what is printed is appended to this file.
      err: likewise to stderr; None: to the same.
      environment: all variables.
      folder: the working directory.
    """
    if self._server is None:
      self._server = self._started()
    asked = {
      "command": [*map(str, command)],
      "environment": dict(environment),
      "folder": str(folder),
      "out": str(out),
      "err": err and str(err),
    }
    self._server.stdin.write(json.dumps(asked).encode() + b"\n")
    self._server.stdin.flush()
    while not self._pids:
      self._hear(None)
    return Fork(self._pids.pop(), self)

  def code(self, pid: int, seconds: float) -> int | None:
    """Returns the code of a fork, None where it has not ended after so many seconds."""
    until = time.monotonic() + seconds
    self._hear(0)
    while pid not in self._codes and (left := until - time.monotonic()) > 0:
      self._hear(left)
    return self._codes.get(pid)

  def _hear(self, seconds: float | None) -> None:
    ready, _, _ = select.select([self._server.stdout], [], [], seconds)
    if not ready:
      return
    part = os.read(self._server.stdout.fileno(), 65536)
    assert part, "the server of the forks has ended"
    *lines, self._text = (self._text + part).split(b"\n")
    for said in map(json.loads, lines):
      if "pid" in said:
        self._codes.pop(said["pid"], None)  # of one that had the same before
        self._pids.append(said["pid"])
      else:
        self._codes[said["ended"]] = said["code"]

  def _started(self) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NPROC", None)  # as a person's shell: main.py sets it
    return subprocess.Popen(
      # -P: the files beside it are no packages of the application.
      [sys.executable, "-P", str(ROOT / "tests" / "helpers" / "fork_server.py")],
      cwd=ROOT,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      bufsize=0,
    )


class Fork:
  """One of them, with what `subprocess.Popen` has.

  Attributes:
    pid: its process id.
    returncode: None until `poll` or `wait` has seen its end.
  """

  def __init__(self, pid: int, forks: Forks):
    """Takes note of it."""
    self.pid, self.returncode, self._forks = pid, None, forks

  def poll(self) -> int | None:
    """Returns its code, None while it runs."""
    if self.returncode is None:
      self.returncode = self._forks.code(self.pid, 0)
    return self.returncode

  def wait(self, timeout: float = 3600) -> int:
    """Waits for its end and returns its code; raises TimeoutExpired."""
    if self.returncode is None:
      self.returncode = self._forks.code(self.pid, timeout)
    if self.returncode is None:
      raise subprocess.TimeoutExpired("a fork", timeout)
    return self.returncode

  def send_signal(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Sends SIGKILL."""
    self.send_signal(signal.SIGKILL)

  def terminate(self) -> None:
    """Sends SIGTERM."""
    self.send_signal(signal.SIGTERM)
