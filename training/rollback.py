"""Steps with bad numbers: which are bad, which batches are skipped for them, and where to go back.

What is decided here follows from the metrics, which are the same on every process, and from the
record of the checkpoint that a start goes on from: so a run that is killed decides as one that is
not.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.skipping import batch_index
from training.meter import not_finite

# Of a checkpoint's record.
RECORD = "bad_steps"


@dataclasses.dataclass(frozen=True)
class Rollback:
  """One time that a run went back.

  Attributes:
    bad_step: the step with the bad numbers, counted from 1.
    why: what was bad.
    step: the step that it went back to; 0 is the first state.
    skipped: the batches that are skipped for it.
  """

  bad_step: int
  why: str
  step: int
  skipped: tuple[int, ...]

  def line(self) -> dict[str, Any]:
    """Returns what `metrics.jsonl` says of it besides the step that it went back to."""
    return {"rolled_back": self.bad_step, "why": self.why, "skipped": list(self.skipped)}


class BadSteps:
  """Judges steps, and knows what is skipped.

  Attributes:
    rollbacks: those that the run has made, over all its starts.
    skipped: the numbers of all batches that it skips, in ascending order.
  """

  def __init__(self, config: ConfigDict, record: Mapping[str, Any]):
    """Takes up what the record of the checkpoint says that the run goes on from, {} without."""
    self._keys, known = config.training, record.get(RECORD, {})
    self.rollbacks = tuple(
      Rollback(**{**values, "skipped": tuple(values["skipped"])})
      for values in known.get("rollbacks", ())
    )
    self.skipped = _all_skipped(config, self.rollbacks)
    self._remember(record)

  def _remember(self, record: Mapping[str, Any]) -> None:
    losses = record.get(RECORD, {}).get("losses", ())
    self._losses = collections.deque(losses, maxlen=self._keys.bad_step_window)

  def record(self) -> dict[str, Any]:
    """Returns what a checkpoint says of it; JSON gives floats back to the last bit."""
    rollbacks = [dataclasses.asdict(rollback) for rollback in self.rollbacks]
    for values in rollbacks:
      values["skipped"] = list(values["skipped"])
    known = {"skipped": list(self.skipped), "rollbacks": rollbacks, "losses": list(self._losses)}
    return {RECORD: known}

  # ------------------------------ judging ------------------------------

  def judge(self, values: Mapping[str, float]) -> str:
    """Returns what is wrong with a step's metrics; "" where nothing is, and its loss is kept."""
    why = not_finite(values) or self._too_large(values["loss"])
    if not why and self._keys.bad_step_deviations:
      self._losses.append(values["loss"])
    return why

  def _too_large(self, loss: float) -> str:
    """Judges once the window is full; sums by `fsum`, which are right to the last bit."""
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
    skipped = ", ".join(map(str, self.skipped))
    return (
      f"it went back {len(self.rollbacks)} times (training.max_rollbacks="
      f"{self._keys.max_rollbacks}), and skipped the batches {skipped}"
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

  def go_back(
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
    batches = tuple(sorted(batch_index(s, self.skipped) for s in steps))
    rollback = Rollback(bad_step, why, step, batches)
    self.rollbacks += (rollback,)
    self.skipped = tuple(sorted({*self.skipped, *batches}))
    self._remember(record)
    return rollback

  def text(self) -> str:
    """Returns a line about the last rollback."""
    last, count = self.rollbacks[-1], len(self.rollbacks)
    where = f"the checkpoint of step {last.step}" if last.step else "the first state"
    batches = ", ".join(map(str, last.skipped))
    return (
      f"WARNING: step {last.bad_step}: {last.why}; back to {where}, without the batches {batches} "
      f"(rollback {count} of at most {self._keys.max_rollbacks})"
    )


def require_same_past(config: ConfigDict, record: Mapping[str, Any], done: int) -> None:
  """Finds out whether the steps of a checkpoint have skipped what the run is to skip now.

  Args:
    config: of now.
    record: the checkpoint's.
    done: its step.

  Raises:
    ValueError: data.skip_batches adds or takes away a batch that the run has passed.
  """
  known = record.get(RECORD, {})
  old = tuple(known.get("skipped", ()))
  made = (batch for rollback in known.get("rollbacks", ()) for batch in rollback["skipped"])
  new = sorted({*config.data.skip_batches, *made})
  reached = batch_index(done, old)
  differing = sorted(batch for batch in set(old) ^ set(new) if batch < reached)
  if differing:
    raise ValueError(
      f"data.skip_batches={tuple(config.data.skip_batches)}: the {done} steps that are done have "
      f"passed the batches up to {reached - 1}, and of {', '.join(map(str, differing))} they have "
      f"done otherwise; name batches from {reached} on, or start anew with another --workdir"
    )


def _all_skipped(config: ConfigDict, rollbacks: Sequence[Rollback]) -> tuple[int, ...]:
  made = (batch for rollback in rollbacks for batch in rollback.skipped)
  return tuple(sorted({*config.data.skip_batches, *made}))
