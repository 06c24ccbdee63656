"""Numbers outside their range are refused, with the range."""

import math

import pytest

from configs.schema import number_checks
from tests.helpers.jobs import make_job

EXPERTS = {"model.experts": 4}


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"optimizer.beta_1": -1.0}, "optimizer.beta_1=-1.0: at least 0 and below 1, such as 0.9"),
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
def test_is_refused_with_the_range(keys, said):
  with pytest.raises(ValueError, match="the config is refused") as error:
    make_job("single", "lm", **keys)
  assert said in str(error.value)


def test_what_is_in_its_range_passes():
  config = make_job("single", "lm", **{"optimizer.beta_1": 0.0, "optimizer.epsilon": 0.0}).config
  assert [*number_checks.wrong(config)] == []
