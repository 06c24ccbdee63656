"""The lines of `metrics.jsonl`: which are valid, damaged or missing.

A file system, an editor or an interrupted copy may leave anything in the file. A valid line is a
JSON object in UTF-8 with a `step`. A last line that was cut short by a kill is dropped silently:
its step is computed again.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime import files, forms
from runtime.forms import FLAG, NUMBER, STEP, Each, Needs, is_number

FILE = "metrics.jsonl"
TIMES, ROLLED_BACK = "goodput", "rolled_back"  # keys that only one kind of line has
FORM = Needs({"step": STEP}, {ROLLED_BACK: STEP, "skipped_rows": [(STEP, STEP)]})
# A start adds to the numbers of the last line about goodput.
_OF_TIMES = Needs(
  {**FORM.keys, TIMES: NUMBER, "seconds": Each(NUMBER), "time": NUMBER, "done": FLAG}
)
# Of an evaluation: its examples, and their share of the split's.
EXAMPLES, SHARE = "eval_examples", "eval_share"
WHOLE_SPLIT = "the whole split"
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
  form = FORM
  if TIMES in values:
    form = _OF_TIMES if "boot" not in values else Needs({**_OF_TIMES.keys, "uptime": NUMBER})
  for why in forms.wrong(values, form):
    raise ValueError(why)
  return values


def standard_error(metric: str) -> str:
  """Returns the key of a metric's standard error: `eval_loss_stderr/code` of `eval_loss/code`."""
  name, slash, part = metric.partition("/")
  return f"{name}_stderr{slash}{part}"


def examples_text(values: Mapping[str, Any]) -> str:
  """Returns what an evaluation is over: `256 of 2,670 examples`; "" where its line lacks that."""
  if values.get(SHARE) == 1:
    return WHOLE_SPLIT
  try:
    return f"{values[EXAMPLES]:,} of {round(values[EXAMPLES] / values[SHARE]):,} examples"
  except (KeyError, TypeError, ValueError, ArithmeticError):
    return ""


def by_examples(
  lines: Iterable[Mapping[str, Any]], key: str
) -> list[tuple[str, list[Mapping[str, Any]]]]:
  """Returns (what they are over, lines) of the evaluations that have a metric, most lines first.

  Only the first are a curve: the others are estimates from other examples, and a line that joined
  them would show how the examples differ.
  """
  found: dict[str, list[Mapping[str, Any]]] = {}
  for values in lines:
    if is_number(values.get(key)):
      found.setdefault(examples_text(values), []).append(values)
  return sorted(found.items(), key=lambda item: -len(item[1]))


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
