"""A file of lines that grows while a run trains; on a full disk it waits in memory for room."""

import errno
import os
from collections.abc import Sequence

from etils import epath

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Lines:
  """A file of lines that one process writes, to its end or anew.

  What a full disk does not take stays in memory, and is written, in order, as soon as there is
  room. Other errors are raised.

  Attributes:
    waiting: why lines are waiting in memory; "" where all are in the file.
  """

  def __init__(self, path: epath.Path):
    """Takes a file, which need not exist."""
    self._path, self.waiting = path, ""
    self._anew: str | None = None  # what the file is to hold, where that is not written yet
    self._more: list[str] = []  # lines that are to follow

  def read(self) -> str:
    """Returns what is in the file, or will be."""
    held = self._anew
    if held is None:
      held = self._path.read_text() if self._path.exists() else ""
    return held + "".join(self._more)

  def append(self, line: str) -> None:
    """Adds a line, which ends with a line break."""
    self._more.append(line)
    self.flush()

  def replace(self, lines: Sequence[str]) -> None:
    """Makes these lines the whole file; a kill or a full disk leaves what was there."""
    self._anew, self._more = "".join(lines), []
    self.flush()

  def flush(self) -> None:
    """Writes what is waiting, as far as there is room.

    Raises:
      OSError: the file cannot be written, and not for want of room; the path is named.
    """
    try:
      if self._anew is not None:
        replace_text(self._path, self._anew)
        self._anew = None
      self._append("".join(self._more))
      self._more = []
    except OSError as error:
      if error.errno not in _FULL:
        raise
      self.waiting = f"{self._path} cannot be written: {error.strerror}"
    else:
      self.waiting = ""

  def _append(self, text: str) -> None:
    """Appends a text, all of it or nothing."""
    if not text:
      return
    size = self._path.stat().length if self._path.exists() else 0
    try:
      with self._path.open("a") as file:
        file.write(text)
    except OSError as error:
      if error.errno in _FULL:
        os.truncate(self._path, size)  # of a file on a disk: a bucket is never full
      raise


def replace_text(path: epath.Path, text: str) -> None:
  """Writes a file whole or not at all: a kill or a full disk leaves what was there.

  Raises:
    OSError: it cannot be written; the path is named.
  """
  temporary = path.with_name(f"{path.name}.tmp")
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise type(error)(error.errno, error.strerror, str(path)) from error
