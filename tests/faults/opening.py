"""Notices from outside that somebody opens a file: Linux's inotify."""

import ctypes
import os
import pathlib
import sys

_IN_OPEN = 0x20
_IN_NONBLOCK = os.O_NONBLOCK


class Opening:
  """Watches folders, and the folders in them, as they are now; a context manager."""

  def __init__(self, folders: list[pathlib.Path]):
    """Watches.

    Raises:
      OSError: this is not Linux, or the kernel refuses.
    """
    if sys.platform != "linux":
      raise OSError(f"files that are opened can be watched on Linux only, not on {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    self._file = libc.inotify_init1(_IN_NONBLOCK)
    if self._file < 0:
      raise OSError(ctypes.get_errno(), "inotify_init1")
    for folder in folders:
      for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        if libc.inotify_add_watch(self._file, os.fsencode(path), _IN_OPEN) < 0:
          raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))

  def __enter__(self) -> "Opening":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Watches no more."""
    os.close(self._file)

  def seen(self) -> bool:
    """Tells whether a file was opened since the last call."""
    try:
      return bool(os.read(self._file, 1 << 16))
    except BlockingIOError:
      return False
