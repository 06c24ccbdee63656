"""The folder that an export writes: complete under its name, or not there at all.

On a file system everything is written to FOLDER.exporting, which is renamed at the end. In a bucket
there is no rename: there the files without which nothing loads, the index of the weights and
config.json, are written last.
"""

import contextlib
import errno
import fcntl
import os
import re

from etils import epath

from runtime import files

CONFIG_FILE = "config.json"
ENDING = ".exporting"
# What an export writes, also where a kill has left a part of it.
_OURS = re.compile(r"[\w.-]+\.(safetensors|json|jinja|model|txt)(\.tmp)?|\.preflight-\w+")
_LISTED = 5


def check(to: str, checkpoints: epath.Path | None) -> epath.Path:
  """Returns the folder of an export, absolute and without links; changes nothing.

  Args:
    to: as the user gives it.
    checkpoints: the folder of the checkpoints of the run that is exported, if it is one.

  Raises:
    ValueError: something is there already, another export is writing it, or it is among the
      checkpoints.
    OSError: it cannot be looked at.
  """
  folder = epath.Path(to).expanduser()
  if files.is_local(folder):
    folder = epath.Path(os.path.realpath(folder))
  if checkpoints is not None and checkpoints.resolve() in (folder, *folder.parents):
    raise ValueError(
      f"--to={to}: it is among the checkpoints of the run, in {checkpoints}, whose folders are "
      f"checked and removed by the run; give another folder"
    )
  if folder.exists():
    if not folder.is_dir():
      raise ValueError(f"--to={to}: {folder} is a file; give a folder that is new or empty")
    if there := sorted(path.name for path in folder.iterdir()):
      more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
      raise ValueError(
        f"--to={to}: {folder} is not empty (it has {', '.join(there[:_LISTED])}{more}); an export "
        f"is written to a folder that is new or empty"
      )
  if files.is_local(folder):
    partial = folder.with_name(folder.name + ENDING)
    if os.path.lexists(partial):
      _require_left(partial)
      os.close(_lock(partial))
  return folder


def _require_left(partial: epath.Path) -> None:
  """Raises ValueError where a folder is not what an export leaves that was killed."""
  plain = os.path.isdir(partial) and not os.path.islink(partial)
  foreign = [
    entry.name
    for entry in (os.scandir(partial) if plain else ())
    if not (entry.is_file(follow_symlinks=False) and _OURS.fullmatch(entry.name))
  ]
  if not plain or foreign:
    what = f"has {min(foreign)}, which no export writes" if foreign else "is not a folder"
    raise ValueError(
      f"{partial} {what}; an export writes there before it renames it: move it, or give another "
      f"--to"
    )


def _lock(partial: epath.Path) -> int:
  """Returns a descriptor that holds the lock of a folder; the kernel releases it at a kill.

  Raises:
    ValueError: another export holds it.
  """
  descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise ValueError(
      f"another export is writing {partial}; wait for its end, or give another --to"
    ) from None
  except OSError:  # a file system without locks
    pass
  return descriptor


class ExportFolder:
  """The folder while it is written; process 0 alone begins, commits and removes it.

  Attributes:
    final: where the export will be.
    path: where the files are written until then.
  """

  def __init__(self, final: epath.Path):
    """Takes what `check` returned; changes nothing."""
    self.final, self.local = final, files.is_local(final)
    self.path = final.with_name(final.name + ENDING) if self.local else final
    self._lock: int | None = None

  def begin(self) -> None:
    """Makes the folder to write to, empty; what a killed export has left is removed.

    Raises:
      ValueError: another export is writing there.
      OSError: it cannot be made.
    """
    if not self.local:
      self.path.mkdir(parents=True, exist_ok=True)
      return
    self.path.mkdir(parents=True, exist_ok=True)
    _require_left(self.path)
    self._lock = _lock(self.path)
    self._empty()

  def write(self, name: str, content: str | bytes) -> None:
    """Writes a small file; raises OSError, which names it."""
    files.replace(self.path / name, content)

  def commit(self) -> None:
    """Gives the folder its name, on the disk.

    Raises:
      OSError: something has appeared there meanwhile.
    """
    if not self.local:
      return
    files.sync([self.path])
    try:
      os.rename(self.path, self.final)  # also over an empty folder
    except OSError as error:
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
        raise
      raise FileExistsError(
        error.errno, "something has been written there meanwhile", str(self.final)
      ) from error
    files.sync([self.final.parent])
    os.close(self._lock)

  def remove(self) -> None:
    """Removes what was written so far; for an export that has failed or is stopped."""
    if self.local and self._lock is not None:
      with contextlib.suppress(OSError):
        self._empty()
        os.rmdir(self.path)
    elif not self.local:
      for child in self.path.iterdir():
        child.unlink(missing_ok=True)

  def _empty(self) -> None:
    for entry in os.scandir(self.path):
      os.unlink(entry.path)
