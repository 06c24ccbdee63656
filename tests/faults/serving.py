"""Commands of one process, many and quickly: each in a fork of a process that has imported all."""

import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys

from tests.faults.harness import ROOT

PATIENCE_SECONDS = 240.0  # a command takes 5 to 20 s; what takes longer hangs


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a command has ended with."""

  code: int
  out: str
  err: str


class Commands:
  """Runs command lines of main.py, one after another; a context manager."""

  def __init__(self):
    """Starts nothing yet."""
    self._server: subprocess.Popen | None = None

  def __enter__(self) -> "Commands":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Ends the server, and with it a command that hangs."""
    self._end()

  def run(self, *arguments: str) -> Answer:
    """Runs a command; one that does not end in time fails."""
    if self._server is None:
      self._server = self._started()
    self._server.stdin.write(json.dumps(arguments).encode() + b"\n")
    self._server.stdin.flush()
    ready, _, _ = select.select([self._server.stdout], [], [], PATIENCE_SECONDS)
    if not ready:
      self._end()
      raise AssertionError(f"it hangs: nothing for {PATIENCE_SECONDS:.0f} s")
    return Answer(**json.loads(self._server.stdout.readline()))

  def _started(self) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
      [sys.executable, str(pathlib.Path("tests") / "helpers" / "cli_server.py")],
      cwd=ROOT,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,
    )

  def _end(self) -> None:
    if self._server is not None:
      os.killpg(self._server.pid, signal.SIGKILL)
      self._server.wait()
      self._server.stdin.close()
      self._server.stdout.close()
    self._server = None
