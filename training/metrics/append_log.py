"""A file of lines that grows while a run trains; on a full disk it waits in memory for space."""

import errno
from collections.abc import Callable, Iterable

from etils import epath

from runtime import files

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# All of it is read at a start. A larger file is refused, also a sparse one that claims to be.
MOST_BYTES = 2**30


class Lines:
  """A file of lines that one process appends to or replaces.

  What a full disk does not take stays in memory, and is written, in order, as soon as there is
  space. Other errors are raised.

  Attributes:
    waiting: why lines are waiting in memory; "" where all are in the file.
  """

  def __init__(self, path: epath.Path, require: Callable[[], None] = files.always):
    """Takes a file, which need not exist, and what raises where it may not be written any more."""
    self._path, self._require, self.waiting = path, require, ""
    self._anew: bytes | None = None  # what the file is to hold, where that is not written yet
    self._more: list[bytes] = []  # lines that are to follow

  def read(self) -> bytes:
    """Returns what is in the file, or will be."""
    held = self._anew
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
    """Replaces the file by these lines; a kill or a full disk leaves what was there."""
    self._anew, self._more = b"".join(lines), []
    self.flush()

  def flush(self) -> None:
    """Writes what is waiting, as far as there is space.

    Raises:
      OSError: the file cannot be written, for another reason than a full disk; the path is named.
    """
    try:
      if self._anew is not None:
        files.replace(self._path, self._anew, require=self._require)
        self._anew = None
      files.append(self._path, b"".join(self._more), require=self._require)
      self._more = []
    except OSError as error:
      if error.errno not in _FULL or isinstance(error, files.NotPlainError):
        raise
      self.waiting = f"{self._path} cannot be written: {error.strerror}"
    else:
      self.waiting = ""
