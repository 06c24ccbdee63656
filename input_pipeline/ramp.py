"""Ramps: how many rows a step takes, and into how many pieces they are cut, by the step.

`data.batch_size_ramp` says how many rows of the data set a step takes; a run counts its rows
(`input_pipeline.position`). `data.sequence_length_ramp` cuts each of these rows into shorter ones
(sequence length warm-up, arXiv:2108.06084): a step then has more rows of fewer tokens, and as many
tokens as before. No token is lost, and the rows of the data set, and so epochs, mixtures and
skipped rows, are the same with and without.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Values = tuple[tuple[int, int], ...]  # (number of steps before, value from there on), from step 0

# The keys of ramps -> the value that turns them off.
OFF = {"data.batch_size_ramp": (), "data.sequence_length_ramp": ()}


@dataclasses.dataclass(frozen=True)
class Shape:
  """What the batch of a step is made of.

  Attributes:
    rows: of the data set.
    pieces: that each of them is cut into; 1: it is not.
  """

  rows: int
  pieces: int = 1


@dataclasses.dataclass(frozen=True)
class Ramp:
  """The shapes of the batches of a run.

  Attributes:
    rows: of the data set, of the steps from each step on.
    pieces: of each row, likewise.
  """

  rows: Values
  pieces: Values = ((0, 1),)

  @classmethod
  def of(cls, data: Any) -> "Ramp":
    """Returns that of a finalized config's section `data`, which may be a dict."""
    length = data["sequence_length"]
    rows = data["batch_size_ramp"] or ((0, data["global_batch_size"]),)
    pieces = ((step, length // each) for step, each in data["sequence_length_ramp"])
    return cls(tuple(map(tuple, rows)), tuple(pieces) or ((0, 1),))

  @classmethod
  def constant(cls, rows: int) -> "Ramp":
    """Returns that of a run whose steps all take as many rows, uncut."""
    return cls(((0, rows),))

  @property
  def last(self) -> Shape:
    """Returns the shape of the last stage: all rows, uncut."""
    return Shape(self.rows[-1][1], self.pieces[-1][1])

  def lengths(self, length: int) -> Values:
    """Returns the tokens per row of a batch, of rows of so many tokens."""
    return tuple((step, length // pieces) for step, pieces in self.pieces)

  def shape(self, step: int) -> Shape:
    """Returns that of the step after the first `step` steps."""
    return Shape(_at(self.rows, step), _at(self.pieces, step))

  def stages(self, stop: int, start: int = 0) -> Iterator[tuple[int, int, Shape]]:
    """Yields (first step, one after the last, shape) of the stages of steps start to stop - 1."""
    cuts = {step for values in (self.rows, self.pieces) for step, _ in values}
    cuts = [start, *sorted(step for step in cuts if start < step < stop), stop]
    for first, end in itertools.pairwise(cuts):
      if first < end:
        yield first, end, self.shape(first)

  def taken(self, step: int) -> int:
    """Returns how many rows the first `step` steps take."""
    return sum((end - first) * shape.rows for first, end, shape in self.stages(step))

  def steps(self, rows: int) -> int:
    """Returns how many steps take at least so many rows, from the first on."""
    stages = [stage for stage in self.rows if stage[0] == 0 or self.taken(stage[0]) < rows]
    first, each = stages[-1]
    return first + max(0, -(-(rows - self.taken(first)) // each))


def until(values: Iterable[Sequence[int]], stop: int) -> Values:
  """Returns the stages of the first `stop` steps, without those that change nothing."""
  found: list[tuple[int, int]] = []
  for step, value in values:
    if step < stop and (not found or found[-1][1] != value):
      found.append((step, value))
  return tuple(found)


def _at(values: Values, step: int) -> int:
  return values[max(0, bisect.bisect_right(values, step, key=lambda one: one[0]) - 1)][1]
