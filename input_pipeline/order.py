"""The order in which the rows of a source are taken, epoch after epoch."""

import functools

import numpy as np
from etils import epy

from input_pipeline.position import Position

with epy.lazy_imports():  # it imports JAX
  import grain

# Up to here an epoch's order is made whole: of a million rows in 0.2 s. Grain's shuffle makes one
# number at a time, without memory for an epoch, in milliseconds for small sets.
_WHOLE_EPOCH_ROWS = 2**20


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
