"""Documents of text files, in units that processes read independently of one another.

A .txt or .md file is a document, byte by byte (a byte order mark at its beginning is left out); one
that is the whole input is divided into two, of which the second is held out. A line of a .jsonl
file and a row of a Parquet file are records, of which data.text_feature names the text. Blank lines
are no records, and empty text files no documents.

What cannot be a document is yielded with the reason in place of a text; whether it may be left out
is for the reader's caller to decide. That a file cannot be read at all is an error.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etils import epy

from input_pipeline.shard_writer import Item, Place
from input_pipeline.text import files
from runtime.files import is_local

with epy.lazy_imports():  # only Parquet files need it
  import pyarrow
  from pyarrow import parquet, types

# Of a document. The library tokenizers takes 120 bytes of memory for each while it encodes it.
MOST_BYTES = 2**25
BLOCK = 2**20  # bytes read at a time
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}

_TYPES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list"}


def type_name(value: Any) -> str:
  """Returns what JSON calls the type of a value, with an article."""
  return "null" if value is None else _TYPES.get(type(value), "an object")


def unreadable_error(file: files.InputFile, error: OSError) -> ValueError:
  """Returns the error that says that a file cannot be read, and why."""
  return ValueError(f"{file.path} cannot be read ({error.strerror or error})")


def is_damage(file: files.InputFile, error: Exception) -> bool:
  """Returns whether an error says that a file's content is damaged, and not that its disk is."""
  return is_local(file.path) and getattr(error, "errno", None) in (None, errno.EILSEQ)


def not_utf8(error: UnicodeDecodeError, what: str) -> str:
  """Returns where a line, text or file is not valid UTF-8."""
  start = bytes(error.object[:2])
  hint = ""
  if error.start == 0 and start in _OTHER_BOMS:
    hint = f" (it looks like {_OTHER_BOMS[start]}: convert it, for example with iconv)"
  return (
    f"byte {error.start:,} of the {what} is 0x{error.object[error.start]:02x}, invalid UTF-8{hint}"
  )


def too_long() -> str:
  """Returns what is wrong with a document of more than MOST_BYTES."""
  return (
    f"it has more than {MOST_BYTES:,} bytes, the most of a document; split it into several, for"
    " example with `split -C 16M --additional-suffix=.txt FILE PART-`"
  )


# ------------------------------ lines of JSON ------------------------------

BOM = b"\xef\xbb\xbf"
_COMPRESSED_BLOCK = 2**16
_FREE_BLANK = 2**20  # bytes of blank lines, beside as many as the records have
_SAMPLE_BYTES = 2**26  # of which the first records are looked at
_SAMPLE = 32  # records that show which keys there are


def json_records(file: files.InputFile, part: tuple[int, int] | None) -> Iterator[Item]:
  """Yields the objects in the lines that begin in a part of a file."""
  place, number, left = _line_place(file, part), -1, _FREE_BLANK
  try:
    for number, line in enumerate(_lines(file, part)):
      if not line.strip():
        left -= len(line)
        if left < 0:
          raise ValueError(
            f"{place(number)}: up to here blank lines have {_FREE_BLANK:,} bytes more than records;"
            " leave them out, for example with `grep -v '^\\s*$'`"
          )
        continue
      left += len(line)
      value, why = _parse(line)
      yield Item(place, number, value, why)
  except OSError as error:
    if not is_damage(file, error):
      raise
    yield Item(place, number + 1, None, f"the rest of the file cannot be read ({error})")


def _lines(file: files.InputFile, part: tuple[int, int] | None) -> Iterator[bytes]:
  """Yields the lines that begin in [from, to), with their ends."""
  # Not to the end of a file that grows while it is read.
  start, stop = part or (0, math.inf if file.compression else file.size)
  # Where a compressed file is damaged, what was read with the damage is lost.
  block = _COMPRESSED_BLOCK if file.compression else BLOCK
  with files.open_content(file) as raw, io.BufferedReader(raw, block) as stream:
    if start:
      stream.seek(start - 1)
      start += _line(stream, stop - start)[1] - 1  # the rest of a line that began before
    first = not start
    while start < stop:
      line, size = _line(stream, stop - start)
      if not line:
        return
      start += size
      yield line.removeprefix(BOM) if first else line
      first = False


def _line(stream: io.BufferedReader, most: float) -> tuple[bytes, int]:
  """Returns the next line and its size; of one that is too long only its beginning.

  Args:
    stream: the file's.
    most: where a line that is too long has so many bytes, its rest is not read, nor counted.
  """
  line = rest = stream.readline(MOST_BYTES + 1)
  size = len(line)
  while size > MOST_BYTES and rest and not rest.endswith(b"\n") and size <= most:
    rest = stream.readline(BLOCK)
    size += len(rest)
  return line, size


def _line_place(file: files.InputFile, part: tuple[int, int] | None) -> Place:
  """Returns the function from the number of a line in a part to `FILE:LINE`."""

  @functools.cache
  def first():
    if not part or not part[0]:
      return 1
    left, lines = part[0] - 1, 1
    with files.open_file(file.path) as stream:
      while left > 0 and (block := stream.read(min(left, BLOCK))):
        left -= len(block)
        lines += block.count(b"\n")
    return lines + 1  # the line that has byte part[0] - 1 is another part's

  return lambda number: f"{file.path}:{first() + number}"


def _parse(line: bytes) -> tuple[Any, str]:
  """Returns (object, "") of a line, or (None, what is wrong)."""
  if len(line) > MOST_BYTES:
    return None, too_long()
  try:
    value = json.loads(line.rstrip(b"\r\n").decode())
  except UnicodeDecodeError as error:
    return None, not_utf8(error, "line")
  except json.JSONDecodeError as error:
    return None, f"invalid JSON: {error.msg}, at column {error.colno:,}"
  except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deeply
    return None, f"invalid JSON: {error}"
  if isinstance(value, dict):
    return value, ""
  hint = "; a .jsonl file has an object in each line" if isinstance(value, list) else ""
  return None, f"it is {type_name(value)}, not a JSON object{hint}"


def _text_of(record: dict[str, Any], feature: str) -> tuple[bytes | None, str]:
  """Returns (text, "") of a record, or (None, what is wrong)."""
  if feature not in record:
    return None, f"it has no key {feature!r}, only {', '.join(map(repr, record)) or 'none'}"
  value = record[feature]
  try:
    if isinstance(value, bytes):  # of a Parquet file: not checked so far
      value.decode()
    elif isinstance(value, str):
      value = value.encode()
    else:
      return None, f"its {feature!r} is {type_name(value)}, not a string"
  except UnicodeDecodeError as error:
    return None, not_utf8(error, "text")
  except UnicodeEncodeError as error:
    return None, f"its {feature!r} has half a surrogate pair (\\u{ord(value[error.start]):04x})"
  return (None, too_long()) if len(value) > MOST_BYTES else (value, "")


def key_types(file: files.InputFile) -> dict[str, dict[str, str]]:
  """Returns key -> type -> the place of its first value, of the first records that can be read."""
  present: dict[str, dict[str, str]] = {}
  part = (0, min(file.size, _SAMPLE_BYTES)) if not file.compression else (0, _SAMPLE_BYTES)
  for record in itertools.islice(json_records(file, part), _SAMPLE):
    for key, value in (record.value or {}).items():
      kinds, kind = present.setdefault(key, {}), type_name(value)
      if kind not in kinds:
        kinds[kind] = f"line {record.where.rpartition(':')[2]}"
  return present


# ------------------------------ rows of Parquet files ------------------------------

_ROWS = 256  # read at a time
_FREE_ROWS, _MOST_ROWS_PER_BYTE = 2**24, 256  # of a file


def open_table(file: files.InputFile) -> "parquet.ParquetFile":
  """Opens a Parquet file. Raises ValueError, which names it, if that is not possible."""
  try:
    return parquet.ParquetFile(files.open_file(file.path))
  except (pyarrow.ArrowException, OSError) as error:
    if isinstance(error, MemoryError):
      raise
    if isinstance(error, OSError) and not is_damage(file, error):
      raise unreadable_error(file, error) from error
    raise ValueError(f"{file.path} is not a Parquet file, or it is damaged ({error})") from error


def table_rows(
  file: files.InputFile, part: tuple[int, int] | None, feature: str | None
) -> Iterator[Item]:
  """Yields the rows of all row groups, or of a range of them, as objects.

  With a feature, they have that column alone, whose texts are bytes.
  """
  with open_table(file) as table:
    if feature is not None:
      _choose(file, column_types(table), feature)
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    most = _FREE_ROWS + _MOST_ROWS_PER_BYTE * file.size
    if sum(sizes) > most:
      raise ValueError(
        f"{file.path} has {sum(sizes):,} rows in {file.size:,} bytes, by its metadata, and at most"
        f" {most:,} are read: it is damaged, or repeats a few values; write it again"
      )
    content = 0
    start, stop = part or (0, len(sizes))
    columns = None if feature is None else [feature]
    place = functools.partial("{}, row {}".format, file.path)
    for group in range(start, stop):
      first, done = sum(sizes[:group]), 0
      try:
        for batch in table.iter_batches(_ROWS, [group], columns, use_threads=False):
          content += batch.nbytes
          files.check_expansion(file, content, file.size)
          for row in _rows(batch, feature):
            yield Item(place, first + done, row)
            done += 1
        if done < sizes[group]:
          raise pyarrow.ArrowInvalid(f"it has {done:,} rows, not {sizes[group]:,}")
      except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
          raise
        if isinstance(error, OSError) and not is_damage(file, error):
          raise
        why = f"row group {group} is damaged ({error})"
        yield from (Item(place, first + row, None, why) for row in range(done, sizes[group]))


def _rows(batch: "pyarrow.RecordBatch", feature: str | None) -> Iterable[dict[str, Any]]:
  if feature is None:
    return batch.to_pylist()
  texts = batch.column(0).cast(pyarrow.large_binary())  # pyarrow does not check their UTF-8
  return ({feature: text} for text in texts.to_pylist())


def column_types(table: "parquet.ParquetFile") -> dict[str, dict[str, str]]:
  """Returns column -> {the type of its values, as `type_name` calls it for texts: ""}."""
  return {field.name: {_column_type(field.type): ""} for field in table.schema_arrow}


def _column_type(kind: "pyarrow.DataType") -> str:
  values = kind.value_type if types.is_dictionary(kind) else kind
  if types.is_string(values) or types.is_large_string(values) or types.is_string_view(values):
    return type_name("")
  return str(kind)


# ------------------------------ units ------------------------------

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
    held_out: of one text file, the share of its characters, at its end, that are a document of
      their own, for evaluation; 0: the file is one document.
  """

  files: tuple[files.InputFile, ...]
  range: tuple[int, int] | None
  size: int
  held_out: float = 0.0

  @functools.cached_property
  def id(self) -> str:
    """A digest of what the unit is made of: paths, sizes, stamps and range."""
    facts = [*([f.path, f.size, f.stamp] for f in self.files), self.range]
    facts += [self.held_out] * bool(self.held_out)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

  @property
  def name(self) -> str:
    """What is read, in a few words for messages."""
    if len(self.files) > 1:
      return f"{self.files[0].path} and {len(self.files) - 1:,} more files"
    what = {files.PARQUET: "row groups"}.get(self.files[0].suffix, "bytes")
    part = f", {what} {self.range[0]:,} to {self.range[1] - 1:,}" if self.range else ""
    return f"{self.files[0].path}{part}"


def units(
  found: Sequence[files.InputFile], unit_bytes: int = UNIT_BYTES, held_out: float = 0.0
) -> list[Unit]:
  """Returns the units of some files: parts of large files, and several small text files together.

  Args:
    found: the files, in the order in which their documents count.
    unit_bytes: about how large a unit is. What is compressed, and a row group, is not cut.
    held_out: see `Unit`, where the input is one text file; otherwise it has no effect.

  Raises:
    ValueError: a Parquet file cannot be read.
  """
  if held_out and len(found) == 1 and found[0].suffix in files.TEXT:
    return [Unit((*found,), None, found[0].size, held_out)]
  made: list[Unit] = []
  for are_texts, group in itertools.groupby(found, lambda file: file.suffix in files.TEXT):
    if are_texts:
      made += _together(group, unit_bytes)
    else:
      made += (part for file in group for part in _parts(file, unit_bytes))
  return made


def _together(texts: Iterable[files.InputFile], unit_bytes: int) -> Iterator[Unit]:
  """Yields the units of text files, several in each."""
  gathered: list[files.InputFile] = []
  size = 0
  for file in texts:
    if gathered and (len(gathered) == _MOST_FILES or size + file.size > unit_bytes):
      yield Unit((*gathered,), None, size)
      gathered, size = [], 0
    gathered.append(file)
    size += file.size
  yield Unit((*gathered,), None, size)


def _parts(file: files.InputFile, unit_bytes: int) -> Iterator[Unit]:
  if file.size <= unit_bytes or file.compression:
    yield Unit((file,), None, file.size)
  elif file.suffix == files.PARQUET:
    with open_table(file) as table:
      groups = range(table.num_row_groups)
      sizes = [table.metadata.row_group(group).total_byte_size for group in groups]
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


def read(unit: Unit, feature: str) -> Iterator[Item]:
  """Yields the documents of a unit in their order.

  Args:
    unit: what to read.
    feature: the key or column that has the text; text files have none.

  Raises:
    ValueError: a file cannot be read, has changed since the unit was made, or has no such column.
  """
  for file in unit.files:
    if file.suffix in files.TEXT:
      yield from _checked(file, _text(file, unit.held_out))
    else:
      yield from _checked(file, _texts(file, unit.range, feature))


def _texts(file: files.InputFile, part: tuple[int, int] | None, feature: str) -> Iterator[Item]:
  for record in _records(file, part, feature):
    if record.value is not None:
      record.value, record.why = _text_of(record.value, feature)
    yield record


def read_records(unit: Unit) -> Iterator[Item]:
  """Yields the records of a unit as objects, for conversations; raises as `read` does."""
  for file in unit.files:
    if file.suffix in files.TEXT:
      raise ValueError(f"{file.path}: records are read from .jsonl and .parquet files only")
    yield from _checked(file, _records(file, unit.range))


def _records(
  file: files.InputFile, part: tuple[int, int] | None, feature: str | None = None
) -> Iterator[Item]:
  if file.suffix == files.PARQUET:
    return table_rows(file, part, feature)
  return json_records(file, part)


def _checked(file: files.InputFile, found: Iterator[Item]) -> Iterator[Item]:
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
    if looks:
      files.check_unchanged(file)
    try:
      yield
    except Exception:  # whatever it is, a change of the file explains it
      files.check_unchanged(file)
      raise
    if looks:
      files.check_unchanged(file)
  except OSError as error:
    raise unreadable_error(file, error) from error


def _text(file: files.InputFile, held_out: float) -> Iterator[Item]:
  """Yields the document of a text file, or the two that it is divided into; no empty one."""
  content, why, line = b"", "", 0
  try:
    with files.open_content(file) as raw, io.BufferedReader(raw) as stream:
      content = stream.read(MOST_BYTES + 1)
  except OSError as error:
    if not is_damage(file, error):
      raise
    why = f"its compression is damaged ({error})"
  else:
    why = too_long() if len(content) > MOST_BYTES else ""
  content, text = content.removeprefix(BOM), ""
  if not why:
    try:
      text = content.decode()
    except UnicodeDecodeError as error:
      why, line = not_utf8(error, "file"), content.count(b"\n", 0, error.start) + 1
  place = (lambda _: f"{file.path}:{line}") if line else (lambda _: file.path)
  if why:
    yield Item(place, 0, None, why)
    return
  cut = int(len(text) * (1 - held_out))
  parts = [text[:cut].encode(), text[cut:].encode()] if held_out else [content]
  yield from (Item(place, number, part) for number, part in enumerate(parts) if part)


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
      if file.suffix == files.PARQUET:
        with open_table(file) as table:
          present = column_types(table)
      else:
        present = key_types(file)
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
