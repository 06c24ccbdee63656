"""A document or a record as it is read: its content, or what is wrong with it, and where it is."""

import errno
from collections.abc import Callable
from typing import Any

from input_pipeline.text import files
from runtime.files import is_local

# Of a document. The library tokenizers takes 120 bytes of memory for each while it encodes it.
MOST_BYTES = 2**25
BLOCK = 2**20  # bytes read at a time
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}

Place = Callable[[int], str]


class Item:
  """A document or a record; or, where it cannot be read, why not.

  Attributes:
    value: of a document its text in UTF-8, as bytes; of a record the object. None if it is bad.
    why: what is wrong with it; "" where nothing is.
  """

  __slots__ = ("_index", "_place", "value", "why")

  def __init__(self, place: Place, index: int, value: Any, why: str = ""):
    self._place, self._index, self.value, self.why = place, index, value, why

  @property
  def text(self) -> bytes | None:
    """The text of a document."""
    return self.value

  @property
  def where(self) -> str:
    """`FILE`, `FILE:LINE` (from 1) or `FILE, row N` (from 0)."""
    return self._place(self._index)


_TYPES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list"}


def type_name(value: Any) -> str:
  """Returns what JSON calls the type of a value, with an article."""
  return "null" if value is None else _TYPES.get(type(value), "an object")


def unreadable(file: files.InputFile, error: OSError) -> ValueError:
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
