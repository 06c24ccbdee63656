"""Which documents share a row: an index over stored documents, computed from their lengths.

Rows are a pure function of (lengths, row length, algorithm, seed), without an iterator or a buffer:
a run that resumes, on another number of processes too, computes the same index again.
"""

import bisect
import dataclasses
from collections.abc import Iterator

import numpy as np

ALGORITHMS = ("best_fit", "concatenate", "none")
_LONGEST_ROW = 2**24
_ROW_BITS = 32  # the pieces of an index are numbered with so many bits
_SHARE, _ORDER = 0, 1  # what a seed is used for
# Odd numbers, with their inverses modulo 2**32; those of the hash function MurmurHash3.
_FACTORS = tuple((factor, pow(factor, -1, 2**32)) for factor in (0x85EBCA6B, 0xC2B2AE35))


@dataclasses.dataclass(frozen=True)
class Packed:
  """Rows as ranges of documents.

  Attributes:
    row_length: T, slots of a row.
    starts: int64 [R + 1]; row r consists of the pieces starts[r] to starts[r + 1] - 1.
    document: int64 [P], the document that each piece is from.
    first: int64 [P], the first of its slots in the piece.
    count: int64 [P], how many of its slots are in the piece; at least 1.
  """

  row_length: int
  starts: np.ndarray
  document: np.ndarray
  first: np.ndarray
  count: np.ndarray

  def __len__(self) -> int:
    """How many rows there are."""
    return len(self.starts) - 1

  @property
  def tokens(self) -> int:
    """How many slots hold a token."""
    return int(self.count.sum())

  @property
  def padding(self) -> int:
    """How many slots hold none."""
    return len(self) * self.row_length - self.tokens

  @property
  def split_documents(self) -> int:
    """How many documents are in several pieces."""
    return int(np.count_nonzero(np.bincount(self.document) > 1)) if len(self.document) else 0


def pack(
  lengths: np.ndarray, row_length: int, algorithm: str, seed: int, *, may_split: bool = True
) -> Packed:
  """Returns the rows of documents.

  Args:
    lengths: int [D], how many slots of a row each document takes; 0 leaves it out.
    row_length: T, slots of a row.
    algorithm: `best_fit`: best-fit decreasing, for the fewest rows; each slot of each document is
      in exactly one row. A document that is longer than a row is split: it fills rows of its own,
      and the rest is packed. `none`: each document begins a row. `concatenate`: the documents one
      after the other, cut every T slots; the very first slot is in no row, since nothing precedes
      it.
    seed: decides which document of a length goes where, and the order of the rows; not used by
      `concatenate`.
    may_split: refuse documents longer than a row. Of no meaning to `concatenate`.

  Raises:
    ValueError: an unknown algorithm, a row length out of range, or a document longer than a row
      that may not be split.

  Source of best_fit: Ding et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830.
  """
  lengths = np.asarray(lengths, np.int64)
  if not 1 <= row_length < _LONGEST_ROW:
    raise ValueError(f"data.sequence_length={row_length}: between 1 and {_LONGEST_ROW - 1} tokens")
  if algorithm == "concatenate":
    return _concatenate(lengths, row_length)
  if algorithm not in ALGORITHMS:
    raise ValueError(f"data.packing={algorithm!r}: one of {', '.join(ALGORITHMS)}")
  longer = int(np.count_nonzero(lengths > row_length))
  if longer and not may_split:
    raise ValueError(
      f"{longer:,} of {len(lengths):,} documents take more than data.sequence_length={row_length} "
      f"tokens, the longest {int(lengths.max()):,}"
    )
  fill = _best_fit if algorithm == "best_fit" else _one_each
  row, document, first, count = fill(lengths, row_length, seed)
  rows = int(row.max()) + 1 if len(row) else 0
  return _ordered(row_length, _shuffled(rows, seed, _ORDER)[row], document, first, count)


def _shuffled(count: int, seed: int, use: int) -> np.ndarray:
  """Returns a permutation, int64 [count].

  Sorts the generator's raw numbers: NumPy promises that those stay as they are, which it does not
  of its own permutations.
  """
  raw = np.random.Philox(np.random.SeedSequence([seed, use])).random_raw(count)
  return np.argsort(raw, kind="stable")


def _ordered(row_length, row, document, first, count) -> Packed:
  """Returns the index of pieces that are given in any order."""
  rows = int(row.max()) + 1 if len(row) else 0
  assert max(len(row) >> _ROW_BITS, rows >> (63 - _ROW_BITS)) == 0, (len(row), rows)
  # Sorting values is several times faster than sorting indices: the piece is part of the value.
  keys = np.sort((row << _ROW_BITS) | np.arange(len(row)))
  pieces = keys & (2**_ROW_BITS - 1)
  starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
  return Packed(row_length, starts, document[pieces], first[pieces], count[pieces])


# ------------------------------ best_fit ------------------------------


def _best_fit(lengths, row_length, seed):
  """Returns row, document, first, count of each piece, int64 [P]."""
  full, rest = np.divmod(lengths, row_length)
  pieces = np.repeat(np.arange(len(lengths)), full)
  of_document = np.arange(len(pieces)) - np.repeat(np.cumsum(full) - full, full)
  short = np.flatnonzero(rest)
  # Longest first; among those of a length, in an order that follows from the seed.
  key = np.random.SeedSequence([seed, _SHARE]).generate_state(2, np.uint32)
  order = ((row_length - rest[short]).astype(np.uint64) << np.uint64(32)) | _mixed(short, key)
  short = _unmixed(np.sort(order), key)
  row = len(pieces) + _rows_of_lengths(np.bincount(rest[short], minlength=row_length), row_length)
  return (
    np.concatenate([np.arange(len(pieces)), row]),
    np.concatenate([pieces, short]),
    np.concatenate([of_document * row_length, full[short] * row_length]),
    np.concatenate([np.full(len(pieces), row_length), rest[short]]),
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


# ------------------------------ none, concatenate ------------------------------


def _one_each(lengths, row_length, seed):
  """Returns row, document, first, count of each piece: a row each."""
  del seed
  pieces = -(-lengths // row_length)
  document = np.repeat(np.arange(len(lengths)), pieces)
  number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
  count = np.minimum(lengths[document] - number * row_length, row_length)
  return np.arange(len(document)), document, number * row_length, count


def _concatenate(lengths, row_length) -> Packed:
  stop = int(lengths.sum())
  begins = np.cumsum(lengths) - lengths
  rows = -(-max(stop - 1, 0) // row_length)
  cuts = np.sort(np.concatenate([np.maximum(begins, 1), 1 + row_length * np.arange(rows)]))
  cuts = cuts[(cuts < stop) & (np.diff(cuts, append=stop) > 0)]
  document = np.searchsorted(begins, cuts, side="right") - 1
  starts = np.searchsorted((cuts - 1) // row_length, np.arange(rows + 1))
  count = np.diff(np.append(cuts, stop))
  return Packed(row_length, starts, document, cuts - begins[document], count)
