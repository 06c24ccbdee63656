"""Records in lines of JSON (.jsonl): an object in each; a file may be read in parts."""

import functools
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

from input_pipeline.text import files, items

BOM = b"\xef\xbb\xbf"
_COMPRESSED_BLOCK = 2**16  # where a file is damaged, what was read with the damage is lost
_FREE_BLANK = 2**20  # bytes of blank lines, beside as many as the records have
_SAMPLE_BYTES = 2**26  # of which the first records are looked at
_SAMPLE = 32  # records that show which keys there are


def records(file: files.InputFile, part: tuple[int, int] | None) -> Iterator[items.Item]:
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
      yield items.Item(place, number, value, why)
  except OSError as error:
    if not items.is_damage(file, error):
      raise
    yield items.Item(place, number + 1, None, f"the rest of the file cannot be read ({error})")


def _lines(file: files.InputFile, part: tuple[int, int] | None) -> Iterator[bytes]:
  """Yields the lines that begin in [from, to), with their ends."""
  # Not to the end of a file that grows while it is read.
  start, stop = part or (0, None if file.compression else file.size)
  block = _COMPRESSED_BLOCK if file.compression else items.BLOCK
  with files.open_content(file) as raw, io.BufferedReader(_Readable(raw), block) as stream:
    if start:
      raw.seek(start - 1)
      start += _line(stream, stop - start)[1] - 1  # the rest of a line that began before
    first = True
    while stop is None or start < stop:
      line, size = _line(stream, None if stop is None else stop - start)
      if not line:
        return
      start += size
      yield line.removeprefix(BOM) if first and not (part and part[0]) else line
      first = False


class _Readable(io.RawIOBase):
  """What BufferedReader needs of a stream, whatever library it is of."""

  def __init__(self, stream):
    self._stream = stream

  def readable(self):
    return True

  def readinto(self, buffer):
    block = self._stream.read(len(buffer))
    buffer[: len(block)] = block
    return len(block)


def _line(stream, most: int | None) -> tuple[bytes, int]:
  """Returns the next line and its size; of one that is too long only its beginning.

  Args:
    stream: the file's.
    most: where a line that is too long has so many bytes, its rest is not read, nor counted.
  """
  line = stream.readline(items.MOST_BYTES + 1)
  size = len(line)
  if size > items.MOST_BYTES:
    rest = line
    while rest and not rest.endswith(b"\n") and (most is None or size <= most):
      rest = stream.readline(items.BLOCK)
      size += len(rest)
  return line, size


def _line_place(file: files.InputFile, part: tuple[int, int] | None) -> items.Place:
  """Returns the function from the number of a line in a part to `FILE:LINE`."""

  @functools.cache
  def first():
    if not part or not part[0]:
      return 1
    left, lines = part[0] - 1, 1
    with files.open_file(file.path) as stream:
      while left > 0 and (block := stream.read(min(left, items.BLOCK))):
        left -= len(block)
        lines += block.count(b"\n")
    return lines + 1  # the line that has byte part[0] - 1 is another part's

  return lambda number: f"{file.path}:{first() + number}"


def _parse(line: bytes) -> tuple[Any, str]:
  """Returns (object, "") of a line, or (None, what is wrong)."""
  if len(line) > items.MOST_BYTES:
    return None, items.too_long()
  try:
    value = json.loads(line.rstrip(b"\r\n").decode())
  except UnicodeDecodeError as error:
    return None, items.not_utf8(error, "line")
  except json.JSONDecodeError as error:
    return None, f"invalid JSON: {error.msg}, at column {error.colno:,}"
  except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deeply
    return None, f"invalid JSON: {error}"
  if isinstance(value, dict):
    return value, ""
  hint = "; a .jsonl file has an object in each line" if isinstance(value, list) else ""
  return None, f"it is {items.type_name(value)}, not a JSON object{hint}"


def text_of(record: dict[str, Any], feature: str) -> tuple[bytes | None, str]:
  """Returns (text, "") of a record, or (None, what is wrong)."""
  if feature not in record:
    return None, f"it has no key {feature!r}, only {', '.join(map(repr, record)) or 'none'}"
  value = record[feature]
  if not isinstance(value, str):
    return None, f"its {feature!r} is {items.type_name(value)}, not a string"
  try:
    return value.encode(), ""
  except UnicodeEncodeError as error:
    return None, f"its {feature!r} has half a surrogate pair (\\u{ord(value[error.start]):04x})"


def types_of(file: files.InputFile) -> dict[str, dict[str, str]]:
  """Returns key -> type -> the place of its first value, of the first records that can be read."""
  present: dict[str, dict[str, str]] = {}
  part = (0, min(file.size, _SAMPLE_BYTES)) if not file.compression else (0, _SAMPLE_BYTES)
  for record in itertools.islice(records(file, part), _SAMPLE):
    for key, value in (record.value or {}).items():
      kinds, kind = present.setdefault(key, {}), items.type_name(value)
      if kind not in kinds:
        kinds[kind] = f"line {record.where.rpartition(':')[2]}"
  return present
