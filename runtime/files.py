"""Small files, read and written safely: plain files only, with limits, and atomically.

A workdir, a checkpoint or a data_dir may hold anything by the time it is read: a directory, a FIFO
or a sparse file of a terabyte in place of a file, a link to somewhere else, JSON nested a million
deep. Opening a FIFO would block forever, and reading without a limit would fill the memory. So
local files are opened without blocking, and checked before the first byte is read. Writes never
follow a symbolic link in the last part of a path; the folders above may be links.

Paths in a bucket (`gs://`) are passed to epath: a bucket has neither links nor FIFOs.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import humanize
from etils import epath

MOST_BYTES = 2**26  # of a small file; the largest that a run writes is some MiB
MOST_DEPTH = 64  # of nested JSON; a config has five levels
MOST_DIGITS = 40  # of an int in JSON; tokenizers write 10^30 for "no limit"
BLOCK_BYTES = 2**20  # read at a time

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # of some file systems, for folders
_KINDS = (
  (stat.S_ISDIR, "a directory"),
  (stat.S_ISLNK, "a symbolic link"),
  (stat.S_ISFIFO, "a FIFO"),
  (stat.S_ISSOCK, "a socket"),
  (stat.S_ISBLK, "a device"),
  (stat.S_ISCHR, "a device"),
)


# Scheme of a bucket -> the package that epath opens its files with, and what installs it.
_LIBRARIES = {
  "gs": ("gcsfs", "make buckets (or pip install -r requirements/buckets.txt)"),
  "s3": ("s3fs", "pip install s3fs"),
}


class NotPlainError(OSError):
  """A path is not a plain file, or the file is too large."""

  def __str__(self) -> str:
    """Returns one line, beginning with the path."""
    return f"{self.filename}: {self.strerror}"


def is_local(path: epath.PathLike) -> bool:
  """Returns whether a path is on this machine's file systems, and not in a bucket."""
  return "://" not in os.fspath(path)


def missing_library(path: epath.PathLike) -> tuple[str, str] | None:
  """Returns the package that a path in a bucket needs and that is not installed, and what does."""
  needed = _LIBRARIES.get(os.fspath(path).partition("://")[0])
  return None if needed is None or importlib.util.find_spec(needed[0]) else needed


def require_library(path: epath.PathLike) -> None:
  """Checks that a path's library is installed, if it is in a bucket.

  Raises:
    ValueError: it is not; with the command that installs it.
  """
  if missing := missing_library(path):
    raise ValueError(f"{path}: a bucket needs the package {missing[0]}: {missing[1]}")


def kind(path: epath.PathLike, *, follow: bool = False) -> str:
  """Returns what a local path is, if not a plain file: `a directory`; "" for a file or nothing.

  Args:
    path: of a file, which need not exist.
    follow: look at what a symbolic link points to.
  """
  try:
    mode = os.stat(path, follow_symlinks=follow).st_mode
  except FileNotFoundError:
    return ""
  return _kind(mode)


def _kind(mode: int) -> str:
  return next((name for is_one, name in _KINDS if is_one(mode)), "")


# ------------------------------ reading ------------------------------


def read_bytes(
  path: epath.PathLike, *, most_bytes: int = MOST_BYTES, follow: bool = False
) -> bytes:
  """Returns the content of a plain file of at most `most_bytes`.

  Args:
    path: of the file.
    most_bytes: a larger file is refused before it is read.
    follow: read through a symbolic link.

  Raises:
    FileNotFoundError: there is none.
    NotPlainError: it is not a plain file, or too large.
    OSError: it cannot be read; the path is named.
  """
  return b"".join(read_blocks(path, most_bytes=most_bytes, follow=follow))


def read_blocks(path: epath.PathLike, *, most_bytes: int, follow: bool = False) -> Iterator[bytes]:
  """Yields the content of a plain file in blocks; raises as `read_bytes`."""
  with _opened(path, follow) as file, naming(path):
    if is_local(path):
      _limit(path, os.fstat(file.fileno()).st_size, most_bytes)
    done = 0
    while block := file.read(BLOCK_BYTES):
      done += len(block)
      _limit(path, done, most_bytes)  # of a file that grows while it is read
      yield block


def read_text(path: epath.PathLike, *, most_bytes: int = MOST_BYTES, follow: bool = False) -> str:
  """Returns the UTF-8 text of a file; raises as `read_bytes`, and ValueError for other bytes."""
  return read_bytes(path, most_bytes=most_bytes, follow=follow).decode()


def read_json(path: epath.PathLike, *, most_bytes: int = MOST_BYTES, follow: bool = False) -> Any:
  """Returns the JSON of a file; raises as `read_bytes`, and ValueError for what is not JSON."""
  return parse_json(read_bytes(path, most_bytes=most_bytes, follow=follow))


def _opened(path: epath.PathLike, follow: bool) -> Any:
  if not is_local(path):
    return epath.Path(path).open("rb")
  return os.fdopen(open_plain(path, os.O_RDONLY, follow=follow), "rb", buffering=0)


def open_plain(path: epath.PathLike, flags: int, *, follow: bool = False, mode: int = 0o666) -> int:
  """Opens a local file and returns its descriptor; never blocks, and opens only plain files.

  Raises:
    NotPlainError: it is something else.
    OSError: it cannot be opened; the path is named.
  """
  flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
  try:
    descriptor = os.open(path, flags, mode)
  except OSError as error:
    what = ""
    with contextlib.suppress(OSError):
      what = kind(path, follow=follow)  # a directory, to write; a link; a socket
    raise (_not_plain(path, what) if what else _named(error, path)) from None
  if what := _kind(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise _not_plain(path, what)
  return descriptor


def _not_plain(path: epath.PathLike, what: str) -> NotPlainError:
  return NotPlainError(errno.EINVAL, f"it is {what}, not a plain file", os.fspath(path))


def _limit(path: epath.PathLike, size: int, most_bytes: int) -> None:
  if size > most_bytes:
    text = f"it has {size:,} bytes, and at most {most_bytes:,} are read"
    raise NotPlainError(errno.EFBIG, text, os.fspath(path))


# ------------------------------ writing ------------------------------


def always() -> None:
  """Permits every write."""


def replace(
  path: epath.PathLike,
  content: str | bytes,
  *,
  shared: bool = False,
  mode: int = 0o666,
  require: Callable[[], None] = always,
) -> None:
  """Writes a file atomically: a kill or a full disk leaves what was there.

  A symbolic link in its place is replaced, and what it points to is left alone.

  Args:
    path: of the file.
    content: all of it; text as UTF-8.
    shared: several processes may write it at once.
    mode: of the new file, less the umask.
    require: raises where this process may write no longer; asked before the file is changed.

  Raises:
    OSError: it cannot be written; the path is named.
  """
  path = epath.Path(path)
  content = content.encode() if isinstance(content, str) else content
  require()
  with naming(path):
    if not is_local(path):
      path.write_bytes(content)  # an object in a bucket appears at once, complete
      return
    temporary = _temporary(path, shared)
    descriptor = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode)
    try:
      try:
        _write(descriptor, content)
        _sync(descriptor)
      finally:
        os.close(descriptor)
      require()
      os.replace(temporary, path)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise


def _temporary(path: epath.Path, shared: bool) -> epath.Path:
  """Returns the name to write a file under: a free one; what a killed writer left is removed."""
  if not shared:
    usual = path.with_name(f"{path.name}.tmp")
    try:
      os.unlink(usual)  # of a link the link, not what it points to; epath's removes directories too
      return usual
    except FileNotFoundError:
      return usual
    except OSError:  # a directory
      pass
  return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def append(path: epath.PathLike, content: bytes, *, require: Callable[[], None] = always) -> None:
  """Appends to a plain file, all of it or nothing; makes the file where there is none.

  Args:
    path: of the file.
    content: what is added.
    require: as of `replace`. Asked once the file is open: who is replaced after that, by a process
      that gives the file a new inode, appends to the old one.

  Raises:
    NotPlainError: something else is there, a symbolic link included.
    OSError: it cannot be written; the path is named.
  """
  if not content:
    return
  if not is_local(path):
    require()
    with epath.Path(path).open("ab") as file:
      file.write(content)
    return
  descriptor = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  try:
    size = os.fstat(descriptor).st_size
    require()
    try:
      with naming(path):
        _write(descriptor, content)
    except OSError:
      os.ftruncate(descriptor, size)
      raise
  finally:
    os.close(descriptor)


def _write(descriptor: int, content: bytes) -> None:
  rest = memoryview(content)
  while rest:
    rest = rest[os.write(descriptor, rest) :]


def _sync(descriptor: int) -> None:
  """Waits for the disk, so that after a power cut the name does not stand for an empty file."""
  with contextlib.suppress(OSError):  # some file systems cannot; a full one has said so before
    os.fsync(descriptor)


def sync(paths: Iterable[epath.PathLike]) -> None:
  """Waits until local files and folders, as they are now, would survive a power cut.

  A file's content and its name are two things: the name is in its folder.

  Raises:
    OSError: the disk reports an error; the path is named.
  """
  for path in paths:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # also links
    try:
      os.fsync(descriptor)
    except OSError as error:
      if error.errno not in _CANNOT_SYNC:
        raise _named(error, path) from error
    finally:
      os.close(descriptor)


def sync_tree(folder: epath.PathLike) -> None:
  """Waits until a local folder with all that is in it would survive a power cut."""
  for inside, _, names in os.walk(folder, topdown=False):
    sync([*(os.path.join(inside, name) for name in names), inside])


def keep_newest(folder: epath.PathLike, suffixes: Collection[str], most: int) -> None:
  """Removes all but the newest half of `most` files of a local cache that has more of them.

  Args:
    folder: the cache's; nothing is removed from one that is not local.
    suffixes: of the files that are counted and removed.
    most: of them.
  """
  if not is_local(folder):
    return
  found = [path for path in pathlib.Path(folder).iterdir() if path.suffix in suffixes]
  if len(found) > most:
    with contextlib.suppress(OSError):  # another process may do the same
      for path in sorted(found, key=lambda path: path.stat().st_mtime)[: -most // 2]:
        path.unlink(missing_ok=True)


def sync_above(folder: epath.PathLike) -> None:
  """Waits until the names of a folder and of those above it would survive a power cut."""
  if is_local(folder):
    above = pathlib.Path(os.path.abspath(folder)).parents
    sync(path for path in above if os.access(path, os.R_OK))


@contextlib.contextmanager
def naming(path: epath.PathLike) -> Iterator[None]:
  """Makes errors of the operating system name the file, not a temporary one beside it."""
  try:
    yield
  except NotPlainError:
    raise
  except OSError as error:
    raise _named(error, path) from error


def _named(error: OSError, path: epath.PathLike) -> OSError:
  return type(error)(error.errno, error.strerror or str(error), os.fspath(path))


# ------------------------------ JSON ------------------------------


def parse_json(content: str | bytes) -> Any:
  """Returns what a text in JSON says; of bytes, in UTF-8.

  Raises:
    ValueError: it is not JSON, nested deeper than MOST_DEPTH, or has an int of over MOST_DIGITS.
  """
  try:
    text = content.decode() if isinstance(content, bytes) else content
    value = json.loads(text, parse_int=_parse_int)
  except RecursionError:
    raise ValueError(f"it is nested deeper than {MOST_DEPTH}") from None
  level = [value] if isinstance(value, dict | list) else []
  for _ in range(MOST_DEPTH):
    inner = [one.values() if isinstance(one, dict) else one for one in level]
    level = [one for values in inner for one in values if isinstance(one, dict | list)]
    if not level:
      return value
  raise ValueError(f"it is nested deeper than {MOST_DEPTH}")


def _parse_int(digits: str) -> int:
  if len(digits) > MOST_DIGITS:
    raise ValueError(
      f"it has the number {digits[:8]}... of {len(digits):,} digits, and at most {MOST_DIGITS} are "
      f"read"
    )
  return int(digits)


def json_text(value: Any, *, indent: int | None = None) -> str:
  """Returns a value in JSON.

  Floats are written so that they read back to the same bits. Those that are not finite, for which
  JSON has no form, are written as the texts "nan", "inf" and "-inf", which `float` reads.
  """
  return json.dumps(finite(value), allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
  """Returns a value whose floats that are not finite are texts, as `json_text` writes them."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(float(value))
  if isinstance(value, dict):
    return {key: finite(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [finite(inner) for inner in value]
  return value


def require_space(folder: epath.PathLike, needed: int, what: str, fix: str) -> None:
  """Checks that a folder, or the one above in which it would be made, can be written and has space.

  Nothing is created.

  Args:
    folder: what is about to be written to. A bucket has neither permissions nor a size.
    needed: bytes.
    what: needs them, such as `a checkpoint`.
    fix: ends the message, such as `give another --workdir`.

  Raises:
    OSError: it cannot be written, or has less space (ENOSPC); with the free and the needed space.
    ValueError: the whole disk is smaller.
  """
  if not is_local(folder):
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
