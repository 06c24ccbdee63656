"""The batches of a run that skips some."""

import itertools

import pytest

from input_pipeline.skipping import batch_index


@pytest.mark.parametrize("skipped", [(), (0,), (3,), (0, 1, 2), (2, 3, 7), (5, 40), (1, 3, 5, 7)])
def test_the_batches_are_those_not_skipped_in_order(skipped):
  left = [index for index in range(60) if index not in skipped]
  assert [batch_index(step, skipped) for step in range(50)] == left[:50]


def test_what_is_skipped_later_changes_no_step_before():
  for one, two in itertools.combinations(range(8), 2):
    before = [batch_index(step, (one,)) for step in range(10)]
    after = [batch_index(step, (one, two)) for step in range(10)]
    same = [b for b in before if b < two]
    assert after[: len(same)] == same
    assert two not in after
