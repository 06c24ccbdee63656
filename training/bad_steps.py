"""Bad steps (loss spikes, NaNs): detection, which rows are skipped, and the step to roll back to.

All decisions follow from the metrics, which are the same on every process, and from the record of
the checkpoint that a run resumes from: so a killed and resumed run decides like an uninterrupted
one.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from input_pipeline import position
from input_pipeline.position import Position, Ranges
from input_pipeline.ramp import Ramp

# Of a checkpoint's record.
RECORD, POSITION = "bad_steps", "position"


@dataclasses.dataclass(frozen=True)
class Rollback:
  """One rollback of a run.

  Attributes:
    bad_step: the step with the bad numbers, counted from 1.
    why: what was bad.
    step: the restored step; 0 is the initial state.
    skipped_rows: the rows that are skipped for it.
  """

  bad_step: int
  why: str
  step: int
  skipped_rows: Ranges

  @classmethod
  def read(cls, values: Mapping[str, Any]) -> "Rollback":
    """Returns what `asdict` has written, as JSON gives it back."""
    return cls(**{**values, "skipped_rows": position.merged(values["skipped_rows"])})

  def asdict(self) -> dict[str, Any]:
    """Returns it as JSON has it."""
    return {**vars(self), "skipped_rows": [list(rows) for rows in self.skipped_rows]}

  def line(self) -> dict[str, Any]:
    """Returns its line in `metrics.jsonl`, without the restored step."""
    rows = self.asdict()["skipped_rows"]
    return {"rolled_back": self.bad_step, "why": self.why, "skipped_rows": rows}


class BadSteps:
  """Detects bad steps, and tracks which rows steps take.

  Attributes:
    rollbacks: of the run, over all its starts.
    position: the rows that each step takes, and the skipped ones.
  """

  def __init__(
    self, training: ConfigDict, data: ConfigDict, record: Mapping[str, Any], done: int = 0
  ):
    """Takes over the record of the checkpoint that the run resumes from.

    Args:
      training: the section of the config.
      data: likewise.
      record: the checkpoint's; {} without one.
      done: its step.
    """
    self._keys, self._data = training, data
    self.rollbacks = tuple(map(Rollback.read, record.get(RECORD, {}).get("rollbacks", ())))
    self.position, self._losses = self._restored(record, done)

  def _restored(
    self, record: Mapping[str, Any], done: int
  ) -> tuple[Position, collections.deque[float]]:
    """Returns the position and the newest losses at a checkpoint."""
    ramp = Ramp.of(self._data)
    later = [stage for stage in ramp.rows if stage[0] > done]
    restored = (
      restored_position(record, ramp)
      .resumed(done, ramp.shape(done).rows, later)
      .skipping(self._data.skip_rows, *(rollback.skipped_rows for rollback in self.rollbacks))
    )
    losses = record.get(RECORD, {}).get("losses", ())
    return restored, collections.deque(losses, maxlen=self._keys.bad_step_window)

  def record(self) -> dict[str, Any]:
    """Returns its part of a checkpoint's record; JSON restores floats to the last bit."""
    known = {
      "skipped_rows": [list(rows) for rows in self.position.skipped],
      "rollbacks": [rollback.asdict() for rollback in self.rollbacks],
      "losses": list(self._losses),
    }
    return {RECORD: known, POSITION: self.position.listed()}

  # ------------------------------ checking ------------------------------

  def check(self, values: Mapping[str, float]) -> str:
    """Returns what is wrong with a step's metrics; "" if nothing is, and its loss is remembered."""
    why = not_finite(values) or self._too_large(values["loss"])
    if not why and self._keys.bad_step_deviations:
      self._losses.append(values["loss"])
    return why

  def _too_large(self, loss: float) -> str:
    """Checks once the window is full; `fsum` is exact to the last bit."""
    known, most = self._losses, self._keys.bad_step_deviations
    if not most or len(known) < self._keys.bad_step_window:
      return ""
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
    if loss - mean <= most * deviation:
      return ""
    return (
      f"loss is {loss:.6g}, more than training.bad_step_deviations={most:g} standard deviations "
      f"({deviation:.3g}) above {mean:.6g}, the mean of the last {len(known)}"
    )

  # ------------------------------ rollback ------------------------------

  def refusal(self) -> str:
    """Returns why the run may not roll back again, or how to allow it; "" if it may."""
    if self._keys.on_bad_step != "roll_back":
      return "training.on_bad_step=roll_back restores an earlier step and skips the batch"
    if len(self.rollbacks) < self._keys.max_rollbacks:
      return ""
    return (
      f"it was rolled back {len(self.rollbacks)} times (training.max_rollbacks="
      f"{self._keys.max_rollbacks}), and skipped the rows {position.text(self.position.skipped)}"
    )

  def target(self, bad_step: int, saved: Sequence[int]) -> int:
    """Returns the step to roll back to: the newest before the batches to skip; 0: none is saved.

    `saved` are the steps before the bad one.

    If the newest one leads to a bad step for the second time, and no later than before, it was
    saved after the cause: then an older one is chosen, or the oldest if none is old enough.
    """
    if not saved:
      return 0
    end = saved[-1] if self._suspect(bad_step, saved) else bad_step
    fitting = [step for step in saved if step <= end - self._keys.bad_step_skips]
    return fitting[-1] if fitting else saved[0]

  def _suspect(self, bad_step: int, saved: Sequence[int]) -> bool:
    last = self.rollbacks[-1] if self.rollbacks else None
    return last is not None and last.step == saved[-1] and bad_step <= last.bad_step

  def roll_back(
    self, bad_step: int, why: str, step: int, saved: Sequence[int], record: Mapping[str, Any]
  ) -> Rollback:
    """Records a rollback, and returns it.

    Args:
      bad_step: the bad step.
      why: what was bad.
      step: the restored step; 0 is the initial state.
      saved: the steps before the bad one that are saved.
      record: that of the restored one.
    """
    ends = [bad_step]
    if saved and self._suspect(bad_step, saved):
      ends.append(saved[-1])  # the steps up to its save are skipped as well
    steps = {s for end in ends for s in range(end - self._keys.bad_step_skips, end) if s >= step}
    rows = position.merged(rows for s in steps for rows in self.position.rows(s))
    rollback = Rollback(bad_step, why, step, rows)
    self.rollbacks += (rollback,)
    self.position, self._losses = self._restored(record, step)
    return rollback

  def text(self) -> str:
    """Returns a line about the last rollback."""
    last, count = self.rollbacks[-1], len(self.rollbacks)
    where = f"the checkpoint of step {last.step}" if last.step else "the initial state"
    return (
      f"WARNING: step {last.bad_step}: {last.why}; rolled back to {where}, skipping the rows "
      f"{position.text(last.skipped_rows)} (rollback {count} of at most {self._keys.max_rollbacks})"
    )


def restored_position(record: Mapping[str, Any], ramp: Ramp) -> Position:
  """Returns the position in a record; that of a new run if the record is {}."""
  if POSITION not in record:
    return Position.of(ramp.rows)
  return Position.read(record[POSITION], record.get(RECORD, {}).get("skipped_rows", ()))


class TrainingStoppedError(RuntimeError):
  """The run cannot continue; the message names the step. Exit code 1."""


class BadStepError(TrainingStoppedError):
  """A step has bad numbers; if the run cannot roll back, it stops.

  Attributes:
    step: its number, counted from 1.
    why: what is bad.
  """

  def __init__(self, step: int, why: str, more: str = ""):
    """Builds the message with the fix; `more` is about rolling back."""
    self.step, self.why = step, why
    text = f"step {step}: {why}; training stops. A smaller optimizer.learning_rate or a longer "
    text += f"optimizer.warmup_steps may help; `replay --step={step}` looks for its cause"
    super().__init__(f"{text}{more and '; '}{more}")


def not_finite(values: Mapping[str, float]) -> str:
  """Returns what is wrong with a step's metrics; "" where they are finite."""
  if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
    return ""
  return ", ".join(f"{name} is {values[name]}" for name in ("loss", "grad_norm"))
