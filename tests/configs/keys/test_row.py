"""A row of the table of keys: its range, and how it is explained."""

import math
import time

import pytest

from configs.keys.row import Key
from tests.helpers.jobs import make_job


@pytest.mark.parametrize(
  ("key", "value", "most"),
  [
    ("model.layers", 10**9, "4,096"),
    ("model.vocabulary_size", 10**12, "1,073,741,824"),
    ("data.global_batch_size", 10**12, "16,777,216"),
    ("data.sequence_length", 2**20 + 128, "1,048,576"),
  ],
)
def test_what_is_too_large_is_refused_at_once(key, value, most):
  began = time.monotonic()
  with pytest.raises(
    ValueError, match=f"the config is refused:\n  {key}={value:,}: at most {most}"
  ):
    make_job("single", "lm", **{key: value})
  assert time.monotonic() - began < 10  # and not without end


def test_tokens_may_be_more_than_steps():
  config = make_job("single", "lm", **{"training.tokens": 10**11}).config
  tokens = config.data.sequence_length * config.data.global_batch_size
  assert config.training.steps == -(-(10**11) // tokens)


def test_the_ends_of_a_range():
  assert list(Key(0.5, least=0, below=1).range_errors(0.0)) == []
  assert list(Key(0.5, least=0, below=1).range_errors(1.0)) == ["at least 0 and below 1"]
  assert list(Key(1, least=1).range_errors(1)) == []
  assert list(Key(1.0, above=0).range_errors(0.0)) == ["above 0"]
  assert list(Key(1.0, above=0).range_errors(math.inf)) == ["above 0"]
  assert list(Key(1.0, least=0).range_errors(math.nan)) == ["at least 0"]
  assert list(Key(None, least=1).range_errors(None)) == []


def test_a_meaning_has_its_unit_before_it_unless_it_names_that():
  assert Key(1, "width", unit="dims").explained() == "[dims] width"
  assert Key(1, "optimizer steps", unit="steps").explained() == "optimizer steps"
  assert Key(0, "of parameters").explained() == "of parameters"
