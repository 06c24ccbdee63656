"""The order in which the rows of a source are taken, epoch after epoch, or mixed with others."""

import functools
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epy

from input_pipeline.mixture import Part, Stages
from input_pipeline.position import Position

with epy.lazy_imports():  # it imports JAX
  import grain

# Up to here an epoch's order is made whole. Grain's shuffle makes one number at a time, by walking
# a domain of no fewer than 2**16: a set of 64 rows would cost 25 ms an epoch, and so a step.
_WHOLE_EPOCH_ROWS = 2**16


class EpochOrder:
  """Epochs of one source, one after the other, each in an order of its own."""

  def __init__(self, rows: int, seed: int, *, shuffle: bool = True):
    """Prepares nothing yet.

    Args:
      rows: of the source, at least 1.
      seed: at least 0; of the order.
      shuffle: False keeps the source's order in each epoch.
    """
    self._rows, self._seed, self._shuffle = rows, seed, shuffle
    self._epoch_order = functools.lru_cache(maxsize=2)(functools.partial(_epoch_order, rows, seed))

  @functools.cached_property
  def _large_order(self) -> "grain.MapDataset":
    shuffled = grain.MapDataset.range(self._rows).shuffle(seed=_grain_seed(self._seed))
    return shuffled.repeat()

  def ids(self, first: int, stop: int, position: Position | None = None) -> np.ndarray:
    """Returns the rows of the source that are numbers `first` to `stop` - 1 over all epochs."""
    del position
    if not self._shuffle:
      return (first % self._rows + np.arange(stop - first, dtype=np.int64)) % self._rows
    if self._rows > _WHOLE_EPOCH_ROWS:
      return np.asarray([self._large_order[number] for number in range(first, stop)], np.int64)
    parts = [np.zeros(0, np.int64)]
    while first < stop:
      epoch, offset = divmod(first, self._rows)
      parts.append(self._epoch_order(epoch)[offset : offset + stop - first])
      first += len(parts[-1])
    return np.concatenate(parts)


class MixtureOrder:
  """Rows of several sources by their weights; the rows of a source in its own epochs."""

  def __init__(
    self,
    parts: Sequence[Part],
    stages: Sequence[tuple[int, Mapping[str, float]]],
    seed: int,
    *,
    shuffle: bool = True,
  ):
    """Prepares nothing yet.

    Args:
      parts: the sources; in a mixture their rows are numbered one source after the other.
      stages: (step, name -> share of the tokens from that step on), ascending from step 0.
      seed: at least 0; of the order of each source's rows.
      shuffle: False keeps each source's order in each epoch.
    """
    self.parts, self._stages = tuple(parts), tuple(stages)
    self._offsets = np.cumsum([0, *(part.rows for part in parts)])
    # By name: another source beside it does not change the order of a source's rows.
    self._orders = [
      EpochOrder(part.rows, _part_seed(seed, part.name), shuffle=shuffle) for part in parts
    ]
    self._at = functools.lru_cache(maxsize=8)(self._stages_from)

  def ids(self, first: int, stop: int, position: Position) -> np.ndarray:
    """Returns the mixture's rows that are numbers `first` to `stop` - 1 of a run.

    Args:
      first: counted from 0 over the whole run.
      stop: one after the last.
      position: of the run; a stage begins with the first row of its step.
    """
    sources, numbers = self._stages_at(position).places(first, stop)
    ids = np.empty(stop - first, np.int64)
    for source, order in enumerate(self._orders):
      mask = sources == source
      if mask.any():
        taken = numbers[mask]
        ids[mask] = self._offsets[source] + order.ids(int(taken[0]), int(taken[-1]) + 1)
    return ids

  def counts(self, rows: int, position: Position) -> dict[str, int]:
    """Returns how many of a run's first rows come from each source."""
    counts = self._stages_at(position).counts(rows)
    return {part.name: int(count) for part, count in zip(self.parts, counts, strict=True)}

  def _stages_at(self, position: Position) -> Stages:
    return self._at(tuple(position.reached(step) if step else 0 for step, _ in self._stages))

  def _stages_from(self, starts: tuple[int, ...]) -> Stages:
    weights = [weights for _, weights in self._stages]
    return Stages(self.parts, list(zip(starts, weights, strict=True)))


def _epoch_order(rows, seed, epoch):
  """Returns the row numbers in the order of one epoch, int64 [rows].

  Sorts the generator's raw numbers: NumPy promises that those stay as they are, which it does not
  of its own permutations.
  """
  generator = np.random.Philox(np.random.SeedSequence([seed, epoch]))
  return np.argsort(generator.random_raw(rows), kind="stable")


def _grain_seed(seed):
  """Returns a 32-bit seed for Grain, whose epoch e of seed s is its epoch e-1 of seed s+1.

  Hashed, so that runs with neighbouring seeds do not see each other's epochs.
  """
  return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _part_seed(seed, name):
  """Returns the seed of one source of a mixture."""
  words = [seed, zlib.crc32(name.encode())]
  return int(np.random.SeedSequence(words).generate_state(1)[0])
