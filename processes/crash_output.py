"""Keeps the stacks that follow the death of another process in a file, and prints one line.

JAX ends the peers of a dead process from C++, by SIGABRT, with a hundred lines of stacks of C++ and
Python, in which the cause is lost. So with several processes, file descriptor 2 leads to a small
process, this file, which passes lines on. What begins like a crash it holds back: if a peer has
died, the rest goes to a file, else all is printed. Python's sys.stderr keeps the terminal.
"""

import faulthandler
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

_BEGINS = re.compile(
  rb"terminate called|libc\+\+abi: terminating|Fatal Python error: |Traceback \(most recent|"
  rb"\*\*\* |[EF]\d{4} \d\d:\d\d:.*(coordination|distributed|client\.h)|error: .*Gloo "
)
_PEER = re.compile(
  rb"gloo::|Gloo .{1,80} failed|Connection (closed|reset) by peer|detected fatal errors|"
  rb"ncclRemoteError|remote process exited"
)
_HELD_SECONDS = 2.0  # after which what has begun like a crash, in a process that lives, is printed
_POLL_SECONDS = 0.5
_helpers: list[subprocess.Popen] = []


def divert(folder: str, index: int, who: str) -> None:
  """Starts the process that reads file descriptor 2; this one's sys.stderr stays as it is.

  Nothing is changed in the first process of a container, with whose end all others are killed.

  Args:
    folder: for the file, if it exists by then, such as the workdir; else it is a temporary one.
    index: of this process, in the name of the file.
    who: begins the line that is printed.
  """
  if os.getpid() == 1 or sys.stderr is None or _helpers:
    return
  try:
    terminal, (read, write) = os.dup(2), os.pipe()
  except OSError:  # it is closed, or no file is left
    return
  sys.stderr.flush()
  # A supervisor signals all processes, maybe while this one starts; what blocks them is inherited.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
  _helpers.append(
    subprocess.Popen(
      [sys.executable, "-I", "-S", __file__, folder, str(index), who, str(os.getpid())],
      stdin=read,
      stdout=subprocess.DEVNULL,
      stderr=terminal,
      start_new_session=True,  # it outlives this process, to print the line
    )
  )
  signal.pthread_sigmask(signal.SIG_SETMASK, before)
  sys.stderr = open(  # noqa: SIM115 - as long as the process runs
    terminal, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace"
  )
  threading.excepthook = _print_of_thread
  os.dup2(write, 2)
  for descriptor in (read, write):
    os.close(descriptor)
  if faulthandler.is_enabled():
    # The stacks of threads that still run may end this process by SIGSEGV in place of SIGABRT.
    faulthandler.enable(2, all_threads=False)


def is_of_a_peer(error: BaseException) -> bool:
  """Returns whether an error says that a collective failed because another process has died."""
  return bool(_helpers and _PEER.search(str(error).encode(errors="replace")))


def print_error(text: str, error: BaseException) -> None:
  """Prints what is said of an error, where crashes are looked for if a peer has caused it."""
  if not is_of_a_peer(error):
    print(text, file=sys.stderr, flush=True)
    return
  with open(os.dup(2), "w", errors="backslashreplace") as file:
    file.write(f"{text.rstrip()}\n")


def _print_of_thread(args: threading.ExceptHookArgs) -> None:
  """Prints the error of a thread, likewise."""
  if args.exc_value is not None and is_of_a_peer(args.exc_value):
    print_error("".join(traceback.format_exception(args.exc_value)), args.exc_value)
  else:
    threading.__excepthook__(args)


class _Reader:
  """What is known of the lines so far; see the module."""

  def __init__(self, folder: str, index: str, who: str):
    self._folder, self._index, self._who = folder, index, who
    self._held: list[bytes] = []
    self._since, self._file = 0.0, -1

  def take(self, line: bytes) -> None:
    """Prints a line, holds it back, or writes it to the file."""
    if self._file >= 0:
      _write(self._file, line)
      return
    if not self._held and not _BEGINS.match(line):
      _write(2, line)
      return
    self._since = self._since if self._held else time.monotonic()
    self._held.append(line)
    if _PEER.search(line):
      self._open()

  def show(self, *, late: bool = False) -> None:
    """Prints what is held back; `late`: only what has been for long."""
    if self._held and not (late and time.monotonic() - self._since < _HELD_SECONDS):
      _write(2, b"".join(self._held))
      self._held = []

  def _open(self) -> None:
    path = os.path.join(self._folder, f"crash-process-{self._index}.txt")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
      self._file = os.open(path, flags, 0o666)
    except OSError:
      try:
        self._file, path = tempfile.mkstemp(".txt", f"crash-process-{self._index}-")
      except OSError:  # the disk is full
        self.show()
        return
    _write(self._file, b"".join(self._held))
    self._held = []
    text = (
      f"{self._who}another process has died or does not answer, which ends this one; the same "
      f"command resumes (stacks: {path})\n"
    )
    _write(2, text.encode(errors="backslashreplace"))


def _write(descriptor: int, data: bytes) -> None:
  try:
    while data:
      data = data[os.write(descriptor, data) :]
  except OSError:  # whoever read it has gone
    pass


def main(folder: str, index: str, who: str, parent: str) -> None:
  """Reads until the process that started this one has ended."""
  reader, rest = _Reader(folder, index, who), b""
  while True:
    ready = select.select([0], [], [], _POLL_SECONDS)[0]
    if not ready and os.getppid() != int(parent):
      break  # its children still have the pipe
    if ready:
      if not (chunk := os.read(0, 1 << 16)):
        break
      *lines, rest = (rest + chunk).split(b"\n")
      for line in lines:
        reader.take(line + b"\n")
    reader.show(late=True)
  if rest:
    reader.take(rest)
  reader.show()


if __name__ == "__main__":
  main(*sys.argv[1:])
