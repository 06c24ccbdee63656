"""Ramps of batch size and sequence length, beside a walk through all steps one by one."""

import itertools

import numpy as np
import pytest

from input_pipeline.position import Position
from input_pipeline.ramp import Ramp, Shape, until

RAMPS = [
  Ramp(((0, 8),)),
  Ramp(((0, 2), (5, 4), (10, 8)), ((0, 4), (7, 2), (12, 1))),
  Ramp(((0, 1), (1, 3), (9, 40)), ((0, 2), (9, 1))),
  Ramp(((0, 6),), ((0, 8), (3, 1))),
]
STEPS = 25


def walked(values):
  """Returns the value of each step."""
  return [[value for first, value in values if first <= step][-1] for step in range(STEPS)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_shapes_and_rows_are_those_of_a_walk_through_the_steps(ramp):
  rows, pieces = walked(ramp.rows), walked(ramp.pieces)
  shapes = [Shape(*both) for both in zip(rows, pieces, strict=True)]
  assert [ramp.shape(step) for step in range(STEPS)] == shapes
  assert ramp.last == shapes[-1]
  total = np.cumsum([0, *rows]).tolist()
  assert [ramp.taken(step) for step in range(STEPS + 1)] == total
  # The fewest steps that take so many rows.
  for wanted in range(total[-1]):
    assert ramp.steps(wanted) == next(step for step, sum_ in enumerate(total) if sum_ >= wanted)
  for start in (0, 4, 5, 11):
    stages = list(ramp.stages(STEPS, start))
    assert [s for first, stop, shape in stages for s in [shape] * (stop - first)] == shapes[start:]
    assert all(a[2] != b[2] for a, b in itertools.pairwise(stages))
  position = Position.of(ramp.rows)
  assert [position.taken(step) for step in range(STEPS + 1)] == total
  assert [position.batch(step) for step in range(STEPS)] == rows


def test_a_resumed_position_has_the_stages_that_are_left():
  ramp = RAMPS[1]
  whole = Position.of(ramp.rows)
  for done in range(15):
    later = [stage for stage in ramp.rows if stage[0] > done]
    assert whole.resumed(done, ramp.shape(done).rows, later) == whole
  # Another ramp from step 7 on: what was before stays.
  changed = whole.resumed(7, 4, [(9, 16)])
  assert [changed.batch(step) for step in range(12)] == [2] * 5 + [4] * 4 + [16] * 3


def test_a_config_says_tokens_and_rows():
  data = {"global_batch_size": 16, "sequence_length": 12}
  plain = {**data, "batch_size_ramp": (), "sequence_length_ramp": ()}
  assert Ramp.of(plain) == Ramp.constant(16)
  ramps = {"batch_size_ramp": [[0, 4], [6, 16]], "sequence_length_ramp": [[0, 3], [2, 12]]}
  found = Ramp.of({**data, **ramps})  # as JSON gives it back
  assert found == Ramp(((0, 4), (6, 16)), ((0, 4), (2, 1)))
  assert found.lengths(12) == ((0, 3), (2, 12))


def test_only_stages_that_were_entered_and_change_something_count():
  assert until([(0, 4), (6, 16), (9, 32)], 9) == ((0, 4), (6, 16))
  assert until([(0, 4), (6, 4), (9, 32)], 10) == ((0, 4), (9, 32))
  assert until([(0, 4)], 0) == ()
