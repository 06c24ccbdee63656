"""The order in which the rows of a source are taken, epoch after epoch, or mixed with others.

In a mixture, each source has its share of the tokens. Which source a row comes from is a function
of the row's index alone: at every index each source has had its share of the rows so far to within
one row. The order is Tijdeman's for the chairman assignment problem (R. Tijdeman, Discrete
Mathematics 32, 1980), whose deviation is at most 1 - 1/(2k - 2) rows for k sources. It needs the
counts so far, so the shares are rounded to multiples of 1 / PERIOD: then every period is the same,
and no more than one is ever computed.
"""

import bisect
import functools
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epy

from input_pipeline.position import Position
from input_pipeline.source import Part

# ------------------------------ which source each row comes from ------------------------------

PERIOD = 2**22
_COUNTED_ROWS = 2**12  # rows between two counts that are kept


def row_shares(parts: Sequence[Part], weights: Mapping[str, float]) -> list[float]:
  """Returns the share of the rows of each part.

  Args:
    parts: with at least one row each.
    weights: name -> relative share of the tokens; a name that is missing counts as 0.
  """
  rates = [weights.get(part.name, 0.0) * part.rows / max(1, part.tokens) for part in parts]
  return [rate / sum(rates) for rate in rates]


def rounded(shares: Sequence[float]) -> tuple[int, ...]:
  """Returns the shares as whole numbers of rows per PERIOD: at least 1 where a share is above 0."""
  quotas = [max(1, round(share * PERIOD)) if share > 0 else 0 for share in shares]
  # What rounding has added or taken goes to the largest, which notices it least.
  largest = max(range(len(quotas)), key=quotas.__getitem__)
  quotas[largest] += PERIOD - sum(quotas)
  return tuple(quotas)


class Interleaving:
  """Which source each row comes from, where the shares stay the same."""

  def __init__(self, shares: Sequence[float]):
    """Computes nothing yet.

    Args:
      shares: of the rows, of each source; their sum is 1.
    """
    self.quotas = rounded(shares)
    self._taken = [0] * len(self.quotas)  # of each source in the first `len(self._chosen)` rows
    self._chosen = np.zeros(0, np.int16)
    self._counts = [tuple(self._taken)]  # the same after every _BLOCK rows

  def counts(self, index: int) -> np.ndarray:
    """Returns how many of the first `index` rows come from each source, int64 [k]."""
    periods, rest = divmod(index, PERIOD)
    self._extend(rest)
    block = rest // _COUNTED_ROWS
    counts = np.array(self._counts[block], np.int64) + periods * np.array(self.quotas, np.int64)
    return counts + np.bincount(
      self._chosen[block * _COUNTED_ROWS : rest], minlength=len(self.quotas)
    )

  def sources(self, first: int, stop: int) -> np.ndarray:
    """Returns the number of the source of rows `first` to `stop` - 1."""
    self._extend(PERIOD if first // PERIOD < (stop - 1) // PERIOD else (stop - 1) % PERIOD + 1)
    return self._chosen[np.arange(first, stop) % PERIOD]

  def _extend(self, length: int) -> None:
    while len(self._chosen) < length:
      block = self._next_block()
      self._chosen = np.concatenate([self._chosen, block])
      self._counts.append(tuple(self._taken))

  def _next_block(self) -> np.ndarray:
    """Returns the sources of the next _BLOCK rows, and counts them."""
    quotas, taken, chosen = self.quotas, self._taken, []
    parts = max(1, 2 * sum(quota > 0 for quota in quotas) - 2)
    used = [i for i, quota in enumerate(quotas) if quota]
    first = len(self._chosen) + 1
    for n in range(first, first + _COUNTED_ROWS):
      best, earliest = -1, 0.0
      for i in used:
        quota = quotas[i]
        behind = (n * quota - taken[i] * PERIOD) * parts  # of its share, in rows x PERIOD x parts
        if behind >= PERIOD:
          deadline = (PERIOD * (parts - 1) - behind) / quota
          if best < 0 or deadline < earliest:
            best, earliest = i, deadline
      taken[best] += 1
      chosen.append(best)
    return np.array(chosen, np.int16)


@functools.lru_cache(maxsize=16)
def _interleaving(shares: tuple[float, ...]) -> Interleaving:
  return Interleaving(shares)


class Stages:
  """Which source each row of a run comes from, where the weights change at given rows."""

  def __init__(self, parts: Sequence[Part], stages: Sequence[tuple[int, Mapping[str, float]]]):
    """Takes the weights.

    Args:
      parts: the sources.
      stages: (first row, name -> share of the tokens), ascending; the first is from row 0 on.
    """
    assert stages[0][0] == 0, stages
    self._starts = [start for start, _ in stages]
    assert self._starts == sorted(set(self._starts)), self._starts
    self._orders = [_interleaving(tuple(row_shares(parts, weights))) for _, weights in stages]
    self._before = [np.zeros(len(parts), np.int64)]
    for order, start, stop in zip(self._orders, self._starts, self._starts[1:], strict=False):
      self._before.append(self._before[-1] + order.counts(stop - start))

  def counts(self, index: int) -> np.ndarray:
    """Returns how many of the first `index` rows come from each source, int64 [k]."""
    stage = max(0, bisect.bisect_right(self._starts, index) - 1)
    return self._before[stage] + self._orders[stage].counts(index - self._starts[stage])

  def places(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each of rows `first` to `stop` - 1, and its number in that source."""
    sources = []
    for order, start, end in zip(
      self._orders, self._starts, [*self._starts[1:], stop], strict=True
    ):
      low, high = max(first, start), min(stop, max(end, start))
      if low < high:
        sources.append(order.sources(low - start, high - start))
    sources = np.concatenate(sources)
    numbers = np.empty(len(sources), np.int64)
    for source, before in enumerate(self.counts(first)):
      mask = sources == source
      numbers[mask] = before + np.arange(np.count_nonzero(mask))
    return sources, numbers


# ------------------------------ epochs ------------------------------

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


def check_epochs(order: MixtureOrder, rows: int, position: Position, steps: int) -> None:
  """Raises ValueError where a run takes rows of a source more often than its maximum_epochs.

  Args:
    order: of the mixture.
    rows: how many the whole run takes.
    position: of the run.
    steps: of the whole run, for the message.
  """
  wrong = []
  counts = order.counts(rows, position)
  for part in order.parts:
    most = part.maximum_epochs * part.rows
    if part.maximum_epochs and counts[part.name] > most:
      epochs = counts[part.name] / part.rows
      wrong.append(
        f"source {part.name!r} of data.sources has {part.rows} rows, and {steps} steps take"
        f" {counts[part.name]} of it, {epochs:.2f} epochs, but its maximum_epochs is"
        f" {part.maximum_epochs}; set maximum_epochs={-(-counts[part.name] // part.rows)} (0: no"
        f" limit), lower its weight, or train about {int(steps / epochs * part.maximum_epochs)}"
        f" steps"
      )
  if wrong:
    raise ValueError("\n".join(wrong))


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
