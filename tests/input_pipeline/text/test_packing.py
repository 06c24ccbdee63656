"""Rows as an index: every token once, the same for the same inputs, as few rows as best fit."""

import itertools

import numpy as np
import pytest

from input_pipeline import packing

T = 37
# Lengths of documents: many of a kind, all different, longer than rows, none, exact fits.
LENGTHS = {
  "short": lambda draw: draw.integers(1, 6, 400),
  "mixed": lambda draw: draw.integers(0, 50, 300),
  "long": lambda draw: draw.integers(1, 400, 60),
  "half": lambda draw: draw.integers(T // 3, 2 * T // 3, 200),
  "fits": lambda draw: draw.integers(1, 4, 50) * T,
  "one": lambda draw: np.array([5]),
  "none": lambda draw: np.zeros(3, int),
  "nothing": lambda draw: np.zeros(0, int),
}


@pytest.fixture(params=LENGTHS)
def lengths(request):
  return LENGTHS[request.param](np.random.default_rng(3))


def pieces(packed):
  """Returns (row, document, first, count) of each piece."""
  row = np.repeat(np.arange(len(packed)), np.diff(packed.starts))
  return np.stack([row, packed.document, packed.first, packed.count], axis=1)


def slots(packed):
  """Returns (document, slot) of everything that is in a row, in order."""
  return [
    (document, first + i)
    for _, document, first, count in pieces(packed).tolist()
    for i in range(count)
  ]


def used(packed):
  """Returns how many slots of each row hold a token."""
  return np.bincount(pieces(packed)[:, 0], weights=packed.count, minlength=len(packed)).astype(int)


def documents_of_rows(packed):
  return [packed.document[a:b].tolist() for a, b in itertools.pairwise(packed.starts)]


@pytest.mark.parametrize("algorithm", packing.ALGORITHMS)
def test_each_token_is_in_one_row_once(lengths, algorithm):
  packed = packing.pack(lengths, T, algorithm, seed=1)
  wanted = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
  if algorithm == "concatenate":
    assert slots(packed) == wanted[1:]  # nothing precedes the first
  else:
    assert sorted(slots(packed)) == wanted
  assert (used(packed) >= 1).all()
  assert (used(packed) <= T).all()
  assert packed.tokens + packed.padding == len(packed) * T
  assert packed.starts[0] == 0
  assert packed.starts[-1] == len(packed.document)


@pytest.mark.parametrize("algorithm", ["best_fit", "none"])
def test_only_documents_longer_than_a_row_are_split(lengths, algorithm):
  packed = packing.pack(lengths, T, algorithm, seed=1)
  count = np.bincount(packed.document, minlength=len(lengths))
  np.testing.assert_array_equal(count, -(-lengths // T))
  assert packed.split_documents == np.count_nonzero(lengths > T)
  full = packed.count[lengths[packed.document] - packed.first > T]
  np.testing.assert_array_equal(full, T)  # all pieces but the last fill a row
  if (lengths > T).any():
    with pytest.raises(ValueError, match=rf"documents take more than data.sequence_length={T} .*"):
      packing.pack(lengths, T, algorithm, seed=1, may_split=False)


def test_concatenated_rows_are_the_stream(lengths):
  packed = packing.pack(lengths, T, "concatenate", seed=1)
  assert (used(packed)[:-1] == T).all()
  assert len(packed) == -(-max(lengths.sum() - 1, 0) // T)


def textbook(lengths, row_length):
  """Best-fit decreasing, item by item; returns the sorted free spaces of the rows."""
  free = []
  for length in sorted((x for x in lengths if x), reverse=True):
    fitting = [space for space in free if space >= length]
    if fitting:
      free.remove(min(fitting))
      free.append(min(fitting) - length)
    else:
      free.append(row_length - length)
  return sorted(free)


@pytest.mark.parametrize("number", range(20))
def test_rows_are_those_of_the_textbook_s_best_fit_decreasing(number):
  draw = np.random.default_rng(number)
  row_length = int(draw.integers(1, 60))
  lengths = draw.integers(0, row_length + 1, int(draw.integers(1, 200)))
  if number % 2:
    lengths = np.minimum(lengths, 1 + row_length // 3)
  packed = packing.pack(lengths, row_length, "best_fit", seed=number)
  assert sorted((row_length - used(packed)).tolist()) == textbook(lengths.tolist(), row_length)


def test_rows_follow_from_lengths_row_length_algorithm_and_seed():
  lengths = LENGTHS["short"](np.random.default_rng(0))
  first, again, other = (packing.pack(lengths, T, "best_fit", seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(pieces(first), pieces(again))
  assert len(other) == len(first)
  # Which document of a length shares a row with which others depends on the seed.
  rows, other_rows = ({frozenset(row) for row in documents_of_rows(p)} for p in (first, other))
  assert len(rows & other_rows) < len(rows) / 2


def test_an_index_stays_as_it_is():
  """Runs resume by computing it again: another index would be other rows under the same seed."""
  packed = packing.pack(np.array([5, 3, 9, 4, 4, 1, 2, 17]), 8, "best_fit", seed=7)
  assert documents_of_rows(packed) == STORED


STORED = [[6, 7, 2, 5], [2], [0, 1], [7], [7], [4, 3]]


def test_documents_of_one_length_are_shuffled_evenly():
  packed = packing.pack(np.full(4000, 3), 6, "best_fit", seed=0)
  partner = packed.document.reshape(-1, 2)
  distance = np.abs(partner[:, 0] - partner[:, 1])
  assert 1150 < distance.mean() < 1520  # 4000 / 3 of a uniform permutation


def test_a_hundred_thousand_documents_fill_rows_almost_completely():
  lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.3, 10**5)).astype(int)
  packed = packing.pack(lengths, 8192, "best_fit", seed=0)
  assert packed.tokens == lengths.sum()
  assert packed.padding < 1e-4 * packed.tokens


def test_an_unknown_algorithm_and_a_row_without_slots_are_refused():
  with pytest.raises(
    ValueError, match=r"data.packing='first_fit': one of best_fit, concatenate, n"
  ):
    packing.pack(np.ones(3, int), T, "first_fit", 0)
  with pytest.raises(ValueError, match=r"data.sequence_length=0: between 1 and 16777215 tokens"):
    packing.pack(np.ones(3, int), 0, "best_fit", 0)
