"""Whether a folder, which need not exist yet, can be written and has space; nothing is created."""

import errno
import os
import pathlib
import shutil

import humanize
from etils import epath

from runtime import files


def require(folder: epath.PathLike, needed: int, what: str, fix: str) -> None:
  """Checks that a folder, or the one above in which it would be made, can be written.

  Args:
    folder: what is about to be written to. A bucket has neither permissions nor a size.
    needed: bytes.
    what: needs them, such as `a checkpoint`.
    fix: ends the message, such as `give another --workdir`.

  Raises:
    OSError: it cannot be written, or has less space (ENOSPC); with the free and the needed space.
    ValueError: the whole disk is smaller.
  """
  if not files.is_local(folder):
    return
  path = pathlib.Path(folder).absolute()
  there = next(one for one in (path, *path.parents) if os.path.lexists(one))
  if not there.is_dir():
    raise NotADirectoryError(f"{there} is a file, not a folder; {fix}")
  if not os.access(there, os.W_OK | os.X_OK):
    raise PermissionError(f"{there} cannot be written; {fix}")
  disk = shutil.disk_usage(there)
  free, total, size = (
    humanize.naturalsize(n, binary=True) for n in (disk.free, disk.total, needed)
  )
  if disk.total < needed:
    raise ValueError(f"the disk of {there} has {total} in all, and {what} needs {size}; {fix}")
  if disk.free < needed:
    full = OSError(f"{there} has {free} free, and {what} needs {size}; free some space, or {fix}")
    full.errno = errno.ENOSPC
    raise full
