"""Merges the output of several processes line by line, with the process as a prefix."""

import collections
import dataclasses
import os
import select
import selectors
import signal
import subprocess
import time

LAST_LINES = 15
# Gloo prints such lines for each device and group to stdout from several threads, so that lines may
# contain pieces of several, and line breaks may be alone.
NOISE = (b"[Gloo] Rank", b"peer ranks. Expected number of connected")

STDOUT, STDERR = 1, 2
POLL_SECONDS = 0.05
# A process's output is complete when it ends, unless a daemon that it left behind has the pipe
# open.
DRAIN_SECONDS = 1
# How long a reader may be stuck, once the run was asked to stop, before it is given up.
STUCK_SECONDS = 1


@dataclasses.dataclass
class Output:
  """The output of one process.

  Attributes:
    index: of the process.
    streams: how many of its two are open.
    last_lines: of both, as they came.
  """

  index: int
  streams: int = 2
  last_lines: collections.deque[bytes] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=LAST_LINES)
  )


@dataclasses.dataclass
class _Stream:
  """A pipe: whose, to which of the launcher's own it goes, and a line that has not ended."""

  output: Output
  to: int
  rest: bytes = b""
  noisy: bool = False  # the line before was noise

  def silence(self, lines: list[bytes]) -> list[bytes]:
    """Returns the lines without gloo's, and without the empty ones among them."""
    kept = []
    for line in lines:
      noise = any(text in line for text in NOISE) or (self.noisy and not line.strip())
      if not noise:
        kept.append(line)
      self.noisy = noise
    return kept


class Logs:
  """Merges the outputs. One thread reads and writes complete lines of bytes, as they arrive."""

  def __init__(self, asked: list[int]):
    """Has no outputs yet.

    Args:
      asked: the signals by which the launcher was asked to stop. SIGPIPE is added here when
        the reader has gone.
    """
    self._asked = asked
    self._closed = set()
    self._selector = selectors.DefaultSelector()

  def add(self, index: int, popen: subprocess.Popen) -> Output:
    """Takes over a process's pipes."""
    output = Output(index)
    for pipe, to in ((popen.stdout, STDOUT), (popen.stderr, STDERR)):
      self._selector.register(pipe, selectors.EVENT_READ, _Stream(output, to))
    return output

  def pump(self, seconds: float) -> None:
    """Waits that long for output, and merges what has arrived."""
    for key, _ in self._selector.select(seconds):
      chunk = os.read(key.fd, 1 << 16)
      stream = key.data
      *lines, stream.rest = (stream.rest + chunk).split(b"\n")
      self._join(stream, lines)
      if not chunk:
        self._end(key)

  def drain(self, outputs: list[Output]) -> None:
    """Merges the remaining output of processes that have ended."""
    until = time.monotonic() + DRAIN_SECONDS
    while any(output.streams for output in outputs) and time.monotonic() < until:
      self.pump(POLL_SECONDS)

  def close(self) -> None:
    """Merges incomplete lines, and closes the pipes."""
    for key in [*self._selector.get_map().values()]:
      self._end(key)
    self._selector.close()

  def say(self, text: str) -> None:
    """Prints a message of the launcher to stderr."""
    self._write(STDERR, f"launch: {text}\n".encode())

  def say_last_lines(self, output: Output) -> None:
    """Repeats the last lines of a process on stderr."""
    prefix = b"launch: [%d] " % output.index
    self._write(STDERR, b"".join(prefix + line + b"\n" for line in output.last_lines))

  def _end(self, key: selectors.SelectorKey) -> None:
    if key.data.rest:
      self._join(key.data, [key.data.rest])
    self._selector.unregister(key.fileobj)
    key.fileobj.close()
    key.data.output.streams -= 1

  def _join(self, stream: _Stream, lines: list[bytes]) -> None:
    lines = stream.silence(lines)
    stream.output.last_lines.extend(lines)
    prefix = b"[%d] " % stream.output.index
    self._write(stream.to, b"".join(prefix + line + b"\n" for line in lines))

  def _write(self, to: int, data: bytes) -> None:
    """Writes all, waiting for a slow reader; without a limit only while no stop is requested."""
    waited = 0.0
    while data and to not in self._closed:
      try:
        if select.select([], [to], [], POLL_SECONDS)[1]:
          data = data[os.write(to, data[: select.PIPE_BUF]) :]  # as much as cannot block
          waited = 0.0
          continue
      except OSError as error:
        self._closed.add(to)
        self._asked.append(signal.SIGPIPE)
        self.say(f"cannot write to {'stdout' if to == STDOUT else 'stderr'}: {error.strerror}")
      waited += POLL_SECONDS
      if self._asked and waited > STUCK_SECONDS:
        self._closed.add(to)
