"""Whether a saved step is complete and intact: its markers, its checksums, and its JSON.

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
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from etils import epath

from runtime import files
from training.checkpointing.consensus import Together

# ------------------------------ checksums ------------------------------

DIGESTS = "digests"
_DIGESTS_TITLE = "checkpoint digests 1"
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


def digests_text(listed: Iterable[Digest]) -> str:
  """Returns the content of a file of digests."""
  lines = [_DIGESTS_TITLE, *(digest.line() for digest in sorted(listed, key=lambda d: d.path))]
  above = "".join(f"{line}\n" for line in lines)
  return f"{above}{hashlib.sha256(above.encode()).hexdigest()} end\n"


def parse_digests(content: bytes) -> list[Digest]:
  """Reads the content of a file of digests.

  Raises:
    DamagedError: it is not what `to_text` has returned, to the last bit.
  """
  above, _, last = content.removesuffix(b"\n").rpartition(b"\n")
  above += b"\n"
  if last != f"{hashlib.sha256(above).hexdigest()} end".encode() or content[-1:] != b"\n":
    raise DamagedError(f"{DIGESTS}: it is not what was written ({len(content)} bytes)")
  title, *lines = above.decode().splitlines()
  if title != _DIGESTS_TITLE:
    raise DamagedError(f"{DIGESTS}: it begins with {title!r}, and {_DIGESTS_TITLE!r} is known here")
  return [parse_line(line) for line in lines]


def parse_line(line: str) -> Digest:
  """Parses the result of `Digest.line`; raises DamagedError if it is malformed."""
  match = _LINE.fullmatch(line)
  if not match:
    raise DamagedError(f"{DIGESTS}: {line!r} is no digest, size and path")
  return Digest(match[3], int(match[2]), match[1])


def read_digests(folder: epath.Path) -> list[Digest]:
  """Reads a folder's file of digests.

  Raises:
    DamagedError: it is missing or damaged.
  """
  try:
    return parse_digests(files.read_bytes(folder / DIGESTS, most_bytes=_MOST_BYTES))
  except FileNotFoundError:
    raise DamagedError(
      f"{DIGESTS}: missing, so the other files cannot be verified; it was lost, or the step was "
      f"saved before there were digests: checkpoint.verify=off reads it as it is"
    ) from None
  except OSError as error:
    raise DamagedError(f"{DIGESTS}: {_reason(error)}") from error


def digests_begin(folder: epath.Path) -> bool:
  """Returns whether a folder has a file of digests that begins with the right title."""
  try:
    first = next(files.read_blocks(folder / DIGESTS, most_bytes=_MOST_BYTES), b"")
  except OSError:
    return False
  return first.startswith(f"{_DIGESTS_TITLE}\n".encode())


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


def check_sizes(folder: epath.Path, listed: Sequence[Digest]) -> None:
  """Checks that exactly the listed files exist, with their sizes.

  Raises:
    DamagedError: with the files that are missing, unlisted or of another size.
  """
  try:
    there = file_sizes(folder)
  except OSError as error:
    raise DamagedError(_reason(error)) from error
  wanted = {digest.path: digest.size for digest in listed}
  wrong = []
  for path in sorted({*there, *wanted}):
    if path not in there:
      wrong.append(f"{path}: missing")
    elif path not in wanted:
      wrong.append(f"{path}: not in {DIGESTS}")
    elif there[path] != wanted[path]:
      wrong.append(f"{path}: {there[path]} bytes, and it should be {wanted[path]}")
  _raise_damaged(wrong)


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
    _raise_damaged([text for text in pool.map(one, listed) if text])
  read = {digest.path for digest in listed}
  return {path: b"".join(parts) for path, parts in blocks.items() if path in read}


def share_of(listed: Sequence[Digest], index: int, count: int) -> list[Digest]:
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


def _raise_damaged(wrong: Sequence[str]) -> None:
  if wrong:
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise DamagedError("; ".join(wrong[:_NAMED]) + more)


def _reason(error: OSError) -> str:
  return error.strerror or str(error)


# ------------------------------ a step ------------------------------

STATE, CONFIG, RECORD = "state", "config", "record"
TOKENIZER = "tokenizer"  # a folder of files, where the tokens are not bytes
_JSON = {item: f"{item}/metadata" for item in (CONFIG, RECORD)}
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
FULL, SIZE, OFF = "full", "size", "off"  # checkpoint.verify
# Files up to this size are checked by every process, before it trusts the names in them; shapes and
# dtypes are in TensorStore's index, which has its own checksums. Of the larger files, with the
# arrays, each process checks a share.
SMALL_BYTES = 2**20


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


def check(path: epath.Path, verify: str) -> Verified:
  """Verifies that all files exist, and that the small ones are what was written.

  Each small file is read once: what is returned is what was verified.

  Args:
    path: a step's folder.
    verify: `full`; `size`: only the sizes of files; `off`: only Orbax's markers.

  Raises:
    UnreadableError: something is missing or damaged.
  """
  contents: dict[str, bytes] = {}
  large: list[Digest] = []
  if verify == OFF:
    _check_marks(path)
  try:
    if verify == OFF:
      file_sizes(path)  # plain files only: Orbax and TensorStore would wait for a FIFO
    else:
      listed = read_digests(path)
      check_sizes(path, listed)
    if verify == FULL:
      small = [d for d in listed if d.size <= SMALL_BYTES or d.path in _JSON.values()]
      large = [d for d in listed if d not in small]
      contents = check_contents(path, small, keep=_JSON.values())
  except DamagedError as error:
    raise UnreadableError(str(error)) from error
  config, record = (read_json(path, item, contents.get(_JSON[item])) for item in (CONFIG, RECORD))
  return Verified(path, config, record, tuple(large))


def check_share(path: epath.Path, listed: Sequence[Digest], together: Together) -> None:
  """Checks the content of this process's share of files.

  Raises:
    UnreadableError: one is damaged.
  """
  try:
    check_contents(path, share_of(listed, together.index, together.count))
  except DamagedError as error:
    raise UnreadableError(str(error)) from error


def read_json(path: epath.Path, item: str, content: bytes | None = None) -> dict[str, Any]:
  """Returns the JSON of an item (`config` or `record`) of a step's folder, which is not verified.

  Args:
    path: the step's folder.
    item: which.
    content: of its file, where that has been read.

  Raises:
    UnreadableError: it is missing, or is not JSON.
  """
  try:
    parsed = files.read_json(path / _JSON[item]) if content is None else files.parse_json(content)
  except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
    raise UnreadableError(f"{item}/metadata: {one_line(error)}") from error
  if not isinstance(parsed, dict):
    raise UnreadableError(f"{item}/metadata: not a JSON object")
  return parsed


def _check_marks(path: epath.Path) -> None:
  """Checks the markers of a complete step, which Orbax does not."""
  missing = [
    name
    for name in (
      COMMITTED,
      STEP_METADATA,
      *(f"{item}/{COMMITTED}" for item in (STATE, CONFIG, RECORD)),
    )
    if not (path / name).exists() or not (path / name).stat().length
  ]
  if missing:
    raise UnreadableError(f"missing or empty: {', '.join(missing)}")
  try:
    files.read_json(path / STEP_METADATA)
  except (OSError, ValueError) as error:
    raise UnreadableError(f"{STEP_METADATA}: {one_line(error)}") from error


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
