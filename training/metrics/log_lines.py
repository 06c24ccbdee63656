"""The lines of `metrics.jsonl`: which are valid, damaged or missing.

A file system, an editor or an interrupted copy may leave anything in the file. A valid line is a
JSON object in UTF-8 with a `step`. A last line that was cut short by a kill is dropped silently:
its step is computed again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime import files

FILE = "metrics.jsonl"
TIMES, ROLLED_BACK = "goodput", "rolled_back"  # keys that only one kind of line has
_BEGINS = b'{"step": '  # every line that is written


@dataclasses.dataclass(frozen=True)
class Line:
  """A valid line.

  Attributes:
    raw: its bytes, with the line break.
    values: its JSON object.
  """

  raw: bytes
  values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Damaged:
  """A line that is not valid.

  Attributes:
    number: of the line, counted from 1.
    raw: its bytes, with a line break.
    why: what is wrong with it.
  """

  number: int
  raw: bytes
  why: str


def made(values: Mapping[str, Any]) -> Line:
  """Returns the line with these values."""
  return Line(files.json_text(values).encode() + b"\n", values)


def split(content: bytes) -> tuple[list[Line], list[Damaged]]:
  """Returns the valid lines and the damaged ones of a file, each in their order."""
  sound, damaged = [], []
  *whole, rest = content.split(b"\n")
  for number, raw in enumerate([*whole, *([rest] if rest else [])], 1):
    try:
      sound.append(Line(raw + b"\n", _values(raw)))
    except ValueError as error:
      if number <= len(whole) or not _torn(raw):
        damaged.append(Damaged(number, raw + b"\n", str(error)))
  return sound, damaged


def _torn(rest: bytes) -> bool:
  """Returns whether what follows the last line break is a line that a kill cut short."""
  begins = rest.startswith(_BEGINS) or _BEGINS.startswith(rest)
  return begins and rest.isascii() and b"\0" not in rest


def _values(raw: bytes) -> dict[str, Any]:
  """Returns the values of a line.

  Raises:
    ValueError: it is damaged; with what is wrong, in a few words.
  """
  if not raw.strip():
    raise ValueError("it is empty")
  try:
    values = files.parse_json(raw)
  except UnicodeDecodeError:
    raise ValueError("it is not text") from None
  except ValueError as error:
    raise ValueError(f"it is not JSON: {error}") from None
  if not isinstance(values, dict):
    raise ValueError("it is not a JSON object")
  if not _is_count(values.get("step")):
    raise ValueError("it has no step" if "step" not in values else "its step is not an integer")
  if TIMES in values and (why := _wrong_times(values)):
    raise ValueError(why)
  return values


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  return number and math.isfinite(value)


def _wrong_times(values: Mapping[str, Any]) -> str:
  """Returns what is wrong with a line about goodput; a start adds to its numbers."""
  seconds = values.get("seconds")
  if not isinstance(seconds, dict) or not all(map(_is_number, seconds.values())):
    return "its seconds are no numbers by name"
  if not _is_number(values.get("time")) or not isinstance(values.get("done"), bool):
    return "its time or done is missing or malformed"
  if "boot" in values and not _is_number(values.get("uptime")):
    return "its uptime is no number"
  return ""


def until(lines: Sequence[Line], step: int, rollbacks: int = 0) -> list[Line]:
  """Returns the lines up to a step.

  Of lines about rollbacks, the first `rollbacks` are returned, whatever their step.
  """
  kept = []
  for line in lines:
    if ROLLED_BACK in line.values:
      rollbacks -= 1
      if rollbacks >= 0:
        kept.append(line)
    elif line.values["step"] <= step:
      kept.append(line)
  return kept
