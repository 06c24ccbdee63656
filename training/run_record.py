"""What a checkpoint's record says, and what of a run's data may not differ from it on resume."""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from input_pipeline import position
from input_pipeline.ramp import Ramp, until
from runtime import forms
from runtime.forms import ANY, COUNT, NUMBER, SIZE, TEXT, Each, Exactly, Kind, OrNull, is_number
from training.bad_steps import POSITION, RECORD, Rollback, restored_position
from training.checkpointing.integrity import BASE, TEACHER, Verified
from training.metrics import log_lines


def read(checkpoint: Verified) -> dict[str, Any]:
  """Returns the record of a checkpoint, whose form is checked."""
  require_record(checkpoint.record, checkpoint.path)
  return dict(checkpoint.record)


# ------------------------------ the data of finished steps ------------------------------


def require_same_data(
  old: Mapping[str, Any], data: ConfigDict, record: Mapping[str, Any], done: int
) -> None:
  """Checks that the finished steps have taken the rows that the run says now, in the same shapes.

  Args:
    old: the section `data` of the checkpoint's config.
    data: of now.
    record: the checkpoint's.
    done: its step.

  Raises:
    ValueError: rows, stages or ramps differ in a step that is done.
  """
  _require_same_rows(data, record, done)
  _require_same_stages(old, data, record, done)


def _require_same_rows(data: ConfigDict, record: Mapping[str, Any], done: int) -> None:
  """Raises ValueError where data.skip_rows adds or removes rows that the run has passed."""
  old = restored_position(record, Ramp.of(data))
  made = (Rollback.read(values) for values in record.get(RECORD, {}).get("rollbacks", ()))
  new = old.skipping(data.skip_rows, *(rollback.skipped_rows for rollback in made))
  reached = old.reached(done)
  if wrong := position.differing(old.skipped, new.skipped, reached):
    raise ValueError(
      f"data.skip_rows={tuple(data.skip_rows)}: the {done} steps that are done have passed "
      f"the rows up to {reached - 1}, and treated the rows {position.text(wrong)} differently; "
      f"name rows from {reached} on, or start a new run with another --workdir"
    )


def _require_same_stages(
  old: Mapping[str, Any], data: ConfigDict, record: Mapping[str, Any], done: int
) -> None:
  """Raises ValueError where data.stages or a ramp changes a step that is done."""

  def entered(stages: Any) -> list[Any]:
    return json.loads(json.dumps([stage for stage in stages if stage[0] <= done]))

  ours, before = Ramp.of(data), Ramp.of(old)
  sizes = [(phase.step, phase.batch) for phase in restored_position(record, before).phases]
  lengths = [until(ramp.lengths(data.sequence_length), done) for ramp in (before, ours)]
  compared = {
    "stages": [entered(old.get("stages", ())), entered(data.stages)],
    "sequence_length_ramp": lengths,
  }
  if data.batch_size_ramp:  # else there is another size from here on
    compared["batch_size_ramp"] = [until(sizes, done), until(ours.rows, done)]
  for key, (was, now) in compared.items():
    if was != now:
      raise ValueError(
        f"data.{key}: up to step {done}, which is done, it was {was} and is now {now}; change "
        f"stages that begin after step {done}, or start a new run with another --workdir"
      )


# ------------------------------ the form of a record ------------------------------
# Digests show that a record is what was written, not that it is well-formed: another version or a
# person may have written both. A malformed key is refused here by its name, before it causes an
# error far from here.

_NOT_FINITE = ("nan", "inf", "-inf")  # as they are written
_METRIC = Kind("a number", lambda value: is_number(value) or value in _NOT_FINITE)


_SKIPPED = {"skipped_rows": [(COUNT, COUNT)]}
_ELSEWHERE = Exactly({"folder": TEXT, "step": OrNull(COUNT), "dtype": TEXT, "digest": TEXT})

# Keys that are missing or unknown belong to another version.
RECORD_FORM = {
  "versions": Each(TEXT),
  "code_files": Each(TEXT),
  "data": {"name": TEXT, "rows": TEXT},
  "data_report": Each(NUMBER),
  "accepted_changes": [Exactly({"step": COUNT, "key": TEXT, "old": ANY, "new": ANY})],
  "metrics": Each(_METRIC),
  "metrics_over": {"data": TEXT, "examples": COUNT},
  BASE: _ELSEWHERE,
  TEACHER: _ELSEWHERE,
  POSITION: [Exactly({"step": COUNT, "row": COUNT, "batch": SIZE})],
  RECORD: {
    **_SKIPPED,
    "rollbacks": [Exactly({"bad_step": COUNT, "why": TEXT, "step": COUNT, **_SKIPPED})],
    "losses": [NUMBER],
  },
  log_lines.LINES: {"steps": COUNT, "evaluations": COUNT},
}


def require_record(record: Mapping[str, Any], path: epath.Path) -> None:
  """Raises ValueError if a record is malformed, with the keys and the expected and actual values.

  Args:
    record: of a checkpoint.
    path: of the checkpoint.
  """
  if wrong := list(forms.wrong(record, RECORD_FORM)):
    raise ValueError(
      f"{path}: its record is malformed, though its digests match: "
      f"{'; '.join(forms.first(wrong, 8))}; move this step away to start from the one before, or "
      f"give another --workdir"
    )
