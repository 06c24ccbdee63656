"""SIGTERM, SIGHUP and Ctrl-C ask a process to stop: it saves the step at hand, and exits with 75.

Imports nothing that takes time: main.py calls `begin` before everything else.
"""

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from runtime import exit_codes

# A Ctrl-C that comes sooner than this after the first was announced is the same one: a terminal
# sends it to all processes, and wrappers (timeout, srun, make) pass theirs on as well.
AGAIN_SECONDS = 1.0
_CLEANUP_SECONDS = 5.0

# Those that are in use, the newest last.
_entered: list["StopRequest"] = []
# What is to be undone before this process is ended by `os._exit`; the newest last.
_cleanups: list[Callable[[], None]] = []


class Stopped(BaseException):
  """Raised in the main thread where work is given up because a stop was requested.

  No `Exception`: libraries turn those into errors of their own.
  """


class StopRequest:
  """Set by SIGTERM, SIGHUP or Ctrl-C, here or in another process; a context manager.

  Python runs signal handlers in the main thread alone, which may be inside of a compilation for
  minutes. So the handler does nothing; each signal is written to a pipe at once, and one thread,
  the one that waits for `wakeup`, records it by `hear`. There must be no second record: where the
  handler kept one too, a single Ctrl-C counted as two.

  Attributes:
    requested: what has asked for it, "" where nothing has.
    insisted: whether Ctrl-C came again, clearly after the first request was announced: from someone
      who does not want to wait for a save.
    polls: whether the main thread looks for a stop by itself just now: it is left a moment to clean
      up before the process is ended.
    wakeup: a file descriptor that becomes readable when a signal arrives.
  """

  def __init__(self):
    """Requests nothing yet."""
    self.requested, self.insisted, self.polls = "", False, False
    self._announced: float | None = None
    self._heard = time.monotonic()  # when the pipe was empty
    self._terminals: list[int] = []
    # What `__enter__` replaces: signal -> handler, and the descriptor that is woken up.
    self._old: dict[int, Any] = {}
    self._old_wakeup = -1
    self.wakeup, self._write = os.pipe()
    for end in (self.wakeup, self._write):
      os.set_blocking(end, False)

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
      numbers.append(signal.SIGHUP)
    self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    # The pipe first: a signal between the two would be lost.
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._old = {number: signal.signal(number, _nothing) for number in numbers}
    _entered.append(self)
    return self

  def __exit__(self, *exception) -> None:
    """Puts the old handlers back."""
    _entered.remove(self)
    for number, handler in self._old.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._old_wakeup)
    os.close(self._write)
    os.close(self.wakeup)

  def __bool__(self) -> bool:
    """Returns whether a stop was requested."""
    return bool(self.requested)

  def request(self, reason: str) -> None:
    """Asks for a stop, from any thread."""
    self.requested = self.requested or reason

  @contextlib.contextmanager
  def polled(self) -> Iterator[None]:
    """Within it, the main thread looks for a stop, cleans up and raises `Stopped`."""
    self.polls = True
    try:
      yield
    finally:
      self.polls = False

  def announced(self) -> None:
    """Records that the request was announced: from now on, Ctrl-C counts again."""
    self._announced = time.monotonic()

  def hear(self) -> None:
    """Records the signals that have arrived; for the one thread that waits for them."""
    numbers = b""
    with contextlib.suppress(BlockingIOError):
      numbers = os.read(self.wakeup, 64)
    for number in numbers:
      if number == signal.SIGHUP:
        self._leave_terminals()
      if number == signal.SIGINT and self._again():
        self.insisted = True
      elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        self.request(signal.Signals(number).name)
    self._heard = time.monotonic()

  def _leave_terminals(self) -> None:
    """Writes to nowhere what would go to a terminal that is gone, where it would be an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in self._terminals:
      os.dup2(nowhere, number)
    os.close(nowhere)

  def _again(self) -> bool:
    """Returns whether what arrived since the pipe was empty came clearly after the announcement."""
    return self._announced is not None and self._heard - self._announced >= AGAIN_SECONDS


def current() -> StopRequest | None:
  """Returns the request that signals set now, None before there is one."""
  return _entered[-1] if _entered else None


def output_closed() -> None:
  """Requests a stop because standard output was closed; what is printed from now on is lost."""
  with contextlib.suppress(OSError, ValueError):
    closed = os.fstat(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
      if os.path.samestat(os.fstat(number), closed):
        os.dup2(nowhere, number)
    os.close(nowhere)
  if _entered:
    _entered[-1].request("its output was closed")


def _nothing(number: int, frame: object) -> None:
  """Handles a signal: it is in the pipe already."""


# ------------------------------ while nothing is watched ------------------------------


class _Unwatched:
  """Ends this process when it is asked to stop, while there is nothing to save.

  Attributes:
    code: that it ends with.
  """

  def __init__(self):
    self.code: int | None = None
    self._stop = StopRequest().__enter__()
    # A daemon: it waits for as long as the process lives.
    threading.Thread(target=self._run, name="signals", daemon=True).start()

  def _run(self) -> None:
    while not self._stop:
      select.select([self._stop.wakeup], [], [])
      self._stop.hear()
    if self.code is None:
      tell(f"stopped as requested ({self._stop.requested}); there was nothing to save")
    clean_up()
    os._exit(exit_codes.STOPPED if self.code is None else self.code)


_unwatched: _Unwatched | None = None


def begin() -> None:
  """Makes SIGTERM and Ctrl-C end this process with 75 and one line, until a watchdog takes over."""
  global _unwatched
  _unwatched = _Unwatched()
  atexit.register(_ignore)  # the first to be registered is called last


def _ignore() -> None:
  """Ignores signals from here on: Python puts their default back, by which they would kill it."""
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)


def ending(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
  """Returns `main`, after which a stop changes nothing: the process ends with the code it has."""

  def run(arguments: list[str]) -> int:
    code = 1
    try:
      code = main(arguments)
    except SystemExit as end:
      code = end.code if isinstance(end.code, int) else int(end.code is not None)
      raise
    finally:
      if _unwatched is not None:
        _unwatched.code = code
    return code

  return run


# ------------------------------ the end ------------------------------


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
  """Within it, `undo` is called before this process is ended by a signal or the watchdog.

  It is called in another thread than the one that is in here.
  """
  _cleanups.append(undo)
  try:
    yield
  finally:
    _cleanups.remove(undo)


def clean_up() -> None:
  """Undoes what is under way, within a few seconds; before `os._exit`."""

  def run() -> None:
    for undo in reversed(_cleanups):
      with contextlib.suppress(Exception):
        undo()

  _in_time(run, _CLEANUP_SECONDS)
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()


def tell(text: str) -> None:
  """Prints a line from any thread; does nothing where the output was closed."""

  def run() -> None:
    stream = sys.stdout
    with contextlib.suppress(OSError, ValueError):
      try:
        stream.fileno()
      except (OSError, ValueError):  # it points to memory for now
        stream = sys.__stdout__
      print(text, file=stream, flush=True)

  _in_time(run, 1.0)


def _in_time(do: Callable[[], None], seconds: float) -> None:
  """Does something in a thread of its own, which is given so long: a terminal may be paused."""
  thread = threading.Thread(target=do, daemon=True)
  with contextlib.suppress(RuntimeError):  # the interpreter is ending
    thread.start()
    thread.join(seconds)
