"""Whether a folder, which need not exist yet, can be written and has space; nothing is created."""

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
    OSError: it cannot be written, or has less space; with the free and the needed space.
  """
  if not files.is_local(folder):
    return
  path = pathlib.Path(folder).absolute()
  there = next(one for one in (path, *path.parents) if os.path.lexists(one))
  if not there.is_dir():
    raise NotADirectoryError(f"{there} is a file, not a folder; {fix}")
  if not os.access(there, os.W_OK | os.X_OK):
    raise PermissionError(f"{there} cannot be written; {fix}")
  free = shutil.disk_usage(there).free
  if free < needed:
    free_text, needed_text = (humanize.naturalsize(n, binary=True) for n in (free, needed))
    raise OSError(
      f"{there} has {free_text} free, and {what} needs {needed_text}; free some space, or {fix}"
    )
