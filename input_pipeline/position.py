"""The data position of a run: the rows of each of its steps.

The rows of all epochs are numbered from 0, one epoch after the other: of R rows, row n is the
(n mod R)-th of epoch n // R. Steps take the rows in order, except skipped ones, each step as many
as its batch size. So a run whose batch size changes neither repeats nor loses a row, and skipped
rows stay skipped.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Ranges = tuple[tuple[int, int], ...]  # (first row, one past the last), ascending, disjoint


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps that have one batch size.

  Attributes:
    step: number of steps before; at least 0.
    row: number of rows that they have taken, without skipped ones.
    batch: rows per step from here on.
  """

  step: int
  row: int
  batch: int


@dataclasses.dataclass(frozen=True)
class Position:
  """The batch sizes of a run so far, and the rows that it skips.

  Attributes:
    phases: the first begins at step 0; each begins later than the one before.
    skipped: the rows that no step takes.
  """

  phases: tuple[Phase, ...]
  skipped: Ranges = ()

  @classmethod
  def start(cls, batch: int) -> "Position":
    """Returns that of a new run."""
    return cls((Phase(0, 0, batch),))

  @classmethod
  def of(cls, sizes: Iterable[Sequence[int]]) -> "Position":
    """Returns that of a new run with batch sizes (step, rows per step from there on)."""
    (_, first), *later = sizes
    return cls.start(first).resumed(0, first, later)

  @classmethod
  def read(cls, phases: Iterable[Mapping[str, Any]], skipped: Iterable[Sequence[int]]):
    """Returns what `listed` has written, as JSON gives it back."""
    return cls(tuple(Phase(**phase) for phase in phases), merged(skipped))

  def listed(self) -> list[dict[str, int]]:
    """Returns the phases as JSON has them."""
    return [dataclasses.asdict(phase) for phase in self.phases]

  def resumed(self, step: int, batch: int, later: Iterable[Sequence[int]] = ()) -> "Position":
    """Returns that of a run which resumes after `step` steps with a batch size.

    Args:
      step: number of steps that are done.
      batch: rows per step from there on.
      later: (step, rows per step from there on) that follow, ascending.
    """
    phases = tuple(phase for phase in self.phases if phase.step < step or phase.step == 0)
    kept = dataclasses.replace(self, phases=phases)
    for first, size in ((step, batch), *later):
      kept = kept._changed(first, size)
    return kept

  def _changed(self, step: int, batch: int) -> "Position":
    """Returns a copy whose batch size changes after `step` steps, not before its last phase."""
    if self.phases[-1].batch == batch:
      return self
    new = Phase(step, self.taken(step), batch)
    return dataclasses.replace(self, phases=(*(p for p in self.phases if p.step < step), new))

  def batch(self, step: int) -> int:
    """Returns how many rows the step after the first `step` steps takes."""
    return self._phase(step).batch

  def skipping(self, *ranges: Iterable[Sequence[int]]) -> "Position":
    """Returns a copy that skips exactly these rows."""
    return dataclasses.replace(self, skipped=merged(itertools.chain(*ranges)))

  def taken(self, step: int) -> int:
    """Returns how many rows the first `step` steps take."""
    phase = self._phase(step)
    return phase.row + (step - phase.step) * phase.batch

  def rows(self, step: int) -> Ranges:
    """Returns the rows that the step after the first `step` takes, in order."""
    return _not_skipped(self.taken(step), self._phase(step).batch, self.skipped)

  def reached(self, step: int) -> int:
    """Returns the first row that may be taken after `step` steps; those before it are passed."""
    return self.rows(step)[0][0]

  def _phase(self, step: int) -> Phase:
    return next(phase for phase in reversed(self.phases) if phase.step <= step)


def _not_skipped(first: int, count: int, skipped: Ranges) -> Ranges:
  """Returns `count` rows from the `first`-th on of those that are not skipped."""
  found = []
  for start, stop in skipped:
    if start <= first:
      first += stop - start
      continue
    if first + count <= start:
      break
    found.append((first, start))
    count -= start - first
    first = stop
  return (*found, (first, first + count))


def merged(ranges: Iterable[Sequence[int]]) -> Ranges:
  """Returns ranges in ascending order, those that overlap or touch as one."""
  found: list[tuple[int, int]] = []
  for start, stop in sorted((start, stop) for start, stop in ranges if start < stop):
    if found and start <= found[-1][1]:
      found[-1] = (found[-1][0], max(stop, found[-1][1]))
    else:
      found.append((start, stop))
  return tuple(found)


def differing(ours: Ranges, theirs: Ranges, stop: int) -> Ranges:
  """Returns the rows below `stop` that are in one of two and not in the other."""
  ends = {end for both in (*ours, *theirs) for end in both}
  cuts = sorted({0, stop, *(end for end in ends if end < stop)})
  return merged((a, b) for a, b in itertools.pairwise(cuts) if _holds(ours, a) != _holds(theirs, a))


def _holds(ranges: Ranges, row: int) -> bool:
  return any(start <= row < stop for start, stop in ranges)


def text(ranges: Ranges) -> str:
  """Returns `32-63, 96-127`."""
  return ", ".join(f"{start}-{stop - 1}" for start, stop in ranges)
