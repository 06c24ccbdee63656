"""Preemption: on SIGTERM, SIGHUP or Ctrl-C a process saves the current step, and exits with 75.

It imports nothing slow: main.py calls `begin` before everything else.
"""

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from runtime import exit_codes

# A Ctrl-C that arrives sooner than this after the first was announced counts as the same one: a
# terminal sends it to all processes, and wrappers (timeout, srun, make) forward theirs as well.
AGAIN_SECONDS = 1.0
_CLEANUP_SECONDS = 5.0
_POLLED_SECONDS = 3.0  # for the main thread to clean up, if it polls for a stop

# Set by a launcher that starts a process which dies alone again, and tells the others by a signal:
# the number of a pipe in which the run asks for a spare.
REPLACEABLE, PEER_LOST = "MESHWRIGHT_REPLACEABLE", signal.SIGUSR1
SPARE = "MESHWRIGHT_SPARE"  # set for a process that waits on its standard input for its index
WANTED, READY = b"w", b"r"  # what is written to that pipe
# Set by one that starts an elastic run again with fewer processes: how many all are, and a file
# descriptor to which the run writes with how many it can go on.
OF_PROCESSES, FITTING = "MESHWRIGHT_PROCESSES", "MESHWRIGHT_FITTING_TO"

# The requests in use, the newest last.
_entered: list["StopRequest"] = []
# Cleanups before this process is ended by `os._exit`; the newest last.
_cleanups: list[Callable[[], None]] = []


class Stopped(BaseException):
  """Raised in the main thread to abandon work because a stop was requested.

  Not an `Exception`: libraries turn those into their own errors.
  """


class StopRequest:
  """Set by SIGTERM, SIGHUP or Ctrl-C, here or in another process; a context manager.

  Python runs signal handlers only in the main thread, which may be in a compilation for minutes. So
  the handler does nothing; each signal is written to a pipe at once, and one thread, which waits
  for `wakeup`, records it by calling `hear`. The handler must not record it too: then a single
  Ctrl-C counted twice.

  Attributes:
    requested: what has requested it; "" if nothing has.
    insisted: whether Ctrl-C was pressed again, clearly after the first request was announced: by
      someone who does not want to wait for a save.
    peer_lost: whether a process of the run has died, and is replaced.
    polls: whether the main thread currently polls for a stop: then it gets a moment to clean up
      before the process is ended.
    wakeup: a file descriptor that becomes readable when a signal arrives.
  """

  def __init__(self):
    """Requests nothing yet."""
    self.requested, self.insisted, self.polls = "", False, False
    self.peer_lost = False
    self._announced: float | None = None
    self._heard = time.monotonic()  # when the pipe was empty
    self._take: Callable[[], bool] | None = None
    self._terminals: list[int] = []
    # What `__enter__` replaces: signal -> handler, and the wakeup descriptor.
    self._old: dict[int, Any] = {}
    self._old_wakeup = -1
    self.wakeup, self._write = os.pipe()
    for end in (self.wakeup, self._write):
      os.set_blocking(end, False)

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if os.environ.get(REPLACEABLE):
      numbers.append(PEER_LOST)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
      numbers.append(signal.SIGHUP)
    self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    self._tolerate_hangups()
    # The pipe first: a signal between the two would be lost.
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._old = {number: signal.signal(number, _nothing) for number in numbers}
    _entered.append(self)
    return self

  def __exit__(self, *exception) -> None:
    """Restores the old handlers."""
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
    """Requests a stop, from any thread."""
    self.requested = self.requested or reason

  @contextlib.contextmanager
  def polled(self) -> Iterator[None]:
    """Inside it, the main thread polls for a stop, cleans up and raises `Stopped`."""
    self.polls = True
    try:
      yield
    finally:
      self.polls = False

  @contextlib.contextmanager
  def interrupts(self, take: Callable[[], bool]) -> Iterator[None]:
    """Inside it, a Ctrl-C is first offered to `take`, in the thread that records signals.

    Args:
      take: returns whether it has dealt with it; else a stop is requested, as elsewhere.
    """
    self._take = take
    try:
      yield
    finally:
      self._take = None

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
      if number == signal.SIGINT and (take := self._take) is not None and take():
        continue
      if number == PEER_LOST:
        self.peer_lost = True
      elif number == signal.SIGINT and self._again():
        self.insisted = True
      elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        self.request(signal.Signals(number).name)
    self._heard = time.monotonic()

  def _tolerate_hangups(self) -> None:
    """Makes output to a terminal no error once its window is closed, which SIGHUP says later."""
    for name in ("stdout", "stderr"):
      old = getattr(sys, name)
      if isinstance(old, io.TextIOWrapper) and not isinstance(_raw(old), _Terminal):
        with contextlib.suppress(OSError, ValueError):  # no file, or closed
          if old.fileno() in self._terminals:
            old.flush()
            setattr(sys, name, _tolerant(old))

  def _leave_terminals(self) -> None:
    """Redirects output from a closed terminal, where it would be an error, to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in self._terminals:
      os.dup2(nowhere, number)
    os.close(nowhere)

  def _again(self) -> bool:
    """Returns whether the signals in the pipe arrived clearly after the announcement."""
    return self._announced is not None and self._heard - self._announced >= AGAIN_SECONDS


class _Terminal(io.FileIO):
  """A terminal to write to; what is written after its window was closed is lost."""

  def write(self, data: bytes | memoryview) -> int | None:
    """Writes bytes, as `FileIO.write` does."""
    try:
      return super().write(data)
    except OSError as error:
      if error.errno != errno.EIO:
        raise
      return memoryview(data).nbytes


def _raw(file: io.TextIOWrapper) -> io.RawIOBase:
  return getattr(file.buffer, "raw", file.buffer)  # -u and PYTHONUNBUFFERED: without a buffer


def _tolerant(file: io.TextIOWrapper) -> io.TextIOWrapper:
  """Returns a file that writes to the same terminal, as `_Terminal` does."""
  raw = _Terminal(file.fileno(), "w", closefd=False)
  return io.TextIOWrapper(
    raw if _raw(file) is file.buffer else io.BufferedWriter(raw),
    encoding=file.encoding,
    errors=file.errors,
    line_buffering=file.line_buffering,
    write_through=file.write_through,
  )


def current() -> StopRequest | None:
  """Returns the request that signals currently set; None before there is one."""
  return _entered[-1] if _entered else None


def output_closed() -> None:
  """Requests a stop because standard output was closed; further output is lost."""
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


# ------------------------------ the place of a process that has died ------------------------------

joined = 0.0  # since when this process takes part in the run, where that is not since its start


def ask_for_spare(what: bytes = WANTED) -> None:
  """Asks the launcher for a spare, or says that this process is one, which is READY."""
  with contextlib.suppress(OSError, ValueError):  # another launcher set it
    os.write(int(os.environ[REPLACEABLE]), what)


def wait_for_place(warm_up: Callable[[], None]) -> None:
  """Waits, in a spare, to take the place of a process that has died; else returns at once.

  Args:
    warm_up: does what can be done before, in a thread of low priority: the run needs the processor.
  """
  global joined
  if not os.environ.pop(SPARE, ""):
    return

  def at_low_priority() -> None:
    with contextlib.suppress(OSError):
      os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of the thread, on Linux
    warm_up()
    ask_for_spare(READY)

  warming = threading.Thread(target=at_low_priority)
  warming.start()
  index = os.read(0, 16)
  if not index:  # the launcher has ended
    os._exit(exit_codes.DONE)
  warming.join()
  joined = time.monotonic()
  os.environ["JAX_PROCESS_ID"] = index.decode().strip()
  nowhere = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nowhere, 0)
  os.close(nowhere)


# ------------------------------ before the watchdog ------------------------------


class _Unwatched:
  """Ends this process when it is asked to stop, while there is nothing to save.

  Attributes:
    code: its exit code.
  """

  def __init__(self):
    self.code: int | None = None
    self._stop = StopRequest().__enter__()
    # A daemon thread: it waits as long as the process runs.
    threading.Thread(target=self._run, name="signals", daemon=True).start()

  def _run(self) -> None:
    while not self._stop:
      select.select([self._stop.wakeup], [], [])
      self._stop.hear()
    if self.code is None:
      tell(f"stopped as requested ({self._stop.requested}); there was nothing to save")
    deadline = time.monotonic() + _POLLED_SECONDS
    while self._stop.polls and time.monotonic() < deadline:  # what is half prepared is removed
      time.sleep(0.01)
    clean_up()
    os._exit(exit_codes.STOPPED if self.code is None else self.code)


_unwatched: _Unwatched | None = None


def begin() -> None:
  """Makes SIGTERM and Ctrl-C end this process with 75 and one line, until the watchdog starts."""
  global _unwatched
  _unwatched = _Unwatched()
  atexit.register(_ignore)  # registered first, so called last


def _ignore() -> None:
  """Ignores signals from here on: Python restores their default, which would kill the process."""
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)


def ending(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
  """Wraps `main`: a stop after its end does not change the exit code."""

  def run(arguments: list[str]) -> int:
    code = 1
    try:
      code = main(arguments)
    except Stopped:  # the thread of `_Unwatched` has said so, and ends the process
      code = exit_codes.STOPPED
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
  """Inside it, `undo` is called before a signal or the watchdog ends this process.

  It is called in a different thread.
  """
  _cleanups.append(undo)
  try:
    yield
  finally:
    _cleanups.remove(undo)


def clean_up() -> None:
  """Runs the registered cleanups, within a few seconds; called before `os._exit`."""

  def run() -> None:
    for undo in reversed(_cleanups):
      with contextlib.suppress(Exception):
        undo()

  _in_time(run, _CLEANUP_SECONDS)
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()


def tell(text: str) -> None:
  """Prints a line from any thread; does nothing if the output was closed."""

  def run() -> None:
    stream = sys.stdout
    with contextlib.suppress(OSError, ValueError):
      try:
        stream.fileno()
      except (OSError, ValueError):  # it is redirected to memory
        stream = sys.__stdout__
      print(text, file=stream, flush=True)

  _in_time(run, 1.0)


def _in_time(do: Callable[[], None], seconds: float) -> None:
  """Runs something in a separate thread with a timeout: a terminal may be paused."""
  thread = threading.Thread(target=do, daemon=True)
  with contextlib.suppress(RuntimeError):  # the interpreter is ending
    thread.start()
    thread.join(seconds)
