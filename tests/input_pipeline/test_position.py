"""Which rows a step takes: of any batch sizes one after the other, and where some are skipped."""

import json

import numpy as np
import pytest

from input_pipeline import batches, position
from input_pipeline.position import Phase, Position


def told(sizes, skipped=()):
  """Returns the position of a run with batch sizes, each from a step on: {0: 8, 10: 16}."""
  found = Position.start(sizes[0]).skipping(skipped)
  for step, batch in sizes.items():
    found = found.resumed(step, batch)
  return found


def enumerated(sizes, skipped, steps):
  """Returns the rows of each step, by walking through all of them one by one."""
  left = np.array([row for row in range(10_000) if not any(a <= row < b for a, b in skipped)])
  found, taken = [], 0
  for step in range(steps):
    batch = sizes[max(start for start in sizes if start <= step)]
    found.append(left[taken : taken + batch])
    taken += batch
  return found


SIZES = [{0: 8}, {0: 8, 5: 16}, {0: 16, 3: 8, 7: 24}, {0: 5, 1: 3, 2: 7}, {0: 1, 4: 50, 6: 1}]
SKIPPED = [(), ((3, 4), (40, 60)), ((8, 16), (16, 20), (100, 101)), ((39, 41), (0, 1))]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("skipped", SKIPPED)
def test_the_rows_of_a_step_are_those_of_a_plain_enumeration(sizes, skipped):
  given, steps = told(sizes, skipped), 20
  found = [np.concatenate([np.arange(*rows) for rows in given.rows(s)]) for s in range(steps)]
  for ours, expected in zip(found, enumerated(sizes, skipped, steps), strict=True):
    np.testing.assert_array_equal(ours, expected)
  assert [given.taken(step) for step in (0, 20)] == [0, sum(map(len, found))]
  for step in range(steps):
    assert given.reached(step) == found[step][0]
    assert len(given.rows(step)) == 1 + sum(np.diff(found[step]) > 1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rows", [53, 2**10 + 7])
def test_the_rows_over_several_epochs(numbered, rows, shuffle):
  seed, near = 3, 2 * rows  # around the end of the second epoch
  first = batches.TrainingBatches(numbered(rows, 1), global_batch_size=1, seed=seed)
  order = [int(first.row_ids(number)[0]) for number in range(near - 60, near + 140)]
  if rows <= 2**10:  # the order is that of the generator's numbers
    drawn = [
      np.argsort(np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows))
      for epoch in range(5)
    ]
    assert order == np.concatenate(drawn)[near - 60 : near + 140].tolist()
  if not shuffle:
    order = [number % rows for number in range(near - 60, near + 140)]
  skipped = ((near - 50, near - 48), (near - 3, near + 5))
  left = [o for n, o in enumerate(order, near - 60) if not any(a <= n < b for a, b in skipped)]
  # One step takes all up to here; the batch size changes before and behind the border.
  given = Position(
    (Phase(0, 0, near - 60), Phase(1, near - 60, 8), Phase(5, near - 28, 16)), skipped
  )
  given, taken = given.resumed(8, 5), 0
  for step in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10):
    size = 8 if step < 5 else 16 if step < 8 else 5
    source = batches.TrainingBatches(
      numbered(rows, 1), global_batch_size=size, seed=seed, shuffle=shuffle
    )
    assert source.row_ids(step, given).tolist() == left[taken : taken + size]
    taken += size
  assert taken > 60, "it has crossed the border"


def test_changing_the_batch_size_twice_at_the_same_step_or_back_leaves_one_phase():
  given = Position.start(8).resumed(10, 16)
  assert given.phases == (Phase(0, 0, 8), Phase(10, 80, 16))
  assert given.resumed(10, 4).phases == (Phase(0, 0, 8), Phase(10, 80, 4))
  assert given.resumed(10, 8).phases == (Phase(0, 0, 8),)
  assert given.resumed(12, 16) == given
  assert Position.start(8).resumed(0, 16).phases == (Phase(0, 0, 16),)


def test_json_gives_a_position_back():
  given = told({0: 8, 5: 16}, ((3, 4), (40, 60)))
  again = Position.read(*json.loads(json.dumps([given.listed(), given.skipped])))
  assert again == given
  assert hash(again) == hash(given)


def test_ranges():
  assert position.merged([(5, 9), (0, 2), (9, 11), (2, 2), (6, 7), [20, 21]]) == (
    (0, 2),
    (5, 11),
    (20, 21),
  )
  assert position.text(((0, 2), (5, 11))) == "0-1, 5-10"
  ours, theirs = ((0, 4), (10, 20)), ((2, 4), (10, 15), (30, 40))
  assert position.differing(ours, theirs, 100) == ((0, 2), (15, 20), (30, 40))
  assert position.differing(ours, theirs, 17) == ((0, 2), (15, 17))
  assert position.differing(ours, ours, 100) == ()
