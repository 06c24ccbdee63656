"""An append-only log; while the disk is full, its lines are buffered in memory."""

import errno
from collections.abc import Callable, Iterable

from etils import epath

from runtime import files

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The log is read completely at a start. A larger file is refused, even a sparse one.
MOST_BYTES = 2**30


class Lines:
  """A file of lines that one process appends to or replaces.

  Lines that do not fit on a full disk stay in memory and are written, in order, as soon as there is
  space. Other errors are raised.

  Attributes:
    waiting: why lines are waiting in memory; "" where all are in the file.
  """

  def __init__(self, path: epath.Path, require: Callable[[], None] = files.always):
    """Takes a file, which need not exist, and a check that raises if it must not be written."""
    self._path, self._require, self.waiting = path, require, ""
    self._replacement: bytes | None = None  # the file's new content, until it is written
    self._more: list[bytes] = []  # lines to append after that

  def read(self) -> bytes:
    """Returns what is in the file, or will be."""
    held = self._replacement
    if held is None:
      try:
        held = files.read_bytes(self._path, most_bytes=MOST_BYTES)
      except FileNotFoundError:
        held = b""
    return held + b"".join(self._more)

  def append(self, line: bytes) -> None:
    """Adds a line, which ends with a line break."""
    self._more.append(line)
    self.flush()

  def replace(self, lines: Iterable[bytes]) -> None:
    """Replaces the file by these lines, atomically: a kill or a full disk leaves the old ones."""
    self._replacement, self._more = b"".join(lines), []
    self.flush()

  def flush(self) -> None:
    """Writes the buffered lines, as far as there is space.

    Raises:
      OSError: the file cannot be written, for another reason than a full disk; the path is named.
    """
    try:
      if self._replacement is not None:
        files.replace(self._path, self._replacement, require=self._require)
        self._replacement = None
      files.append(self._path, b"".join(self._more), require=self._require)
      self._more = []
    except OSError as error:
      if error.errno not in _FULL or isinstance(error, files.NotPlainError):
        raise
      self.waiting = f"{self._path} cannot be written: {error.strerror}"
    else:
      self.waiting = ""
