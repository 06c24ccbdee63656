"""A row of the table of keys: its range, and how it is explained."""

import math

import pytest

from configs.keys.row import Key
from tests.helpers.jobs import make_job

EXPERTS = {"model.experts": 4}


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"optimizer.beta_1": -1.0}, "optimizer.beta_1=-1.0: at least 0 and below 1"),
    ({"optimizer.beta_2": 1.0}, "optimizer.beta_2=1.0: at least 0 and below 1"),
    ({"optimizer.epsilon": math.nan}, "optimizer.epsilon=nan: at least 0"),
    ({"planning.price_per_chip_hour": -1.0}, "planning.price_per_chip_hour=-1.0: at least 0"),
    ({"partitioning.max_replicated_bytes": -1}, "partitioning.max_replicated_bytes=-1: at least 0"),
    ({"model.norm_epsilon": 0.0}, "model.norm_epsilon=0.0: above 0"),
    ({"model.rotary_base": math.inf}, "model.rotary_base=inf: above 0"),
    ({**EXPERTS, "model.shared_feedforward_size": -3}, "shared_feedforward_size=-3: at least 0"),
    ({**EXPERTS, "model.expert_capacity": math.inf}, "expert_capacity=inf: a finite number"),
  ],
)
def test_a_number_outside_its_range_is_refused_with_the_range(keys, said):
  with pytest.raises(ValueError, match="the config is refused") as error:
    make_job("single", "lm", **keys)
  assert said in str(error.value)


def test_the_ends_of_a_range():
  assert list(Key(0.5, least=0, below=1).range_errors(0.0)) == []
  assert list(Key(0.5, least=0, below=1).range_errors(1.0)) == ["at least 0 and below 1"]
  assert list(Key(1, least=1).range_errors(1)) == []
  assert list(Key(1.0, above=0).range_errors(0.0)) == ["above 0"]
  assert list(Key(None, least=1).range_errors(None)) == []


def test_a_meaning_has_its_unit_before_it_unless_it_names_that():
  assert Key(1, "width", unit="dims").explained() == "[dims] width"
  assert Key(1, "optimizer steps", unit="steps").explained() == "optimizer steps"
  assert Key(0, "of parameters").explained() == "of parameters"
