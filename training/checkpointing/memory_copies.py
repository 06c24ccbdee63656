"""Copies of one process's part of the state, as files in the memory or on a disk of its host.

ROOT/meshwright-UID/RUN/process-I/STEP-OWNER-OF.PART is the copy that process I holds of the part
of process OF after STEP steps: `own`, all of its shards, or `sent`, those that its peer has been
sent. A file has the bytes of the shards, one after the other, then JSON with their SHA-256, then
the length and the SHA-256 of this JSON. It is written under another name and renamed when it is
complete, so a kill leaves none that is torn; what a torn or changed one lacks, its digests show.

A file that is replaced is written over by the next copy: its memory is neither given back nor
zeroed nor mapped again in between, which takes four times as long as copying.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from runtime import files

SHARED_MEMORY = "/dev/shm"
OWN, SENT = "own", "sent"
_NAME = re.compile(rf"(\d+)-(\d+)-(\d+)\.({OWN}|{SENT})")
_TAIL = re.compile(rb"([0-9a-f]{64}) (\d{12})")  # ends a file
_TAIL_BYTES = 64 + 1 + 12
_MOST_JSON = 2**24
_ABOUT = "run.json"  # in a run's folder: which workdir it is of


class DamagedCopyError(Exception):
  """A copy is torn, or its bytes have changed."""


@dataclasses.dataclass(frozen=True)
class Copy:
  """A complete file; its shards' bytes have not been compared with their digest.

  Attributes:
    path: of the file.
    header: its JSON.
  """

  path: pathlib.Path
  header: Mapping[str, Any]

  @property
  def order(self) -> tuple[int, int]:
    """Returns the number of the owner who has written it, and its step: a larger one is newer."""
    return self.header["owner"], self.header["step"]

  @property
  def of(self) -> tuple[int, str]:
    """Returns whose part it has, and whether all of it: (process, `own` or `sent`)."""
    return self.header["of"], self.header["part"]

  def array(self) -> np.ndarray:
    """Returns its shards' bytes, as a uint8 array in which the file is mapped to memory."""
    return _mapped(self.path, self.header["bytes"], "r")

  def check(self) -> None:
    """Compares the shards' bytes with their digest; raises DamagedCopyError where they differ."""
    if digest(self.array()) != self.header["sha256"]:
      raise DamagedCopyError(f"{self.path}: its bytes have changed since they were written")


def digest(array: np.ndarray, length: int | None = None) -> str:
  """Returns the SHA-256 of the first bytes of a uint8 array; None: of all."""
  return hashlib.sha256(memoryview(array[:length])).hexdigest()


def _mapped(path: pathlib.Path, count: int, mode: str) -> np.ndarray:
  if not count:
    return np.empty(0, np.uint8)
  return np.memmap(path, np.uint8, mode, shape=(count,))


def read(path: pathlib.Path) -> Copy:
  """Reads a file's JSON.

  Raises:
    DamagedCopyError: it is torn, or its JSON has changed.
    OSError: it cannot be read.
  """
  descriptor = files.open_plain(path, os.O_RDONLY)
  try:
    size = os.fstat(descriptor).st_size
    tail = _TAIL.fullmatch(os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES)))
    length = int(tail[2]) if tail else _MOST_JSON + 1
    if length > min(_MOST_JSON, size - _TAIL_BYTES):
      raise DamagedCopyError(f"{path}: it is torn ({size:,} bytes)")
    text = os.pread(descriptor, length, size - _TAIL_BYTES - length)
  finally:
    os.close(descriptor)
  if hashlib.sha256(text).hexdigest() != tail[1].decode():
    raise DamagedCopyError(f"{path}: its facts have changed since they were written")
  header = json.loads(text)
  if header["bytes"] != size - _TAIL_BYTES - length:
    raise DamagedCopyError(f"{path}: it has not the {header['bytes']:,} bytes that were written")
  return Copy(path, header)


class CopyFolder:
  """The folder of one process, in that of its run.

  Attributes:
    run: the folder of the run; it need not exist.
    path: that of the process.
  """

  def __init__(self, root: str, run: str, index: int):
    """Takes `checkpoint.local_dir` ("": memory), the run's identity, and the process."""
    self._base = pathlib.Path(root or SHARED_MEMORY) / f"meshwright-{os.getuid()}"
    self.run = self._base / run
    self.path = self.run / f"process-{index}"
    self._arrays: dict[pathlib.Path, tuple[int, np.ndarray]] = {}  # inode and content of files

  # ------------------------------ reading ------------------------------

  def copies(self) -> Iterator[Copy]:
    """Yields the complete copies of the run on this host, of all processes, its own first."""
    if not _is_private(self._base):
      return
    others = sorted(self.run.glob("process-*"))
    for folder in dict.fromkeys([self.path, *others]):
      for path in sorted(folder.glob("*")):
        if _NAME.fullmatch(path.name):
          try:
            yield read(path)
          except (DamagedCopyError, OSError):  # another complete one is looked for
            continue

  def find(self, order: tuple[int, int], of: tuple[int, str]) -> tuple[str, int, str] | None:
    """Returns (path, bytes, SHA-256) of a part on this host; None where there is none.

    The shards that a peer is sent are the first bytes of a process's own.
    """
    for copy in self.copies():
      if copy.order == order and copy.of == of:
        return str(copy.path), copy.header["bytes"], copy.header["sha256"]
      if copy.order == order and copy.of == (of[0], OWN) and of[1] == SENT:
        return str(copy.path), copy.header["sent_bytes"], copy.header["sent_sha256"]
    return None

  # ------------------------------ writing ------------------------------

  def open(self, workdir: epath.Path) -> None:
    """Makes the folder; removes those of runs whose workdir has another run now, or is gone.

    Raises:
      OSError: it cannot be made, or others could write there.
    """
    self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(self._base):
      raise PermissionError(f"{self._base} is not a folder that only user {os.getuid()} may use")
    self.path.mkdir(parents=True, exist_ok=True)
    absolute = os.path.abspath(workdir) if files.is_local(workdir) else str(workdir)
    files.replace(self.run / _ABOUT, json.dumps({"workdir": absolute}), shared=True)
    for other in self._base.iterdir():
      if other != self.run and _is_over(other):
        shutil.rmtree(other, ignore_errors=True)

  def buffer(self, part: str, count: int) -> np.ndarray:
    """Returns a uint8 array of so many bytes, which `commit` makes a copy of.

    Raises:
      OSError: there is no space for it.
    """
    path, spare = self._writing(part), self.path / f"{part}.spare"
    if path not in self._arrays and spare.exists():
      self._rename(spare, path)
    return self._allocated(path, count)

  def reserve(self, part: str, count: int) -> None:
    """Takes the memory of two copies before the first step, which the first saves then have.

    Raises:
      OSError: there is no space for it.
    """
    for path in (self._writing(part), self.path / f"{part}.spare"):
      self._allocated(path, count)[...] = 0

  def _allocated(self, path: pathlib.Path, count: int) -> np.ndarray:
    self.path.mkdir(parents=True, exist_ok=True)
    descriptor = files.open_plain(path, os.O_RDWR | os.O_CREAT, mode=0o600)
    known, array = self._arrays.get(path, (0, ()))
    try:
      os.ftruncate(descriptor, count)
      inode = os.fstat(descriptor).st_ino
      if known == inode and len(array) == count:
        return array
      if count:  # without it, the first write to a full file system would end the process
        os.posix_fallocate(descriptor, 0, count)
    except OSError:
      self._unlink(path)
      raise
    finally:
      os.close(descriptor)
    array = _mapped(path, count, "r+")
    self._arrays[path] = inode, array
    return array

  def commit(self, header: Mapping[str, Any]) -> None:
    """Makes the buffer of a part a copy, with its JSON; raises OSError where that has no space."""
    path, text = self._writing(header["part"]), json.dumps(header).encode()
    with open(path, "ab") as file:
      file.write(text + f"{hashlib.sha256(text).hexdigest()} {len(text):012d}".encode())
    self._rename(path, self.path / "{step}-{owner}-{of}.{part}".format(**header))

  def _rename(self, path: pathlib.Path, new: pathlib.Path) -> None:
    path.replace(new)
    self._arrays.pop(new, None)
    if path in self._arrays:
      self._arrays[new] = self._arrays.pop(path)

  def _unlink(self, path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)
    self._arrays.pop(path, None)

  def drop(self, unwanted: Any, *, spare: bool = False) -> None:
    """Removes copies, by (owner, step), from the folder of the process.

    Args:
      unwanted: called with each (owner, step); returns whether it is removed.
      spare: the memory of one is kept for the next copy.
    """
    for path in self.path.glob("*"):
      if (found := _NAME.fullmatch(path.name)) and unwanted((int(found[2]), int(found[1]))):
        if spare:
          self._rename(path, self.path / f"{found[4]}.spare")
        else:
          self._unlink(path)

  def give_up(self) -> None:
    """Gives the memory back that no complete copy uses."""
    for path in (*self.path.glob("*.spare"), *self.path.glob("*.writing")):
      self._unlink(path)

  def remove(self, count: int) -> None:
    """Removes the folder, and on process 0 those of processes beyond `count`, of earlier starts."""
    shutil.rmtree(self.path, ignore_errors=True)
    for other in self.run.glob("process-*"):
      if int(other.name.partition("-")[2]) >= count:
        shutil.rmtree(other, ignore_errors=True)
    if not any(self.run.glob("process-*")):
      shutil.rmtree(self.run, ignore_errors=True)
      with contextlib.suppress(OSError):  # other runs are there
        self._base.rmdir()

  def _writing(self, part: str) -> pathlib.Path:
    return self.path / f"{part}.writing"


def _is_private(folder: pathlib.Path) -> bool:
  """Returns whether a path is a folder of this user, and no link to one."""
  try:
    found = os.lstat(folder)
  except FileNotFoundError:
    return False
  return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


RUN_ID = "run_id"  # in a workdir: the name of its run's folder


def _is_over(run: pathlib.Path) -> bool:
  """Returns whether a folder is of a run whose workdir is gone, or has begun another one."""
  try:
    workdir = json.loads((run / _ABOUT).read_text())["workdir"]
  except (OSError, ValueError, KeyError):  # it is just being made, or is nobody's
    return False
  try:
    return files.is_local(workdir) and (pathlib.Path(workdir) / RUN_ID).read_text() != run.name
  except FileNotFoundError:
    return True
  except OSError:
    return False
