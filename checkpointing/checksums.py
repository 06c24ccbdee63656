"""SHA-256 checksums of the files of a folder, in a file `digests`.

It begins with a line that names its format, has a line for each other file of the folder, and ends
with the digest of all lines above, so that damage to this file is distinguished from damage to what
it lists:

  checkpoint digests 1
  SHA256 BYTES PATH
  ...
  SHA256 end

Files whose names begin with a dot belong to the file system, and are ignored.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

from etils import epath

from runtime import files

FILE = "digests"
_TITLE = "checkpoint digests 1"
_LINE = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]*) (\S(?:.*\S)?)")
_MOST_BYTES = 2**28  # of this file: two million lines
THREADS = min(8, os.cpu_count() or 1)
_DEEPEST = 16  # folders in one another; a checkpoint has three
_NAMED = 3  # files that a message names


class Read:
  """The number of bytes that this process has read so far, as a measure of progress."""

  count = 0


class DamagedError(Exception):
  """A file is missing, truncated, changed or unreadable."""


@dataclasses.dataclass(frozen=True)
class Digest:
  """The expected size and checksum of a file.

  Attributes:
    path: relative to the folder, with `/` between its parts.
    size: bytes.
    sha256: of its bytes, in hexadecimal.
  """

  path: str
  size: int
  sha256: str

  def line(self) -> str:
    """Returns its line in the file of digests."""
    return f"{self.sha256} {self.size} {self.path}"


# ------------------------------ the file ------------------------------


def to_text(listed: Iterable[Digest]) -> str:
  """Returns the content of a file of digests."""
  lines = [_TITLE, *(digest.line() for digest in sorted(listed, key=lambda d: d.path))]
  above = "".join(f"{line}\n" for line in lines)
  return f"{above}{hashlib.sha256(above.encode()).hexdigest()} end\n"


def parse(content: bytes) -> list[Digest]:
  """Reads the content of a file of digests.

  Raises:
    DamagedError: it is not what `to_text` has returned, to the last bit.
  """
  above, _, last = content.removesuffix(b"\n").rpartition(b"\n")
  above += b"\n"
  if last != f"{hashlib.sha256(above).hexdigest()} end".encode() or content[-1:] != b"\n":
    raise DamagedError(f"{FILE}: it is not what was written ({len(content)} bytes)")
  title, *lines = above.decode().splitlines()
  if title != _TITLE:
    raise DamagedError(f"{FILE}: it begins with {title!r}, and {_TITLE!r} is known here")
  return [parse_line(line) for line in lines]


def parse_line(line: str) -> Digest:
  """Parses the result of `Digest.line`; raises DamagedError if it is malformed."""
  match = _LINE.fullmatch(line)
  if not match:
    raise DamagedError(f"{FILE}: {line!r} is no digest, size and path")
  return Digest(match[3], int(match[2]), match[1])


def read(folder: epath.Path) -> list[Digest]:
  """Reads a folder's file of digests.

  Raises:
    DamagedError: it is missing or damaged.
  """
  try:
    return parse(files.read_bytes(folder / FILE, most_bytes=_MOST_BYTES))
  except FileNotFoundError:
    raise DamagedError(
      f"{FILE}: missing, so the other files cannot be verified; it was lost, or the step was saved "
      f"before there were digests: checkpoint.verify=off reads it as it is"
    ) from None
  except OSError as error:
    raise DamagedError(f"{FILE}: {_reason(error)}") from error


def begins(folder: epath.Path) -> bool:
  """Returns whether a folder has a file of digests that begins with the right title."""
  try:
    first = next(files.read_blocks(folder / FILE, most_bytes=_MOST_BYTES), b"")
  except OSError:
    return False
  return first.startswith(f"{_TITLE}\n".encode())


def write(folder: epath.Path, listed: Iterable[Digest]) -> None:
  """Writes a folder's file of digests, and waits until it is on the disk."""
  files.replace(folder / FILE, to_text(listed))


# ------------------------------ files ------------------------------


def sizes(folder: epath.Path) -> dict[str, int]:
  """Returns path -> bytes of every file below a folder, except the digests themselves.

  Raises:
    DamagedError: something below it is neither a folder nor a plain file. Reading a FIFO or a
      device would block forever, and the target of a link may change without the checkpoint.
  """
  found: dict[str, int] = {}
  walk = _walk_local if files.is_local(folder) else _walk_bucket
  walk(folder, "", found)
  found.pop(FILE, None)
  return found


def _walk_local(inside: epath.PathLike, prefix: str, found: dict[str, int]) -> None:
  with os.scandir(inside) as entries:
    for entry in entries:
      name = prefix + entry.name
      if entry.name.startswith("."):
        continue
      if entry.is_dir(follow_symlinks=False):
        if name.count("/") > _DEEPEST:
          raise DamagedError(f"{name}: folders in folders, deeper than {_DEEPEST}")
        _walk_local(entry.path, f"{name}/", found)
      elif what := files.kind(entry.path):
        raise DamagedError(f"{name}: it is {what}, not a plain file")
      else:
        found[name] = entry.stat(follow_symlinks=False).st_size


def _walk_bucket(inside: epath.Path, prefix: str, found: dict[str, int]) -> None:
  for child in inside.iterdir():
    if child.name.startswith("."):
      continue
    if child.is_dir():
      _walk_bucket(child, f"{prefix}{child.name}/", found)
    else:
      found[prefix + child.name] = child.stat().length


def compute(
  folder: epath.Path, paths: Iterable[str], known: Callable[[str], str] = lambda path: ""
) -> list[Digest]:
  """Returns the digests of files, read in blocks by several threads.

  Args:
    folder: that the paths are relative to.
    paths: of files.
    known: returns the SHA-256 of a path that need not be read, else "".

  Raises:
    OSError: one cannot be read.
  """

  def one(path: str) -> Digest:
    if value := known(path):
      return Digest(path, (folder / path).stat().length, value)
    return Digest(path, *read_through(folder / path))

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    return list(pool.map(one, paths))


def check_sizes(folder: epath.Path, listed: Sequence[Digest]) -> None:
  """Checks that exactly the listed files exist, with their sizes.

  Raises:
    DamagedError: with the files that are missing, unlisted or of another size.
  """
  try:
    there = sizes(folder)
  except OSError as error:
    raise DamagedError(_reason(error)) from error
  wanted = {digest.path: digest.size for digest in listed}
  wrong = []
  for path in sorted({*there, *wanted}):
    if path not in there:
      wrong.append(f"{path}: missing")
    elif path not in wanted:
      wrong.append(f"{path}: not in {FILE}")
    elif there[path] != wanted[path]:
      wrong.append(f"{path}: {there[path]} bytes, and it should be {wanted[path]}")
  _raise(wrong)


def check_contents(
  folder: epath.Path, listed: Sequence[Digest], keep: Collection[str] = ()
) -> dict[str, bytes]:
  """Reads files in blocks, by several threads, and compares their digests.

  Args:
    folder: that the paths are relative to.
    listed: the files.
    keep: paths of small files whose content is returned, so that they need not be read again.

  Returns:
    path -> content of the files to be kept.

  Raises:
    DamagedError: with those that are not what was written.
    PermissionError: it concerns this process, not the file.
  """
  blocks: dict[str, list[bytes]] = {path: [] for path in keep}

  def one(digest: Digest) -> str:
    try:
      kept = blocks.get(digest.path)
      size, value = read_through(folder / digest.path, digest.size, kept)
    except PermissionError:
      raise
    except OSError as error:
      return f"{digest.path}: {_reason(error)}"
    if (size, value) == (digest.size, digest.sha256):
      return ""
    return (
      f"{digest.path}: its bytes have changed (SHA-256 {value[:12]}, {digest.sha256[:12]} once)"
    )

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    _raise([text for text in pool.map(one, listed) if text])
  read = {digest.path for digest in listed}
  return {path: b"".join(parts) for path, parts in blocks.items() if path in read}


def share(listed: Sequence[Digest], index: int, count: int) -> list[Digest]:
  """Returns the files that one of several processes checks, about as many bytes for each."""
  shares: list[list[Digest]] = [[] for _ in range(count)]
  loads = [0] * count
  for digest in sorted(listed, key=lambda d: (-d.size, d.path)):
    least = loads.index(min(loads))
    shares[least].append(digest)
    loads[least] += digest.size
  return shares[index]


def read_through(
  path: epath.Path, most_bytes: int = sys.maxsize, kept: list[bytes] | None = None
) -> tuple[int, str]:
  """Returns (bytes, SHA-256) of a file, reading one block at a time.

  Args:
    path: of the file.
    most_bytes: the largest size that is read.
    kept: collects the blocks; None: they are dropped.

  Raises:
    OSError: it cannot be read, is not a plain file, or is larger than `most_bytes`.
  """
  hashed, size = hashlib.sha256(), 0
  for block in files.read_blocks(path, most_bytes=most_bytes):
    hashed.update(block)
    size += len(block)
    if kept is not None:
      kept.append(block)
    Read.count += len(block)  # not exact between threads, but it grows
  return size, hashed.hexdigest()


def _raise(wrong: Sequence[str]) -> None:
  if wrong:
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise DamagedError("; ".join(wrong[:_NAMED]) + more)


def _reason(error: OSError) -> str:
  return error.strerror or str(error)
