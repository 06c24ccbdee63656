"""Packed rows of two documents and padding, which the programs in this folder are checked with."""

import numpy as np

ROWS, LENGTH, VOCABULARY = 8, 16, 96


def packed_rows(seed):
  """Returns inputs, targets, positions and segments (0: padding), all int32 [ROWS, LENGTH]."""
  draw = np.random.default_rng(seed)
  tokens = draw.integers(1, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
  segments, positions = np.ones((2, ROWS, LENGTH), np.int32)
  for row in range(ROWS):
    first, end = 6 + row % 3, LENGTH - row * 7 % 4
    segments[row, first:end], segments[row, end:] = 2, 0
    positions[row] = np.concatenate([np.arange(first), np.arange(LENGTH - first)])
  inputs, targets = (np.where(segments > 0, x, 0) for x in (tokens[:, :-1], tokens[:, 1:]))
  return inputs, targets, positions, segments
