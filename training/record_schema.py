"""The schema of a checkpoint's record.

Digests show that a record is what was written, not that it is well-formed: another version or a
person may have written both. A malformed key is refused here by its name, before it causes an error
far from here.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath

from runtime import forms
from runtime.forms import ANY, COUNT, NUMBER, TEXT, Each, Exactly, Kind, OrNull, is_number, is_whole
from training import bad_steps, base_parameters
from training.metrics import log_lines

_NOT_FINITE = ("nan", "inf", "-inf")  # as they are written
METRIC = Kind("a number", lambda value: is_number(value) or value in _NOT_FINITE)


def _is_position(value: Any) -> bool:
  keys = {"step", "row", "batch"}
  if not isinstance(value, list) or not value:
    return False
  if not all(isinstance(one, dict) and set(one) == keys for one in value):
    return False
  if not all(map(is_whole, (number for one in value for number in one.values()))):
    return False
  steps = [one["step"] for one in value]
  return steps[0] == 0 and steps == sorted({*steps}) and all(one["batch"] > 0 for one in value)


def _is_range(value: Any) -> bool:
  if not isinstance(value, list) or len(value) != 2:
    return False
  return all(map(is_whole, value)) and value[0] < value[1]


POSITION = Kind("a list of step, row and batch, ascending from step 0,", _is_position)
SKIPPED = {"skipped_rows": [Kind("a range of rows", _is_range)]}

# Keys that are missing or unknown belong to another version.
FORM = {
  "versions": Each(TEXT),
  "code_files": Each(TEXT),
  "data": {"name": TEXT, "rows": TEXT},
  "data_report": Each(NUMBER),
  "accepted_changes": [Exactly({"step": COUNT, "key": TEXT, "old": ANY, "new": ANY})],
  "metrics": Each(METRIC),
  "metrics_over": {"data": TEXT, "examples": COUNT},
  base_parameters.RECORD: Exactly(
    {"folder": TEXT, "step": OrNull(COUNT), "dtype": TEXT, "digest": TEXT}
  ),
  bad_steps.POSITION: POSITION,
  bad_steps.RECORD: {
    **SKIPPED,
    "rollbacks": [Exactly({"bad_step": COUNT, "why": TEXT, "step": COUNT, **SKIPPED})],
    "losses": [NUMBER],
  },
  log_lines.SCHEDULES: [(COUNT, COUNT, COUNT)],
}


def require(record: Mapping[str, Any], path: epath.Path) -> None:
  """Raises ValueError if a record is malformed, with the keys and the expected and actual values.

  Args:
    record: of a checkpoint.
    path: of the checkpoint.
  """
  if wrong := list(forms.wrong(record, FORM)):
    raise ValueError(
      f"{path}: its record is malformed, though its digests match: "
      f"{'; '.join(forms.first(wrong, 8))}; move this step away to start from the one before, or "
      f"give another --workdir"
    )
