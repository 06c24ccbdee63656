"""A command in a real terminal: it leads a session whose foreground it is, and Ctrl-C is typed."""

import contextlib
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tests.helpers.forks import Forks

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_SECONDS = 240  # for what takes seconds, on a machine that is busy
CTRL_C = b"\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
# Makes the terminal on standard input the one that controls the session, then becomes the command.
# A new terminal's session ignores neither Ctrl-C nor its end, even where the tests run under nohup.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
  """A terminal with a command in it; a context manager that leaves nothing behind.

  Attributes:
    popen: the command, which leads the session.
  """

  def __init__(
    self,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    columns: int = 200,
    forks: Forks | None = None,
  ):
    """Starts the command.

    Args:
      command: of which the first is the interpreter, where forks start it.
      environment: more variables.
      columns: of the terminal.
      forks: start it without importing again.
    """
    self._master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, columns))
    inherited = {key: value for key, value in os.environ.items() if key != "NPROC"}
    all_variables = {**inherited, "TERM": "xterm", **(environment or {})}
    if forks:
      name = pathlib.Path(os.ttyname(slave))
      self.popen = forks.start(command[1:], out=name, environment=all_variables)
    else:
      self.popen = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *command],
        cwd=ROOT,
        env=all_variables,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
      )
    os.close(slave)
    self._output = bytearray()
    self._shown = 0, ""  # how much of it, and its text
    self._closing, self._close = os.pipe()
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def __enter__(self) -> "Terminal":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Kills what is left of the session."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.popen.pid, signal.SIGKILL)
    self.popen.wait()
    self.hang_up()

  def _read(self) -> None:
    with contextlib.suppress(OSError):  # the session has ended
      # Not in `read` while the window is closed: it would stay open until the command prints.
      while self._closing not in select.select([self._master, self._closing], [], [])[0]:
        if not (data := os.read(self._master, 65536)):
          break
        self._output += data

  def raw(self) -> bytes:
    """Returns all that was written to the terminal so far."""
    return bytes(self._output)

  def text(self) -> str:
    """Returns what was written, without what moves the cursor and colors."""
    if len(raw := self.raw()) != self._shown[0]:
      self._shown = len(raw), _CONTROL.sub("", raw.decode(errors="replace"))
    return self._shown[1]

  def press(self, keys: bytes = CTRL_C) -> float:
    """Presses keys; returns when, by the monotonic clock."""
    os.write(self._master, keys)
    return time.monotonic()

  def hang_up(self) -> None:
    """Closes the window."""
    if self._master >= 0:
      os.close(self._close)
      self._reader.join()
      for file in (self._closing, self._master):
        os.close(file)
      self._master = -1

  def wait_until(self, condition: Callable[[], object], what: str) -> None:
    """Waits until the condition holds; fails where the command ends before."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
      assert self.popen.poll() is None, f"ended before {what}:\n{self.text()}"
      assert time.monotonic() < until, f"waited in vain for {what}:\n{self.text()}"
      time.sleep(0.002)

  def wait_for(self, text: str) -> None:
    """Waits until a text was written."""
    self.wait_until(lambda: text in self.text(), repr(text))

  def end(self) -> int:
    """Waits for the end of the command and of its output; returns its exit code."""
    code = self.popen.wait(PATIENCE_SECONDS)
    self._reader.join(5)
    return code


def main(*arguments: str) -> list[str]:
  """Returns the command line of main.py."""
  return [sys.executable, "main.py", *arguments]
