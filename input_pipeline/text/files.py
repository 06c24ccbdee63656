"""Files of text by path, folder or glob: on disk, in buckets (gs://, s3://), on the Hub (hf://).

pyarrow's file systems read buckets, and huggingface_hub's the Parquet files of Hub data sets; they
are imported only if a path asks for them. What is compressed (.gz, .zst) is decompressed while it
is read.
"""

import contextlib
import contextvars
import dataclasses
import datetime
import functools
import glob
import io
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from runtime import files
from runtime.printable import few

TEXT = (".txt", ".md")
LINES = (".jsonl",)
PARQUET = ".parquet"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = (*TEXT, *LINES, *(s + c for s in (*TEXT, *LINES) for c in COMPRESSED), PARQUET)
FORMATS = ".txt, .md, .jsonl (each also .gz, .zst) and .parquet"
_BUCKETS = ("gs://", "s3://")
_HUB = "hf://"
_GLOB = re.compile(r"[*?[]")
_LISTED = 8
_CONVERTED = "refs/convert/parquet"  # where the Hub keeps the Parquet files that it made itself
_ADVICE = {
  "gs": "; check the network, and `gcloud auth application-default login`; a public bucket is"
  " gs://anonymous@BUCKET",
  "s3": "; check the network, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials",
}
_MOST_SAID = 300
# What is compressed may give that much, and so many times its size. Text that is compressed well
# has a tenth or a hundredth of its size; gzip reaches a thousandth, zstd and Parquet any share.
_FREE_BYTES, _MOST_EXPANSION = 2**26, 128
_RETRY_SECONDS = 60  # of a bucket that does not answer; pyarrow's own limit is a quarter of an hour


@dataclasses.dataclass(frozen=True, order=True)
class InputFile:
  """A file of a data set.

  Attributes:
    path: absolute, or a URI.
    size: in bytes.
    stamp: changes when the content does: the time of modification, or the Hub's content id.
    ctime: of the inode in ns, which no program can set back; 0 in a bucket. It tells whether a file
      changes while it is read, and is no part of what identifies the file: a copy has another.
  """

  path: str
  size: int
  stamp: str
  ctime: int = 0

  @property
  def suffix(self) -> str:
    """The format: one of TEXT, LINES or PARQUET, without that of the compression."""
    return _split(self.path)[0]

  @property
  def compression(self) -> str | None:
    """How it is compressed, as pyarrow calls it: gzip, zstd or None."""
    return _split(self.path)[1]


def _split(path: str) -> tuple[str, str | None]:
  stem, last = os.path.splitext(path.lower())
  if last in COMPRESSED:
    return os.path.splitext(stem)[1], COMPRESSED[last]
  return last, None


def is_supported(path: str) -> bool:
  """Returns whether a file's name ends in one of the formats that are read."""
  return path.lower().endswith(SUFFIXES)


class ChangedError(ValueError):
  """Files are no longer what they were when they were listed.

  Attributes:
    paths: of these files.
  """

  def __init__(self, text: str, paths: Iterable[str]):
    """Takes the message and the paths."""
    super().__init__(text, frozenset(paths))  # as pickle gives them back
    self.text, self.paths = self.args

  def __str__(self) -> str:
    """The message."""
    return self.text


# ------------------------------ finding ------------------------------

_listings: contextvars.ContextVar[dict[str, list[InputFile]] | None] = contextvars.ContextVar(
  "_listings", default=None
)


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
  """Within it `find` lists a spec once, so that both splits are read from the same files."""
  known = _listings.get()
  token = _listings.set({} if known is None else known)
  try:
    yield
  finally:
    _listings.reset(token)


def parts(spec: str) -> list[str]:
  """Returns the paths of data.files: what stands between its commas."""
  return [part.strip() for part in spec.split(",") if part.strip()]


def paths(spec: str) -> list[str]:
  """Returns the paths of data.files, local ones as absolute ones."""
  return [*map(absolute, parts(spec))]


def absolute(path: str) -> str:
  """Returns a local path as an absolute one, and a URI as it is."""
  if not files.is_local(path):
    return path
  return os.path.abspath(os.path.expanduser(path))


def find(spec: str, key: str = "data.files") -> list[InputFile]:
  """Returns the files that a spec names, sorted by path, each once.

  Args:
    spec: paths, folders, globs (`**` for any folders) and URIs (gs://, s3://, hf://OWNER/NAME),
      separated by commas. A folder stands for all the files of the known formats below it, without
      hidden ones. What a glob matches and is of no known format is left out, as are folders.
    key: the config's, for messages.

  Raises:
    ValueError: a path of it matches nothing, or cannot be read.
  """
  if not parts(spec):
    raise ValueError(
      f"{key} is empty; name the files of the text: paths, folders or globs, separated by commas"
      f" ({FORMATS})"
    )
  known = _listings.get()
  if known is None:
    return _listed(spec, key)
  if spec not in known:
    known[spec] = _listed(spec, key)
  return known[spec]


def _listed(spec: str, key: str) -> list[InputFile]:
  found: dict[str, InputFile] = {}
  for part in parts(spec):
    try:
      matches = _match(part, key)
    except OSError as error:
      said = str(error).partition(" error_info=")[0][:_MOST_SAID]
      hint = _ADVICE.get(part.partition("://")[0], "")
      raise ValueError(f"{key}: {part} cannot be read ({said}){hint}") from error
    for real, file in matches:
      found.setdefault(real, file)
  return sorted(found.values())


def _match(part: str, key: str) -> list[tuple[str, InputFile]]:
  """Returns (what it is the same as, file) of each match of one path of a spec, sorted."""
  if part.startswith(_HUB):
    return _on_hub(part, key)
  if part.startswith(_BUCKETS):
    return _in_bucket(part, key)
  if "://" in part:
    raise ValueError(f"{key}: {part}: only local paths, gs://, s3:// and hf:// are read")
  return _local(part, key)


def _chosen(part: str, key: str, paths: Iterable[str]) -> list[str]:
  """Returns those of the matches that are of a known format. Raises ValueError if none is."""
  paths = sorted(paths)
  chosen = [path for path in paths if is_supported(path)]
  if chosen:
    return chosen
  if not paths:
    raise ValueError(f"{key}: {part} matches no file; files are {FORMATS}")
  names = [posixpath.basename(path) for path in paths]
  hint = "give plain text, such as source code, a name that ends in .txt"
  if any(name.endswith(".json") for name in names):
    hint = "rename a .json file with an object in each line to .jsonl"
  raise ValueError(
    f"{key}: {part} has no file of a format that is read, only {few(names, _LISTED)};"
    f" files are {FORMATS}; {hint}"
  )


def _local(part: str, key: str) -> list[tuple[str, InputFile]]:
  path = absolute(part)
  if os.path.isdir(path):
    matches = _below(path)
  elif os.path.lexists(path):
    matches = [path]
  elif _GLOB.search(part):
    matches = [match for match in glob.glob(path, recursive=True) if not os.path.isdir(match)]
    if not matches and glob.glob(path):
      raise ValueError(f"{key}: {part} matches only folders; {part.rstrip('/')}/** reads them")
  else:
    near = os.path.dirname(path)
    where = "" if os.path.isdir(near) else f", and no folder {near}"
    raise ValueError(f"{key}: there is no file or folder {path}{where}")
  return [(os.path.realpath(match), _look_at(match)) for match in _chosen(part, key, matches)]


def _below(folder: str) -> Iterator[str]:
  """Yields the files below a folder, through links too, without hidden files and folders."""
  seen = set()

  def fail(error):
    raise error

  for place, folders, names in os.walk(folder, followlinks=True, onerror=fail):
    real = os.path.realpath(place)
    if real in seen:  # a link to a folder above
      folders.clear()
      continue
    seen.add(real)
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    yield from (os.path.join(place, name) for name in names if not name.startswith("."))


def _look_at(path: str) -> InputFile:
  if what := files.kind(path, follow=True):
    raise ValueError(f"data.files: {path} is {what}, not a file")
  state = os.stat(path)  # a link that points nowhere raises, with the path
  return InputFile(path, state.st_size, str(state.st_mtime_ns), state.st_ctime_ns)


def _matcher(pattern: str) -> re.Pattern:
  """Returns the regular expression of a glob, in which `**` stands for any folders."""
  regex = ""
  for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern, re.DOTALL):
    if token in _WILD:
      regex += _WILD[token]
    elif token.startswith("[") and len(token) > 1:
      regex += "[" + token[1:-1].replace("!", "^", 1).replace("\\", "\\\\") + "]"
    else:
      regex += re.escape(token)
  return re.compile(regex, re.DOTALL)


_WILD = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}


def _fixed(pattern: str) -> str:
  """Returns the folder of a glob above its first wildcard."""
  wild = _GLOB.search(pattern)
  return pattern if not wild else posixpath.dirname(pattern[: wild.start()])


def _visible(path: str, folder: str) -> bool:
  below = path[len(folder) :].lstrip("/")
  return not any(name.startswith(".") for name in below.split("/"))


# ------------------------------ buckets ------------------------------


def _in_bucket(part: str, key: str) -> list[tuple[str, InputFile]]:
  from pyarrow import fs

  system, path = bucket(part, key)
  prefix = part.removesuffix(path)
  path = path.rstrip("/")
  folder = _fixed(path)
  state = system.get_file_info(folder)
  if state.type == fs.FileType.File:
    states = [state]
  elif state.type == fs.FileType.NotFound:
    raise ValueError(f"{key}: there is no file or folder {prefix}{folder}")
  else:
    states = system.get_file_info(fs.FileSelector(folder, recursive=True))
    states = [one for one in states if one.type == fs.FileType.File]
    if folder != path:
      pattern = _matcher(path)
      states = [one for one in states if pattern.fullmatch(one.path)]
    states = [one for one in states if _visible(one.path, folder)]
  known = {f"{prefix}{one.path}": one for one in states}
  stamps = {path: str(one.mtime_ns or 0) for path, one in known.items()}
  chosen = _chosen(part, key, known)
  return [(path, InputFile(path, known[path].size, stamps[path])) for path in chosen]


def bucket(uri: str, key: str = "data.files") -> tuple[Any, str]:
  """Returns the pyarrow file system of a URI, and the path in it: BUCKET/PATH.

  Raises:
    ValueError: the URI has a password, which would be written into the records of the run.
  """
  scheme, _, path = uri.partition("://")
  user, _, inner = path.rpartition("@") if "@" in path.partition("/")[0] else ("", "", path)
  if user not in ("", "anonymous"):
    raise ValueError(
      f"{key}: {scheme}://...@{inner}: credentials are no part of a path; they are read from the"
      " environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are"
    )
  return _file_system(scheme, path.partition("/")[0]), inner


@functools.cache
def _file_system(scheme: str, name: str):
  from pyarrow import fs

  options = f"?retry_limit_seconds={_RETRY_SECONDS}" if scheme == "gs" else ""
  return fs.FileSystem.from_uri(f"{scheme}://{name}{options}")[0]


# ------------------------------ the Hub ------------------------------


def _on_hub(part: str, key: str) -> list[tuple[str, InputFile]]:
  repository, revision, inner = hub_name(part)
  try:
    commit = _commit(repository, revision)
    matches = _parquet_of(repository, commit, inner)
    if not matches and not revision and not inner:
      commit = _commit(repository, _CONVERTED)
      matches = _parquet_of(repository, commit, inner)
  except Exception as error:  # of the network, of the Hub, of a data set that is private or missing
    raise ValueError(
      f"{key}: {part} cannot be read from the Hugging Face Hub ({type(error).__name__}: {error})."
      " Without network access, download it where there is some, with"
      f" `hf download --repo-type dataset {repository} --local-dir FOLDER`, and set {key}=FOLDER"
    ) from error
  if not matches:
    raise ValueError(f"{key}: {part} has no Parquet files; download its files and name those")
  found = []
  for path, facts in sorted(matches.items()):
    path = f"{_HUB}{repository}@{commit}/{path}"
    found.append((path, InputFile(path, facts["size"], str(facts.get("blob_id") or commit))))
  return found


def _commit(repository: str, revision: str) -> str:
  """Returns the commit that a revision of a data set is now, so that all parts read the same."""
  import huggingface_hub

  return huggingface_hub.HfApi().dataset_info(repository, revision=revision or None).sha


def hub_name(uri: str) -> tuple[str, str, str]:
  """Returns (OWNER/NAME, revision or "", path or glob inside or "") of hf://OWNER/NAME[@REV]/..."""
  match = re.fullmatch(
    r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/\w+/\w+|[^/@]+))?(?:/(.*))?", uri
  )
  if not match:
    raise ValueError(
      f"{uri}: a data set of the Hub is hf://OWNER/NAME, with a path or glob after it"
    )
  return match[1], match[2] or "", (match[3] or "").strip("/")


def hub():
  """Returns the file system of the Hub, whose paths are datasets/OWNER/NAME@REVISION/PATH."""
  import huggingface_hub

  return huggingface_hub.HfFileSystem()


def _parquet_of(repository: str, commit: str, inner: str) -> dict[str, dict[str, Any]]:
  """Returns path in the data set -> facts of the Parquet files that a URI names."""
  root = f"datasets/{repository}@{commit}"
  exact = _GLOB.search(inner) or inner.endswith(PARQUET)
  wanted = _matcher(inner if exact else f"{inner}/**".lstrip("/"))
  known = hub().find(f"{root}/{_fixed(inner)}".rstrip("/"), detail=True)
  names = {path.removeprefix(f"{root}/"): facts for path, facts in known.items()}
  return {n: f for n, f in names.items() if n.endswith(PARQUET) and wanted.fullmatch(n)}


# ------------------------------ opening ------------------------------


def open_file(path: str) -> Any:
  """Opens a file for reading at any place in it: a binary file, or pyarrow's or fsspec's.

  Raises:
    OSError: it cannot be read; the path is named.
  """
  if path.startswith(_HUB):
    repository, revision, inner = hub_name(path)
    return hub().open(f"datasets/{repository}@{revision}/{inner}", "rb")
  if not files.is_local(path):
    system, inner = bucket(path)
    return system.open_input_file(inner)
  return os.fdopen(files.open_plain(path, os.O_RDONLY, follow=True), "rb")


def open_content(file: InputFile) -> Any:
  """Opens a file for reading from its beginning, decompressed: as what `io.BufferedReader` takes.

  Raises:
    OSError: it cannot be read; also later, while it is read, where its compression is damaged.
  """
  return _Decompressed(file) if file.compression else open_file(file.path)


class _Decompressed(io.RawIOBase):
  """A file, decompressed as it is read."""

  def __init__(self, file: InputFile):
    import pyarrow

    self._file, self._size = file, 0
    self._raw = open_file(file.path)
    self._stream = pyarrow.CompressedInputStream(self._raw, file.compression)

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    """Reads the next bytes; raises as `check_expansion`."""
    block = self._stream.read(len(buffer))
    buffer[: len(block)] = block
    self._size += len(block)
    check_expansion(self._file, self._size, self._raw.tell())
    return len(block)

  def close(self) -> None:
    self._stream.close()
    super().close()


def check_expansion(file: InputFile, content: int, size: int) -> None:
  """Raises ValueError where so few bytes of a file have so much content that it is no corpus.

  Args:
    file: for the message.
    content: bytes after decompression.
    size: bytes that they were read from.
  """
  most = _FREE_BYTES + _MOST_EXPANSION * size
  if content > most:
    raise ValueError(
      f"{file.path}: {size:,} of its {file.size:,} bytes hold more than {most:,} bytes of content,"
      f" over {_MOST_EXPANSION} times as many: no corpus repeats itself so often. If this one is"
      " meant to, write it as .jsonl without compression, and name that"
    )


# ------------------------------ what changes while it is read ------------------------------


def check_unchanged(file: InputFile) -> None:
  """Checks that a file is still what it was when it was listed.

  Raises:
    ChangedError: it is not; with what has changed.
    OSError: a bucket does not answer.
  """
  if file.path.startswith(_HUB):  # read at a commit
    return
  if files.is_local(file.path):
    try:
      now = _look_at(file.path)
    except FileNotFoundError:
      now = None
  else:
    system, inner = bucket(file.path)
    state = system.get_file_info(inner)
    now = InputFile(file.path, state.size, str(state.mtime_ns or 0)) if state.is_file else None
  if now != file:
    _refuse_change([_difference(file, now)], [file.path])


def check_same(spec: str, found: Sequence[InputFile], key: str = "data.files") -> None:
  """Checks that a spec still names the same files, and that each is what it was.

  Args:
    spec: as of `find`.
    found: what that gave.
    key: the config's, for messages.

  Raises:
    ChangedError: with what has changed.
  """
  # What is on the Hub is read at a commit, whatever is added to the data set since.
  spec = ",".join(part for part in parts(spec) if not part.startswith(_HUB))
  before = {file.path: file for file in found if not file.path.startswith(_HUB)}
  if not before:
    return
  try:
    now = {file.path: file for file in _listed(spec, key)}
  except ValueError:  # a part matches nothing any more: which file is gone?
    for file in before.values():
      check_unchanged(file)
    raise
  both = sorted(before.keys() | now.keys())
  changed = [path for path in both if before.get(path) != now.get(path)]
  if changed:
    said = [_difference(before.get(path), now.get(path)) for path in changed]
    _refuse_change(said, changed)


def _difference(before: InputFile | None, now: InputFile | None) -> str:
  """Returns what has become of a file, with the numbers."""
  if now is None:
    return f"{before.path} was there and is gone"
  if before is None:
    return f"{now.path} was added"
  return f"{now.path} had {_state(before)} and now has {_state(now)}"


def _state(file: InputFile) -> str:
  """Returns the size of a file, and when it was changed: replaced, rewritten, or its mode set."""
  ns = max(int(file.stamp), file.ctime)
  moment = datetime.datetime.fromtimestamp(ns // 10**9)
  return f"{file.size:,} bytes of {moment:%Y-%m-%d %H:%M:%S}.{ns % 10**9:09}"


def _refuse_change(said: Sequence[str], paths: Sequence[str]) -> None:
  more = f"; and {len(said) - _LISTED:,} more files" if len(said) > _LISTED else ""
  raise ChangedError(
    f"the files were changed while they were being read: {'; '.join(said[:_LISTED])}{more}; run"
    " again when they are complete, or name a copy that nobody writes to",
    paths,
  )
