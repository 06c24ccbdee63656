"""Epochs of one source, and of several that are mixed."""

import numpy as np
import pytest

from input_pipeline.order import EpochOrder, MixtureOrder, Part
from input_pipeline.position import Position

PARTS = (Part("web", 30, 30 * 8), Part("code", 12, 12 * 8), Part("books", 7, 7 * 8))
EVEN = ((0, {"web": 0.5, "code": 0.3, "books": 0.2}),)
OFFSETS = {"web": 0, "code": 30, "books": 42}
START = Position.start(4)


def of(name, ids):
  """Returns the rows of one source, numbered within it."""
  rows = dict(zip(("web", "code", "books"), (30, 12, 7), strict=True))[name]
  first = OFFSETS[name]
  return [int(i) - first for i in ids if first <= i < first + rows]


def test_an_epoch_takes_each_row_once_in_an_order_of_its_own():
  order = EpochOrder(20, 3)
  first, second = order.ids(0, 20), order.ids(20, 40)
  assert sorted(first) == sorted(second) == list(range(20))
  assert first.tolist() != second.tolist() != list(range(20))
  assert order.ids(15, 25).tolist() == [*first[15:], *second[:5]]
  assert EpochOrder(20, 3, shuffle=False).ids(18, 23).tolist() == [18, 19, 0, 1, 2]
  assert order.ids(5, 5).tolist() == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_of_a_mixture_goes_through_its_own_epochs(shuffle):
  order = MixtureOrder(PARTS, EVEN, 0, shuffle=shuffle)
  ids = order.ids(0, 200, START)
  assert order.counts(200, START) == {"web": 100, "code": 60, "books": 40}
  for name, rows in (("web", 30), ("code", 12), ("books", 7)):
    mine = of(name, ids)
    for epoch in range(len(mine) // rows):
      assert sorted(mine[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert (mine[:rows] == list(range(rows))) == (not shuffle)
  parts = [order.ids(first, first + 4, START) for first in range(0, 200, 4)]
  assert np.concatenate(parts).tolist() == ids.tolist()


def test_another_source_beside_it_does_not_change_the_order_of_a_source():
  ids = MixtureOrder(PARTS, EVEN, 0).ids(0, 100, START)
  alone = MixtureOrder(PARTS[:1], ((0, {"web": 1.0}),), 0).ids(0, 30, START)
  assert of("web", ids)[:30] == alone.tolist()
  other_seed = MixtureOrder(PARTS, EVEN, 1).ids(0, 100, START)
  assert of("web", other_seed)[:30] != alone.tolist()


def test_a_stage_begins_with_its_step_whatever_the_batch_size_was():
  stages = ((0, {"web": 1.0}), (5, {"code": 1.0}))
  order = MixtureOrder(PARTS, stages, 0)
  assert order.counts(40, START) == {"web": 20, "code": 20, "books": 0}
  # From step 3 on, batches of 10: step 5 begins with row 12 + 2 * 10.
  resumed = START.resumed(3, 10)
  assert order.counts(40, resumed) == {"web": 32, "code": 8, "books": 0}
  # What was taken before stays what it was.
  assert order.ids(0, 12, resumed).tolist() == order.ids(0, 12, START).tolist()
  # Rows that are skipped belong to the stage in which they would have been taken.
  skipping = START.skipping([(4, 8)])
  assert order.counts(40, skipping) == {"web": 24, "code": 16, "books": 0}
