"""Which lines `metrics.jsonl` should have, by the logging schedules of a run.

`metrics.every_steps` and `evaluation.every_steps` may change when a run resumes, so each
checkpoint's record has their values and from which step on they applied. A line that was due and is
missing was lost after it was written: lines are written before their step is saved.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

RECORD = "logged"  # of a checkpoint's record
_NAMED = 5  # so many steps are named in a message


@dataclasses.dataclass(frozen=True)
class Span:
  """The schedules from a step on.

  Attributes:
    first: the first step that they apply to.
    metrics: of metrics.every_steps.
    evaluation: of evaluation.every_steps.
  """

  first: int
  metrics: int
  evaluation: int


class LogSchedule:
  """The schedules of a run over all its starts."""

  def __init__(self, config: ConfigDict, record: Mapping[str, Any], done: int):
    """Continues those of a checkpoint's record ({} without a checkpoint) after `done` steps.

    If a record has none, it is not known what was logged, and no line counts as missing.
    """
    self._now = (config.metrics.every_steps, config.evaluation.every_steps)
    self._spans = tuple(Span(*values) for values in record.get(RECORD, ()))
    self.roll_back(done)

  def roll_back(self, done: int) -> None:
    """Continues after step `done`."""
    kept = [span for span in self._spans if span.first <= done]
    if not kept or (kept[-1].metrics, kept[-1].evaluation) != self._now:
      kept.append(Span(done + 1, *self._now))
    self._spans = tuple(kept)

  def record(self) -> dict[str, Any]:
    """Returns its part of a checkpoint's record."""
    return {RECORD: [list(dataclasses.astuple(span)) for span in self._spans]}

  def missing(
    self, done: int, steps: Collection[int], evaluations: Collection[int]
  ) -> tuple[list[int], list[int]]:
    """Returns the finished steps, and the evaluations after them, whose lines are missing.

    Args:
      done: number of finished steps. The evaluation after the last one may not have been made yet.
      steps: the steps that have a line.
      evaluations: the steps whose evaluation has a line.
    """
    made, evaluated = [], []
    for span, end in self._ends(done):
      made += [s for s in _multiples(span.metrics, span.first, end) if s not in steps]
      if span.first == 1 <= done and 1 not in steps and 1 not in made:
        made.insert(0, 1)  # the first step is logged whatever the schedule
      evaluated += [
        s for s in _multiples(span.evaluation, span.first, end) if s < done and s not in evaluations
      ]
    return made, evaluated

  def _ends(self, done: int) -> Iterator[tuple[Span, int]]:
    """Yields each span with its last finished step."""
    for span, after in zip(self._spans, [*self._spans[1:], None], strict=True):
      yield span, done if after is None else min(done, after.first - 1)


def _multiples(every: int, first: int, last: int) -> range:
  """Returns the multiples of `every` from `first` to `last`; none where it is 0."""
  return range(-(-first // every) * every, last + 1, every) if every > 0 else range(0)


def text(missing: tuple[Sequence[int], Sequence[int]]) -> str:
  """Returns what is missing in words; "" if nothing is."""
  parts = [
    f"{len(found)} of {what} ({', '.join(map(str, found[:_NAMED]))}"
    f"{', ...' if len(found) > _NAMED else ''})"
    for found, what in zip(missing, ("steps", "evaluations"), strict=True)
    if found
  ]
  return " and ".join(parts)
