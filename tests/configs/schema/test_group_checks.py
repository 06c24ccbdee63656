"""Parameter groups of another form than a group has."""

import pytest

from configs import base
from configs.schema import finalize, validate


@pytest.mark.parametrize(
  ("groups", "said"),
  [
    ({"parameters": "*"}, "a tuple of groups, such as"),
    (({"learning_rate": 0.1},), "group 1: `parameters` is a pattern"),
    (({"parameters": 5, "learning_rate": 0.1},), "group 1: `parameters` is a pattern"),
    (({"parameters": "*"},), "group 1: it has no key of its own"),
    (({"parameters": "*", "learning_rte": 1.0},), "did you mean 'learning_rate'?"),
    (({"parameters": "*", "schedule": "linear"},), "schedule is the same for all groups; set opt"),
    (({"parameters": "*", "learning_rate": "big"},), "learning_rate='big' is no float"),
    (({"parameters": "*", "learning_rate": -1},), "learning_rate=-1: at least 0"),
    (
      ({"parameters": "*", "momentum": 0.9},),
      "momentum=0.9: adamw does not use it; it",
    ),
    (({"parameters": "*", "name": "sgd", "beta_1": 0.9},), "beta_1=0.9: sgd does not use it"),
  ],
)
def test_groups_of_another_form_are_refused(groups, said):
  config = base.get_config("lm")
  config.optimizer.groups = groups if isinstance(groups, tuple) else (groups, 3)
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="refused") as error:
    validate.check(config, dict(config.mesh))
  assert said in str(error.value)
