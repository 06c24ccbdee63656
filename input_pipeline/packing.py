"""Which documents share a row: an index over stored documents, computed from their lengths.

Rows are a pure function of (lengths, row length, algorithm, seed), without an iterator or a buffer:
a run that resumes, on another number of processes too, computes the same index again.
"""

import dataclasses

import numpy as np

ALGORITHMS = ("best_fit", "concatenate", "none")
_LONGEST_ROW = 2**24
_ROW_BITS = 32  # the pieces of an index are numbered with so many bits
_ORDER = 1  # what a seed is used for; 0: see `best_fit`


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
  if algorithm == "best_fit":
    from input_pipeline import best_fit  # bytes that are concatenated do not need it

    row, document, first, count = best_fit.pieces(lengths, row_length, seed)
  else:
    row, document, first, count = _one_each(lengths, row_length)
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


# ------------------------------ none, concatenate ------------------------------


def _one_each(lengths, row_length):
  """Returns row, document, first, count of each piece: a row each."""
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
