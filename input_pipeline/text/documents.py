"""Documents of text files, in units that processes read independently of one another.

A .txt or .md file is a document, byte by byte (a byte order mark at its beginning is left out). A
line of a .jsonl file and a row of a Parquet file are records, of which data.text_feature names the
text. Blank lines are no records, and empty text files no documents.

What cannot be a document is yielded with the reason in place of a text; whether it may be left out
is for the reader's caller to decide. That a file cannot be read at all is an error.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from input_pipeline.text import files, items, json_lines, parquet
from runtime.files import is_local

UNIT_BYTES = 2**26
_MOST_FILES = 4096  # of text files in a unit


@dataclasses.dataclass(frozen=True)
class Unit:
  """A part of the input that one process reads.

  Attributes:
    files: one file, or several text files.
    range: of a .jsonl file the bytes in which its lines begin, of a Parquet file its row groups;
      from (inclusive), to (exclusive). None: whole files.
    size: of the input in bytes, before decompression.
  """

  files: tuple[files.InputFile, ...]
  range: tuple[int, int] | None
  size: int

  @functools.cached_property
  def id(self) -> str:
    """A digest of what the unit is made of: paths, sizes, stamps and range."""
    facts = [*([f.path, f.size, f.stamp] for f in self.files), self.range]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

  @property
  def name(self) -> str:
    """What is read, in a few words for messages."""
    if len(self.files) > 1:
      return f"{self.files[0].path} and {len(self.files) - 1:,} more files"
    what = {files.PARQUET: "row groups"}.get(self.files[0].suffix, "bytes")
    part = f", {what} {self.range[0]:,} to {self.range[1] - 1:,}" if self.range else ""
    return f"{self.files[0].path}{part}"

  def to_json(self) -> dict[str, Any]:
    """Returns what JSON can write, for `from_json`."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: dict[str, Any]) -> "Unit":
    """Returns the unit that `to_json` described."""
    of = tuple(files.InputFile(**file) for file in value["files"])
    return cls(of, tuple(value["range"]) if value["range"] else None, value["size"])


# ------------------------------ units ------------------------------


def units(found: Sequence[files.InputFile], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
  """Returns the units of some files: parts of large files, and several small text files together.

  Args:
    found: the files, in the order in which their documents count.
    unit_bytes: about how large a unit is. What is compressed, and a row group, is not cut.

  Raises:
    ValueError: a Parquet file cannot be read.
  """
  made: list[Unit] = []
  texts: list[files.InputFile] = []
  size = 0

  def finish():
    nonlocal size
    if texts:
      made.append(Unit((*texts,), None, size))
    texts.clear()
    size = 0

  for file in found:
    if file.suffix in files.TEXT:
      if len(texts) == _MOST_FILES or size + file.size > unit_bytes:
        finish()
      texts.append(file)
      size += file.size
    else:
      finish()
      made += _parts(file, unit_bytes)
  finish()
  return made


def _parts(file: files.InputFile, unit_bytes: int) -> Iterator[Unit]:
  if file.size <= unit_bytes or file.compression:
    yield Unit((file,), None, file.size)
  elif file.suffix == files.PARQUET:
    sizes = parquet.row_group_sizes(file)
    scale = file.size / max(sum(sizes), 1)  # their sizes are those before compression
    start = 0
    for stop in range(1, len(sizes) + 1):
      if stop == len(sizes) or sum(sizes[start : stop + 1]) * scale > unit_bytes:
        yield Unit((file,), (start, stop), round(sum(sizes[start:stop]) * scale))
        start = stop
  else:
    for start in range(0, file.size, unit_bytes):
      stop = min(start + unit_bytes, file.size)
      yield Unit((file,), (start, stop), stop - start)


# ------------------------------ reading ------------------------------


def read(unit: Unit, feature: str) -> Iterator[items.Item]:
  """Yields the documents of a unit in their order.

  Args:
    unit: what to read.
    feature: the key or column that has the text; text files have none.

  Raises:
    ValueError: a file cannot be read, has changed since the unit was made, or has no such column.
  """
  for file in unit.files:
    if file.suffix in files.TEXT:
      found = _text(file)
    elif file.suffix == files.PARQUET:
      found = parquet.column(file, unit.range, feature)
    else:
      found = _texts(file, unit.range, feature)
    yield from _checked(file, found)


def _texts(
  file: files.InputFile, part: tuple[int, int] | None, feature: str
) -> Iterator[items.Item]:
  for record in json_lines.records(file, part):
    if record.value is not None:
      record.value, record.why = json_lines.text_of(record.value, feature)
    yield record


def read_records(unit: Unit) -> Iterator[items.Item]:
  """Yields the records of a unit as objects, for conversations; raises as `read` does."""
  for file in unit.files:
    if file.suffix in files.TEXT:
      raise ValueError(f"{file.path}: records are read from .jsonl and .parquet files only")
    table = file.suffix == files.PARQUET
    found = parquet.rows(file, unit.range, None) if table else json_lines.records(file, unit.range)
    yield from _checked(file, found)


def _checked(file: files.InputFile, found: Iterator[items.Item]) -> Iterator[items.Item]:
  """Yields what is read of a file; raises ChangedError where it has changed by then."""
  with _reading(file):
    for item in found:
      if item.why:  # it may be two states of the file, mixed
        files.check_unchanged(file)
      yield item


@contextlib.contextmanager
def _reading(file: files.InputFile) -> Iterator[None]:
  """Checks before and after a file is read that it is what it was, and names it in errors."""
  try:
    # Of small files in a bucket each look is a request; the preparation's end lists them at once.
    looks = is_local(file.path) or file.suffix not in files.TEXT
    version = files.bucket_version(file) if looks else ""
    if is_local(file.path):
      files.check_unchanged(file)
    try:
      yield
    except Exception:  # whatever it is, a change of the file explains it
      files.check_unchanged(file)
      raise
    if looks:
      files.check_unchanged(file)
      files.check_version(file, version)
  except OSError as error:
    raise items.unreadable(file, error) from error


def _text(file: files.InputFile) -> Iterator[items.Item]:
  """Yields the document of a text file; none of an empty one."""
  content, why, line = b"", "", 0
  try:
    with files.open_content(file) as stream:
      content = _bounded(stream)
  except OSError as error:
    if not items.is_damage(file, error):
      raise
    why = f"its compression is damaged ({error})"
  else:
    why = items.too_long() if len(content) > items.MOST_BYTES else ""
  content = content.removeprefix(json_lines.BOM)
  if not why:
    try:
      content.decode()
    except UnicodeDecodeError as error:
      why, line = items.not_utf8(error, "file"), content.count(b"\n", 0, error.start) + 1
  place = (lambda _: f"{file.path}:{line}") if line else (lambda _: file.path)
  if content or why:
    yield items.Item(place, 0, None if why else content, why)


def _bounded(stream) -> bytes:
  blocks, size = [], 0
  while size <= items.MOST_BYTES and (block := stream.read(items.BLOCK)):
    blocks.append(block)
    size += len(block)
  return b"".join(blocks)


# ------------------------------ which key or column has the text ------------------------------


def choose_feature(found: Sequence[files.InputFile], feature: str = "") -> str:
  """Returns the key or column that has the text, after a look at some of the files.

  Args:
    found: the files of a source.
    feature: data.text_feature; "" for the only one that has texts.

  Returns:
    its name; "" if all are text files, which have none.

  Raises:
    ValueError: there is none, there are several, or its values are not all strings; those that
      are present are listed.
  """
  tables = [f for f in found if f.suffix == files.PARQUET or (f.suffix in files.LINES and f.size)]
  if not tables:
    if feature:
      raise ValueError(
        f"data.text_feature={feature}: the files are text files, which have no columns; leave it"
        " empty"
      )
    return ""
  chosen: dict[str, str] = {}  # name -> the first file that has it
  for file in _some(tables):
    with _reading(file):
      present = (
        parquet.types_of(file) if file.suffix == files.PARQUET else json_lines.types_of(file)
      )
    if name := _choose(file, present, feature):
      chosen.setdefault(name, file.path)
  if len(chosen) > 1:
    listing = ", ".join(f"{name!r} in {path}" for name, path in chosen.items())
    raise ValueError(
      f"the files have their texts in different places: {listing}; name one with"
      " data.text_feature, or make a source of each"
    )
  return next(iter(chosen), feature)


def _some(tables: Sequence[files.InputFile]) -> list[files.InputFile]:
  """Returns the first and last of the .jsonl files, and of the Parquet files."""
  kinds = ([f for f in tables if (f.suffix == files.PARQUET) is kind] for kind in (False, True))
  return [file for of_kind in kinds for file in dict.fromkeys([*of_kind[:1], *of_kind[-1:]])]


def _choose(file: files.InputFile, present: dict[str, dict[str, str]], feature: str) -> str:
  """Returns the key of a file that has the text; "" if the file does not show which.

  Args:
    file: for messages.
    present: key -> type of its values -> where the first is.
    feature: the one that is asked for, or "".
  """
  if not present:  # no record, or none that can be read: reading them says what is wrong
    return feature
  listing = ", ".join(f"{key!r} ({' or '.join(sorted(kinds))})" for key, kinds in present.items())
  texts = [key for key, kinds in present.items() if "a string" in kinds]
  if not feature and len(texts) > 1:
    raise ValueError(
      f"{file.path}: several hold texts: {', '.join(map(repr, texts))}; name one with"
      f" data.text_feature={'text' if 'text' in texts else texts[0]}"
    )
  if not feature and not texts:
    raise ValueError(f"{file.path} holds no texts; present are {listing}")
  name = feature or texts[0]
  if name not in present:
    raise ValueError(f"{file.path}: data.text_feature={name!r} is not there; present are {listing}")
  kinds = present[name]
  if name in texts and not kinds.keys() <= {"a string", "null"}:
    found = " and ".join(f"{kind} in {kinds[kind]}" for kind in sorted(kinds))
    raise ValueError(f"{file.path}: {name!r} has mixed types: {found}; write strings")
  if not kinds.keys() <= {"a string", "null"}:
    raise ValueError(f"{file.path}: data.text_feature={name!r} is no text; present are {listing}")
  return name
