"""Best-fit decreasing: which documents share a row, so that there are the fewest rows.

Source: Ding et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830.
"""

import bisect
from collections.abc import Iterator

import numpy as np

_SHARE = 0  # what a seed is used for; 1: see `packing`
# Odd numbers, with their inverses modulo 2**32; those of the hash function MurmurHash3.
_FACTORS = tuple((factor, pow(factor, -1, 2**32)) for factor in (0x85EBCA6B, 0xC2B2AE35))


def pieces(
  lengths: np.ndarray, row_length: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns row, document, first, count of each piece, int64 [P]; arguments as of `pack`."""
  full, rest = np.divmod(lengths, row_length)
  filling = np.repeat(np.arange(len(lengths)), full)  # rows of their own
  of_document = np.arange(len(filling)) - np.repeat(np.cumsum(full) - full, full)
  short = np.flatnonzero(rest)
  # Longest first; among those of a length, in an order that follows from the seed.
  key = np.random.SeedSequence([seed, _SHARE]).generate_state(2, np.uint32)
  order = ((row_length - rest[short]).astype(np.uint64) << np.uint64(32)) | _mixed(short, key)
  short = _unmixed(np.sort(order), key)
  row = len(filling) + _rows_of_lengths(np.bincount(rest[short], minlength=row_length), row_length)
  return (
    np.concatenate([np.arange(len(filling)), row]),
    np.concatenate([filling, short]),
    np.concatenate([of_document * row_length, full[short] * row_length]),
    np.concatenate([np.full(len(filling), row_length), rest[short]]),
  )


def _mixed(numbers: np.ndarray, key: np.ndarray) -> np.ndarray:
  """Returns numbers below 2**32 as others, each of another; uint32 [N].

  A permutation of the 32-bit numbers that looks random, so that sorting by it shuffles: sorting
  values is several times faster than the sort of indices that drawn numbers would need.
  """
  x = numbers.astype(np.uint32) ^ key[0]
  for factor, _ in _FACTORS:
    x ^= x >> np.uint32(16)
    x *= np.uint32(factor)
  return x ^ (x >> np.uint32(16)) ^ key[1]


def _unmixed(mixed: np.ndarray, key: np.ndarray) -> np.ndarray:
  """Returns the numbers that `_mixed` has changed, int64 [N]; of a longer one, the last 32 bits."""
  x = mixed.astype(np.uint32) ^ key[1]
  x ^= x >> np.uint32(16)
  for _, inverse in _FACTORS[::-1]:
    x *= np.uint32(inverse)
    x ^= x >> np.uint32(16)
  return (x ^ key[0]).astype(np.int64)


def _rows_of_lengths(counts: np.ndarray, row_length: int) -> np.ndarray:
  """Returns the row of each item, longest items first, int64 [sum of counts].

  Args:
    counts: int [T], how many items there are of each length; counts[0] is not used.
    row_length: T.
  """
  found = np.array([*_fill(counts, row_length)], np.int64).reshape(-1, 3)
  first, stop, items = found.T
  sizes = (stop - first) * items
  number = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
  return np.repeat(first, sizes) + number // np.repeat(items, sizes)


def _fill(counts: np.ndarray, row_length: int) -> Iterator[tuple[int, int, int]]:
  """Yields (first row, the one after the last, items that each of them takes), longest items first.

  Best-fit decreasing puts the longest item that is left into the row whose free space it fills
  best. Rows of the same free space are alike, and so are items of a length: one that went into a
  row is followed by others into the same row for as long as they fit. So all rows of a free space
  are filled at once, and the work grows with the number of lengths, not of items.
  """
  rows = _Free()
  for length in np.flatnonzero(counts)[::-1].tolist():
    left = int(counts[length])
    while left:
      space = rows.smallest(length)
      if space is None:
        per_row = row_length // length
        rows.add(row_length, rows.open(-(-left // per_row)))
        space = row_length
      per_row = space // length
      for first, stop in rows.take(space, left // per_row):
        yield first, stop, per_row
        left -= (stop - first) * per_row
        rows.add(space - per_row * length, (first, stop))
      if left < per_row:
        for first, stop in rows.take(space, 1 if left else 0):
          yield first, stop, left
          rows.add(space - left * length, (first, stop))
          left = 0


class _Free:
  """Rows by the space that is left in them; kept as ranges of their numbers."""

  def __init__(self):
    self._ranges: dict[int, list[tuple[int, int]]] = {}
    self._spaces: list[int] = []  # ascending: those that some row has
    self._rows = 0

  def open(self, count: int) -> tuple[int, int]:
    """Returns the range of so many new rows."""
    self._rows += count
    return self._rows - count, self._rows

  def smallest(self, length: int) -> int | None:
    """Returns the smallest space that an item fits in, None where there is none."""
    place = bisect.bisect_left(self._spaces, length)
    return self._spaces[place] if place < len(self._spaces) else None

  def add(self, space: int, rows: tuple[int, int]) -> None:
    """Takes note of rows that have so much space left."""
    if not space:
      return
    if space not in self._ranges:
      self._ranges[space] = []
      bisect.insort(self._spaces, space)
    self._ranges[space].append(rows)

  def take(self, space: int, count: int) -> list[tuple[int, int]]:
    """Removes and returns up to so many of the rows that have this space left."""
    ranges, taken = self._ranges.get(space, []), []
    while count and ranges:
      first, stop = ranges.pop()
      if stop - first > count:
        ranges.append((first, stop - count))
        first = stop - count
      taken.append((first, stop))
      count -= stop - first
    if not ranges and space in self._ranges:
      del self._ranges[space]
      del self._spaces[bisect.bisect_left(self._spaces, space)]
    return taken
