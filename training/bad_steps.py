"""Steps with bad numbers: which are bad, which rows are skipped for them, and where to go back.

What is decided here follows from the metrics, which are the same on every process, and from the
record of the checkpoint that a start resumes from: so a run that is killed decides as one that is
not.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from input_pipeline import position
from input_pipeline.position import Position, Ranges
from training.tasks import TASKS

# Of a checkpoint's record.
RECORD, POSITION = "bad_steps", "position"


@dataclasses.dataclass(frozen=True)
class Rollback:
  """One time that a run went back.

  Attributes:
    bad_step: the step with the bad numbers, counted from 1.
    why: what was bad.
    step: the step that it went back to; 0 is the first state.
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
    """Returns what `metrics.jsonl` says of it besides the step that it went back to."""
    rows = self.asdict()["skipped_rows"]
    return {"rolled_back": self.bad_step, "why": self.why, "skipped_rows": rows}


class BadSteps:
  """Judges steps, and knows which rows they take.

  Attributes:
    rollbacks: those that the run has made, over all its starts.
    position: which rows each step takes, and which are skipped.
  """

  def __init__(self, config: ConfigDict, record: Mapping[str, Any], done: int = 0):
    """Takes over the record of the checkpoint that the run resumes from.

    Args:
      config: of the run.
      record: the checkpoint's, as `upgraded` gives it; {} without one.
      done: its step.
    """
    self._config, self._keys = config, config.training
    self.rollbacks = tuple(map(Rollback.read, record.get(RECORD, {}).get("rollbacks", ())))
    self.position, self._losses = self._restored(record, done)

  def _restored(
    self, record: Mapping[str, Any], done: int
  ) -> tuple[Position, collections.deque[float]]:
    """Returns the position and the newest losses at a checkpoint."""
    batch = self._config.data.global_batch_size
    restored = (
      _position(record, batch)
      .resumed(done, batch)
      .skipping(
        self._config.data.skip_rows, *(rollback.skipped_rows for rollback in self.rollbacks)
      )
    )
    losses = record.get(RECORD, {}).get("losses", ())
    return restored, collections.deque(losses, maxlen=self._keys.bad_step_window)

  def record(self) -> dict[str, Any]:
    """Returns what a checkpoint says of it; JSON gives floats back to the last bit."""
    known = {
      "skipped_rows": [list(rows) for rows in self.position.skipped],
      "rollbacks": [rollback.asdict() for rollback in self.rollbacks],
      "losses": list(self._losses),
    }
    return {RECORD: known, POSITION: self.position.listed()}

  # ------------------------------ checking ------------------------------

  def check(self, values: Mapping[str, float]) -> str:
    """Returns what is wrong with a step's metrics; "" where nothing is, and its loss is kept."""
    why = not_finite(values) or self._too_large(values["loss"])
    if not why and self._keys.bad_step_deviations:
      self._losses.append(values["loss"])
    return why

  def _too_large(self, loss: float) -> str:
    """Checks once the window is full; sums by `fsum`, which are right to the last bit."""
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

  # ------------------------------ going back ------------------------------

  def refusal(self) -> str:
    """Returns why the run may not go back once more, or how it might; "" where it may."""
    if self._keys.on_bad_step != "roll_back":
      return "training.on_bad_step=roll_back goes back and skips the batch"
    if len(self.rollbacks) < self._keys.max_rollbacks:
      return ""
    return (
      f"it went back {len(self.rollbacks)} times (training.max_rollbacks="
      f"{self._keys.max_rollbacks}), and skipped the rows {position.text(self.position.skipped)}"
    )

  def target(self, bad_step: int, saved: Sequence[int]) -> int:
    """Returns the step to go back to: the newest before the batches to skip; 0: none is saved.

    `saved` are the steps before the bad one.

    Where the newest has led to a bad step for the second time, and no later than before, it was
    saved after something bad: then it is an older one. If none is old enough, it is the oldest.
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
    """Notes a rollback, and returns it.

    Args:
      bad_step: that was bad.
      why: what was bad.
      step: that was restored; 0 is the first state.
      saved: the steps before the bad one that were saved until now.
      record: that of the restored one.
    """
    ends = [bad_step]
    if saved and self._suspect(bad_step, saved):
      ends.append(saved[-1])  # what it was saved after is skipped as well
    steps = {s for end in ends for s in range(end - self._keys.bad_step_skips, end) if s >= step}
    rows = position.merged(rows for s in steps for rows in self.position.rows(s))
    rollback = Rollback(bad_step, why, step, rows)
    self.rollbacks += (rollback,)
    self.position, self._losses = self._restored(record, step)
    return rollback

  def text(self) -> str:
    """Returns a line about the last rollback."""
    last, count = self.rollbacks[-1], len(self.rollbacks)
    where = f"the checkpoint of step {last.step}" if last.step else "the first state"
    return (
      f"WARNING: step {last.bad_step}: {last.why}; back to {where}, without the rows "
      f"{position.text(last.skipped_rows)} (rollback {count} of at most {self._keys.max_rollbacks})"
    )


def require_same_past(config: ConfigDict, record: Mapping[str, Any], done: int) -> None:
  """Finds out whether the steps of a checkpoint have skipped what the run is to skip now.

  Args:
    config: of now.
    record: the checkpoint's, as `upgraded` gives it.
    done: its step.

  Raises:
    ValueError: data.skip_rows adds or takes away rows that the run has passed.
  """
  old = _position(record, config.data.global_batch_size)
  made = (Rollback.read(values) for values in record.get(RECORD, {}).get("rollbacks", ()))
  new = old.skipping(config.data.skip_rows, *(rollback.skipped_rows for rollback in made))
  reached = old.reached(done)
  if wrong := position.differing(old.skipped, new.skipped, reached):
    raise ValueError(
      f"data.skip_rows={tuple(config.data.skip_rows)}: the {done} steps that are done have passed "
      f"the rows up to {reached - 1}, and treated the rows {position.text(wrong)} otherwise; name "
      f"rows from {reached} on, or start a new run with another --workdir"
    )


def _position(record: Mapping[str, Any], batch: int) -> Position:
  """Returns the position that a record holds; that of a new run where it is {}."""
  if POSITION not in record:
    return Position.start(batch)
  return Position.read(record[POSITION], record.get(RECORD, {}).get("skipped_rows", ()))


# ------------------------------ checkpoints of older versions ------------------------------


def upgraded(record: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record as it is written now; older ones named batches, all of one size.

  Args:
    record: a checkpoint's.
    config: the checkpoint's, whose batch size it is.
  """
  if POSITION in record:
    return dict(record)
  batch, known = config["data"]["global_batch_size"], dict(record.get(RECORD, {}))
  rollbacks = [dict(values) for values in known.get("rollbacks", ())]
  for values in (known, *rollbacks):
    values["skipped_rows"] = position.batches(values.pop("skipped", ()), batch)
  known["rollbacks"] = rollbacks
  return {**record, RECORD: known, POSITION: Position.start(batch).listed()}


def upgraded_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's config with the keys of today.

  The rows of `data.skip_batches` are in `data.skip_rows`, and `task` is in place of `data.kind`
  and `training.loss`. Keys that an older version did not have get the value that does what it did.
  """
  data, training = dict(config["data"]), dict(config["training"])
  rows = position.batches(sorted(data.pop("skip_batches", ())), data["global_batch_size"])
  # In place of a task there were a kind of data and a loss; the recipe had chosen both.
  data.pop("kind", None)
  loss, named = training.pop("loss", None), {task.trained_as: name for name, task in TASKS.items()}
  task = {"task": named[loss]} if loss in named else {}
  model = config["model"]
  if model["name"] == "transformer":
    model = {"max_positions": data["sequence_length"], **model}
  return {
    **config,
    "model": model,
    "data": {"skip_batches": (), "skip_rows": rows, **data},
    "training": {"trainable": ("*",), **training},
    "optimizer": {"arguments": "", **config["optimizer"]},
    **task,
  }


class TrainingStoppedError(RuntimeError):
  """The run cannot continue; the message names the step. Exit code 1."""


class BadStepError(TrainingStoppedError):
  """A step has bad numbers; where the run cannot go back, it stops.

  Attributes:
    step: its number, counted from 1.
    why: what is bad.
  """

  def __init__(self, step: int, why: str, more: str = ""):
    """Says what to do, and `more`: of going back."""
    self.step, self.why = step, why
    text = f"step {step}: {why}; training stops. A smaller optimizer.learning_rate or a longer "
    super().__init__(f"{text}optimizer.warmup_steps may help{more and '; '}{more}")


def not_finite(values: Mapping[str, float]) -> str:
  """Returns what is wrong with a step's metrics; "" where they are finite."""
  if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
    return ""
  return ", ".join(f"{name} is {values[name]}" for name in ("loss", "grad_norm"))
