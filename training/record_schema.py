"""The schema of a checkpoint's record.

Digests show that a record is what was written, not that it is well-formed: another version or a
person may have written both. A malformed key is refused here by its name, before it causes an error
far from here.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from training import bad_steps, base_parameters
from training.metrics import log_schedule

_NAMED = 8  # so many keys are named in a message
_LONGEST = 60  # characters of a value in it


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of value: what it is called, and how it is recognized."""

  name: str
  fits: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Each:
  """An object whose values, by any name, all have one form."""

  form: Any


@dataclasses.dataclass(frozen=True)
class Exactly:
  """An object with these keys and no others."""

  keys: Mapping[str, Any]


def _is_whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TEXT = Kind("a text", lambda value: isinstance(value, str))
COUNT = Kind("an integer", _is_whole)
NUMBER = Kind("a number", _is_number)
_NOT_FINITE = ("nan", "inf", "-inf")  # as they are written
METRIC = Kind("a number", lambda value: _is_number(value) or value in _NOT_FINITE)
ANY = Kind("anything", lambda value: True)


def _is_position(value: Any) -> bool:
  keys = {"step", "row", "batch"}
  if not isinstance(value, list) or not value:
    return False
  if not all(isinstance(one, dict) and set(one) == keys for one in value):
    return False
  if not all(map(_is_whole, (number for one in value for number in one.values()))):
    return False
  steps = [one["step"] for one in value]
  return steps[0] == 0 and steps == sorted({*steps}) and all(one["batch"] > 0 for one in value)


def _is_range(value: Any) -> bool:
  if not isinstance(value, list) or len(value) != 2:
    return False
  return all(map(_is_whole, value)) and value[0] < value[1]


STEP = Kind("an integer or null", lambda value: value is None or _is_whole(value))
POSITION = Kind("a list of step, row and batch, ascending from step 0,", _is_position)
ROWS = Kind("a range of rows", _is_range)


def _bad_steps(skipped: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the form of what a record says of bad steps; `skipped` is the part that has changed."""
  one = {"bad_step": COUNT, "why": TEXT, "step": COUNT, **skipped}
  return {**skipped, "rollbacks": [Exactly(one)], "losses": [NUMBER]}


# A list with one form holds any number of such values; a tuple holds one of each form.
# Of an object, keys that are missing or unknown belong to another version.
FORM = {
  "versions": Each(TEXT),
  "data": {"name": TEXT, "rows": TEXT},
  "data_report": Each(NUMBER),
  "accepted_changes": [Exactly({"step": COUNT, "key": TEXT, "old": ANY, "new": ANY})],
  "metrics": Each(METRIC),
  "metrics_over": {"data": TEXT, "examples": COUNT},
  base_parameters.RECORD: Exactly({"folder": TEXT, "step": STEP, "dtype": TEXT, "digest": TEXT}),
  bad_steps.POSITION: POSITION,
  bad_steps.RECORD: _bad_steps({"skipped_rows": [ROWS]}),
  log_schedule.RECORD: [(COUNT, COUNT, COUNT)],
}
# Records without a position are of versions that named batches.
_OLDER = {**FORM, bad_steps.RECORD: _bad_steps({"skipped": [COUNT]})}


def require(record: Mapping[str, Any], path: epath.Path) -> None:
  """Raises ValueError if a record is malformed, with the keys and the expected and actual values.

  Args:
    record: of a checkpoint.
    path: of the checkpoint.
  """
  wrong = list(_wrong(record, FORM if bad_steps.POSITION in record else _OLDER, ""))
  if wrong:
    more = [f"and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
    keys = "; ".join([*wrong[:_NAMED], *more])
    raise ValueError(
      f"{path}: its record is malformed, though its digests match: {keys}; move this step away to "
      f"start from the one before, or give another --workdir"
    )


def _wrong(value: Any, form: Any, name: str) -> Iterator[str]:
  """Yields a text for each part of a value that has not its form."""
  if isinstance(form, Kind):
    if not form.fits(value):
      yield f"{name}: {form.name} is expected, and {_shown(value)} is there"
  elif isinstance(form, list | tuple):
    if not isinstance(value, list) or (isinstance(form, tuple) and len(value) != len(form)):
      what = f"a list of {len(form)}" if isinstance(form, tuple) else "a list"
      yield f"{name}: {what} is expected, and {_shown(value)} is there"
      return
    forms = form if isinstance(form, tuple) else form * len(value)
    for index, (inner, its_form) in enumerate(zip(value, forms, strict=True)):
      yield from _wrong(inner, its_form, f"{name}[{index}]")
  elif not isinstance(value, dict):
    yield f"{name}: an object is expected, and {_shown(value)} is there"
  else:
    yield from _wrong_keys(value, form, name)


def _wrong_keys(value: Mapping[str, Any], form: Any, name: str) -> Iterator[str]:
  if isinstance(form, Exactly) and set(value) != set(form.keys):
    keys = ", ".join(form.keys)
    yield f"{name}: the keys {keys} are expected, and {', '.join(value) or 'none'} are there"
  forms = form.keys if isinstance(form, Exactly) else form
  for key, inner in value.items():
    its_form = form.form if isinstance(form, Each) else forms.get(key, ANY)
    yield from _wrong(inner, its_form, f"{name}.{key}" if name else key)


def _shown(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
