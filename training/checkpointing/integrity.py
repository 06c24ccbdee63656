"""What a saved step consists of: its files, their checksums, and the folder that it is in.

A step's folder, as it is committed:

  STEP/commit_success.txt, STEP/_CHECKPOINT_METADATA    Orbax's marks
  STEP/config/metadata, STEP/record/metadata            JSON
  STEP/state/                                           the arrays, in TensorStore's OCDBT format
  STEP/digests                                          what all of these should be

`digests` has SHA-256 checksums. It begins with a line that names its format, has a line for each
other file of the folder, and ends with the digest of all lines above, so that damage to this file
is distinguished from damage to what it lists:

  checkpoint digests 1
  SHA256 BYTES PATH
  ...
  SHA256 end

Files whose names begin with a dot belong to the file system, and are ignored.

A folder of checkpoints may contain anything else: `7/` with a user's notes, `50.saving_notes/`, a
link to a step elsewhere. What is removed, renamed or counted as a step is recognized by its
content, not only by its name. The rest is reported and left alone.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from etils import epath

from processes.coordination import current
from runtime import files
from runtime.printable import printable

# ------------------------------ checksums ------------------------------

DIGESTS = "digests"
TITLE = "checkpoint digests 1"
_LINE = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]*) (\S(?:.*\S)?)")
MOST_BYTES = 2**28  # of this file: two million lines
THREADS = min(8, os.cpu_count() or 1)
_DEEPEST = 16  # folders in one another; a checkpoint has three


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


def digests_text(listed: Iterable[Digest]) -> str:
  """Returns the content of a file of digests."""
  lines = [TITLE, *(digest.line() for digest in sorted(listed, key=lambda d: d.path))]
  above = "".join(f"{line}\n" for line in lines)
  return f"{above}{hashlib.sha256(above.encode()).hexdigest()} end\n"


def parse_line(line: str) -> Digest:
  """Parses the result of `Digest.line`; raises DamagedError if it is malformed."""
  match = _LINE.fullmatch(line)
  if not match:
    raise DamagedError(f"{DIGESTS}: {line!r} is no digest, size and path")
  return Digest(match[3], int(match[2]), match[1])


def digests_begin(folder: epath.Path) -> bool:
  """Returns whether a folder has a file of digests that begins with the right title."""
  try:
    first = next(files.read_blocks(folder / DIGESTS, most_bytes=MOST_BYTES), b"")
  except OSError:
    return False
  return first.startswith(f"{TITLE}\n".encode())


def write_digests(folder: epath.Path, listed: Iterable[Digest]) -> None:
  """Writes a folder's file of digests, and waits until it is on the disk."""
  files.replace(folder / DIGESTS, digests_text(listed))


# ------------------------------ files ------------------------------


def file_sizes(folder: epath.Path) -> dict[str, int]:
  """Returns path -> bytes of every file below a folder, except the digests themselves.

  Raises:
    DamagedError: something below it is neither a folder nor a plain file. Reading a FIFO or a
      device would block forever, and the target of a link may change without the checkpoint.
  """
  found: dict[str, int] = {}
  walk = _walk_local if files.is_local(folder) else _walk_bucket
  walk(folder, "", found)
  found.pop(DIGESTS, None)
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


def compute_digests(
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


def reason(error: OSError) -> str:
  return error.strerror or str(error)


# ------------------------------ a step ------------------------------

FOLDER = "checkpoints"  # in a workdir
STATE, CONFIG, RECORD = "state", "config", "record"
PARAMETERS, VARIABLES = "params", "variables"  # branches of the state
BASE = "base"  # of a record: where the parameters are that the checkpoint has not
TEACHER = "teacher"  # of a record: likewise, those of the model that the run learns from
TOKENIZER = "tokenizer"  # a folder of files, where the tokens are not bytes
JSON = {item: f"{item}/metadata" for item in (CONFIG, RECORD)}
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
FULL, SIZE, OFF = "full", "size", "off"  # checkpoint.verify


class UnreadableError(Exception):
  """A step's folder is damaged: a file is missing, truncated or changed."""


@dataclasses.dataclass(frozen=True)
class Verified:
  """A step whose files all exist, with its config and record.

  Attributes:
    path: of the step's folder.
    config: of the run.
    record: versions, metrics and more.
    large: the files whose content has not been compared with their digests yet.
  """

  path: epath.Path
  config: dict[str, Any]
  record: dict[str, Any]
  large: tuple[Digest, ...] = ()

  @property
  def step(self) -> int:
    """Returns its number."""
    return int(self.path.name)


# The settings of an array in TensorStore's errors, a page of JSON.
_SETTINGS = re.compile(r" \[tensorstore_spec='.*?'\](?= \[|$)")


def one_line(error: BaseException, most: int = 300) -> str:
  """Returns the message of an error, in one line of about as many characters at most."""
  text = _SETTINGS.sub("", " ".join(f"{type(error).__name__}: {error}".split()))
  return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


# ------------------------------ entries of a folder of checkpoints ------------------------------

SAVING, REMOVING = ".saving", ".removing"
ITEMS = frozenset({STATE, CONFIG, RECORD})
# The names in a step's folder, at its top and below. After a kill they may have a suffix:
# `state.orbax-checkpoint-tmp`, `digests.tmp`, `manifest.ocdbt.__lock`.
_ENDING = r"([._-].*)?"
_FILES = {DIGESTS, COMMITTED, STEP_METADATA}
_TOP = re.compile(f"({'|'.join(map(re.escape, sorted({*ITEMS, *_FILES, TOKENIZER})))}){_ENDING}")
_BELOW = re.compile(
  rf"(metadata|_METADATA|_sharding|{STEP_METADATA}|{re.escape(COMMITTED)}|manifest\.ocdbt|"
  rf"array_metadatas|(ocdbt\.)?process_\d+|d|[0-9a-f]{{32}}){_ENDING}"
)
_TOKENIZER = re.compile(rf"[\w.-]+\.(json|model|jinja){_ENDING}")
_ORBAX = r"(\.orbax-checkpoint-tmp(-\d+)?)"  # Orbax's suffix of incomplete files
_LEFT = re.compile(rf"\d+((\.saving(-\w+)*|\.removing(-\d+)?){_ORBAX}?|{_ORBAX})")


def is_step(path: epath.Path) -> bool:
  """Returns whether a path is a step's folder that was saved here, intact or damaged.

  Its file of digests has the right title, or it has the folders of all items.
  """
  if not (path.name.isdecimal() and str(int(path.name)) == path.name):
    return False
  names = _entries(path)
  return names >= ITEMS or (DIGESTS in names and digests_begin(path))


def listed(there: Sequence[int]) -> str:
  """Returns steps as a text."""
  return ", ".join(map(str, there)) or "none"


def steps(folder: epath.Path) -> list[int]:
  """Returns the steps saved in a folder, oldest first, intact or damaged."""
  if not folder.is_dir():
    return []
  return sorted(int(child.name) for child in folder.iterdir() if is_step(child))


def require_steps(folder: epath.Path) -> list[int]:
  """Returns the steps of a folder; raises ValueError if there are none."""
  there = steps(folder)
  if not there:
    raise nothing_in(folder)
  return there


def nothing_in(folder: epath.Path) -> ValueError:
  what = "has no checkpoints" if folder.is_dir() else "is not a folder"
  return ValueError(
    f"{folder} {what}; give the workdir of a run that has saved one, or WORKDIR/STEP"
  )


def is_leftover(path: epath.Path) -> bool:
  """Returns whether a path was left by a killed or failed save or removal."""
  return _LEFT.fullmatch(path.name) is not None and _is_folder(path) and only_ours(path)


def only_ours(path: epath.Path) -> bool:
  """Returns whether a folder has only entries that a save writes, by all the names in it."""
  return _all_named(path, _TOP)


def _all_named(path: epath.Path, names: re.Pattern) -> bool:
  for name in _entries(path):
    below = _TOKENIZER if name == TOKENIZER else _BELOW
    if not name.startswith(".") and not (names.fullmatch(name) and _all_named(path / name, below)):
      return False
  return True


def foreign_entries(folder: epath.Path) -> list[str]:
  """Returns the names in a folder of checkpoints that look like steps and are not."""
  named = [child for child in folder.iterdir() if re.match(r"\d+(\.|$)", child.name)]
  return sorted(
    child.name
    for child in named
    if not (is_step(child) or is_leftover(child) or re.search(r"\.broken(-\d+)?$", child.name))
  )


def free_name(folder: epath.Path, name: str) -> epath.Path:
  """Returns the first of NAME, NAME-2, NAME-3, ... that does not exist."""
  number, path = 2, folder / name
  while os.path.lexists(path) if files.is_local(path) else path.exists():
    number, path = number + 1, folder / f"{name}-{number}"
  return path


def _is_folder(path: epath.Path) -> bool:
  """Returns whether a path is a folder, and not a link to one."""
  return path.is_dir() and not (files.is_local(path) and os.path.islink(path))


def _entries(path: epath.Path) -> set[str]:
  """Returns the names in a folder; none if it is not a folder, or cannot be listed."""
  if not _is_folder(path):
    return set()
  with contextlib.suppress(OSError):
    return {child.name for child in path.iterdir()}
  return set()


# ------------------------------ warnings ------------------------------


def warn(text: str) -> None:
  """Prints a warning to standard error at once."""
  print(text, file=sys.stderr, flush=True)


def warn_once(text: str) -> None:
  """Prints a warning to standard error, for all processes once."""
  if current().first:
    warn(printable(text))
