"""The claims to a workdir, numbered files in `WORKDIR/owner/`, on local disks, NFS and in buckets.

`000007.json` names the claimant; the highest number is the owner's. A claim is created only if its
number is free, so of two starts that want the same one exactly one gets it. The owner rewrites
`000007.beat` as long as it runs.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import secrets
import stat
import threading
from typing import Protocol

from etils import epath

FOLDER = "owner"
LAST = 10**9 - 1  # largest number of a claim; files with larger ones are foreign
_CLAIM = re.compile(r"([0-9]{6,9})\.json")
_OURS = re.compile(r"[0-9]{6,9}\.(json|beat|[0-9a-f]{16}\.new)")
_BEAT_BYTES = 32  # constant, so that a heartbeat needs no space on a full disk
_MOST_BYTES = 2**16
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclasses.dataclass(frozen=True)
class Beat:
  """A heartbeat as read.

  Attributes:
    text: what the owner wrote; "" if it cannot be read.
    stamp: of the file: it changes whenever the owner writes.
  """

  text: str
  stamp: str


class Claims(Protocol):
  """The claims to one workdir; every method may raise OSError."""

  def numbers(self) -> list[int]:
    """Returns the claimed numbers, bypassing caches."""

  def create(self, number: int, text: str) -> bool:
    """Claims a number; returns whether it was free."""

  def read(self, number: int) -> str:
    """Returns the text of a claim; "" if it cannot be read."""

  def write_beat(self, number: int, text: str) -> None:
    """Writes a heartbeat, of at most 32 characters."""

  def read_beat(self, number: int) -> Beat:
    """Returns the newest heartbeat."""

  def remove(self, number: int) -> None:
    """Removes a claim and its heartbeat."""

  def remove_others(self, number: int) -> None:
    """Removes what claims with lower numbers have left."""

  def withdraw(self, number: int) -> None:
    """Removes a claim, and the folders created for it if they are empty."""


def claims_to(workdir: epath.Path) -> Claims:
  """Returns the claims to a workdir.

  Raises:
    ValueError: its storage has no conditional write.
  """
  scheme, separator, _ = str(workdir).partition("://")
  if not separator:
    return LocalClaims(pathlib.Path(workdir))
  if scheme in ("gs", "s3"):
    return BucketClaims(f"{workdir}/{FOLDER}/")
  raise ValueError(
    f"{workdir}: {scheme}:// has no conditional write here, without which two runs cannot be kept "
    f"out of one workdir; name one in a file system, gs:// or s3:// with --workdir"
  )


# ------------------------------ file systems ------------------------------


class LocalClaims:
  """Claims in a folder of a file system, which may be NFS.

  An NFS client may answer from its cache, but asks the server when a file or folder is opened. So
  claims are found by listing the folder, never by looking up a name, and a heartbeat overwrites the
  same file instead of being renamed into place.
  """

  def __init__(self, workdir: pathlib.Path):
    """Takes a folder, which need not exist."""
    self._folder = workdir.expanduser().absolute() / FOLDER
    self._made: list[pathlib.Path] = []

  def numbers(self) -> list[int]:
    try:
      names = os.listdir(self._folder)
    except FileNotFoundError:
      return []
    return [int(found[1]) for found in map(_CLAIM.fullmatch, names) if found]

  def create(self, number: int, text: str) -> bool:
    self._make_folder()
    target = self._claim(number)
    new = self._folder / f"{number:06}.{secrets.token_hex(8)}.new"
    try:
      _write_new(new, text)
      try:
        os.link(new, target)  # atomic: with all of its content, or not at all
      except OSError as error:
        # The reply of a network file system may have been lost: then the file has two names.
        if error.errno in _NO_LINKS:
          _write_new(target, text)
        elif new.stat().st_nlink != 2:
          raise
    except FileExistsError:
      return False
    finally:
      with contextlib.suppress(OSError):
        new.unlink()
    return True

  def read(self, number: int) -> str:
    return _read(self._claim(number))[0]

  def write_beat(self, number: int, text: str) -> None:
    path = self._beat(number)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
      descriptor = os.open(path, flags, 0o644)
      try:
        os.pwrite(descriptor, text.ljust(_BEAT_BYTES).encode()[:_BEAT_BYTES], 0)
      finally:
        os.close(descriptor)  # here NFS sends it
    except OSError as error:
      if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise
      os.utime(path)  # a heartbeat without disk space

  def read_beat(self, number: int) -> Beat:
    text, stamp = _read(self._beat(number))
    return Beat(text.rstrip(), stamp)

  def remove(self, number: int) -> None:
    for path in (self._beat(number), self._claim(number)):
      with contextlib.suppress(FileNotFoundError):
        path.unlink()

  def remove_others(self, number: int) -> None:
    for name in os.listdir(self._folder):
      if _OURS.fullmatch(name) and int(name.partition(".")[0]) < number:
        with contextlib.suppress(FileNotFoundError):
          (self._folder / name).unlink()

  def withdraw(self, number: int) -> None:
    self.remove(number)
    with contextlib.suppress(OSError):  # something else is in it
      for folder in self._made:
        folder.rmdir()

  def _make_folder(self) -> None:
    """Creates the folder, remembering what was created; rejects a link or a file."""
    missing = [path for path in (self._folder, *self._folder.parents) if not os.path.lexists(path)]
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      why = f"{self._folder} cannot be created: {error.strerror}; give another --workdir"
      raise type(error)(why) from error
    self._made = self._made or missing
    if self._folder.is_symlink():
      raise NotADirectoryError(f"{self._folder} is a symbolic link, not a folder; remove it")

  def _claim(self, number: int) -> pathlib.Path:
    return self._folder / f"{number:06}.json"

  def _beat(self, number: int) -> pathlib.Path:
    return self._folder / f"{number:06}.beat"


def _write_new(path: pathlib.Path, text: str) -> None:
  descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
  with open(descriptor, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(descriptor)


def _read(path: pathlib.Path) -> tuple[str, str]:
  """Returns (content, stamp) of a small plain file; ("", "") if there is none."""
  try:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  except OSError:
    return "", ""
  with open(descriptor, "rb") as file:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
      return "", ""
    text = file.read(_MOST_BYTES).decode(errors="replace")
  return text, f"{status.st_ino} {status.st_mtime_ns} {text}"


# ------------------------------ buckets ------------------------------


class BucketClaims:
  """Claims in a bucket, written by TensorStore, which also writes the arrays of checkpoints.

  A claim is created on the condition that its object does not exist: `ifGenerationMatch=0` in Cloud
  Storage, `If-None-Match: *` in S3. Both list new objects without delay.
  """

  def __init__(self, url: str):
    """Takes the URL of the folder; the bucket must exist."""
    self._url = url
    self._store = None
    self._opening = threading.Lock()

  @property
  def _objects(self):
    import tensorstore  # here: it takes a while, and a workdir on a disk does not need it

    with self._opening:
      if self._store is None:
        self._store = _found(tensorstore.KvStore.open(self._url))
    return self._store

  def numbers(self) -> list[int]:
    names = [name.decode(errors="replace") for name in _found(self._objects.list())]
    return [int(found[1]) for found in map(_CLAIM.fullmatch, names) if found]

  def create(self, number: int, text: str) -> bool:
    key = f"{number:06}.json"
    there = _found(self._objects.read(key))
    if there.state != "missing":
      return False
    # The generation of a missing object: the server refuses the write if there is one now.
    written = _found(self._objects.write(key, text, if_equal=there.stamp.generation))
    if written.generation:
      return True
    # TensorStore retries a request whose reply was lost; then the object has this claim's secret.
    return self.read(number) == text

  def read(self, number: int) -> str:
    found = _found(self._objects.read(f"{number:06}.json"))
    return found.value[:_MOST_BYTES].decode(errors="replace")

  def write_beat(self, number: int, text: str) -> None:
    _found(self._objects.write(f"{number:06}.beat", text))

  def read_beat(self, number: int) -> Beat:
    found = _found(self._objects.read(f"{number:06}.beat"))
    text = found.value[:_MOST_BYTES].decode(errors="replace")
    return Beat(text, f"{found.stamp.generation!r} {text}")

  def remove(self, number: int) -> None:
    for ending in ("beat", "json"):
      _found(self._objects.write(f"{number:06}.{ending}", None))

  def remove_others(self, number: int) -> None:
    for name in _found(self._objects.list()):
      text = name.decode(errors="replace")
      if _OURS.fullmatch(text) and int(text.partition(".")[0]) < number:
        _found(self._objects.write(name, None))

  def withdraw(self, number: int) -> None:
    self.remove(number)  # a bucket has no folders


def _found(future):
  """Returns the result of a TensorStore future; raises OSError if it failed or takes too long."""
  try:
    return future.result(timeout=60)
  except (ValueError, TimeoutError) as error:
    raise OSError(f"{type(error).__name__}: {error}") from error
