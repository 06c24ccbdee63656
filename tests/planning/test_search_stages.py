"""Pipeline stages in a search: bounds of their time, and microbatches that are tried."""

import pytest

from configs import dp4_tp2
from planning import search_space


def test_without_stages_what_a_config_says_of_them_is_left_out():
  config = dp4_tp2.get_config("lm")
  assert search_space.Space(config).without_pipeline() == {}
  config.training.update({"pipeline": "gpipe", "microbatches": 4})
  assert search_space.Space(config).without_pipeline() == {
    "training.pipeline": "1f1b",
    "training.microbatches": 1,
  }


def test_ticks_are_those_of_the_schedule():
  """A step of M microbatches in v chunks on S stages has M v + S - 1 ticks (arXiv:2104.04473)."""
  assert search_space.ticks_of_step(4, 12, 1) * 12 == pytest.approx(12 + 4 - 1)
  assert search_space.ticks_of_step(4, 12, 2) * 24 == pytest.approx(24 + 4 - 1)
  assert search_space.ticks_of_step(1, 12, 1) == 1


def test_a_bound_of_what_stages_compute():
  # Layers: a forward pass more than three (or of attention 2 of 7 matmuls), and the bubble.
  assert search_space.least_by_stages(4, 12, 1) == pytest.approx(9 / 7 * 15 / 12)
  # What is before and after the layers, on each of two stages.
  assert search_space.least_by_stages(2, 1, 1) == 2


def test_numbers_of_microbatches_above_one():
  config = dp4_tp2.get_config("lm")
  assert search_space.Space(config).chunks_of_stage() == 1
  assert search_space.Space(config).more_microbatches(3, 12, 3) == [4, 6, 12]
  config.training.pipeline = "interleaved"
  assert search_space.Space(config).chunks_of_stage() == 2
  assert search_space.Space(config).more_microbatches(3, 12, 3) == [6, 12]


def test_inputs_that_more_microbatches_make_smaller():
  config, parts = dp4_tp2.get_config("lm"), {"saved inputs of chunks": 5}
  assert search_space.Space(config).divided_inputs(parts) == 5
  assert search_space.Space(config).divided_inputs({}) == 0
  config.training.pipeline = "gpipe"  # keeps those of all microbatches
  assert search_space.Space(config).divided_inputs(parts) == 0
