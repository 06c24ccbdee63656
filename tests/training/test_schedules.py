"""Learning-rate schedules, next to their definitions in plain Python."""

import math

import numpy as np
import pytest

from configs import base
from configs.schema import finalize, validate
from training import schedules

PEAK, WARMUP, STEPS = 0.5, 4, 24


def config_of(**keys):
  config = base.get_config("lm")
  config.update_from_flattened_dict({"training.steps": STEPS, "optimizer.learning_rate": PEAK})
  config.update_from_flattened_dict({f"optimizer.{key}": value for key, value in keys.items()})
  config = finalize.finalize(config, "cpu")
  validate.check(config, dict(config.mesh))
  return config


def rates(**keys):
  schedule = schedules.learning_rate_schedule(config_of(warmup_steps=WARMUP, **keys))
  return [float(schedule(step)) for step in range(STEPS + 3)]


def share(step, begin, length):
  return min(1.0, max(0.0, (step - begin) / length))


# name -> (keys, function of the step after the warm-up)
WANTED = {
  "cosine": ({}, lambda s: 0.1 + 0.9 * (1 + math.cos(math.pi * share(s, 4, 20))) / 2),
  "cosine to half": (
    {"final_fraction": 0.5},
    lambda s: 0.5 + 0.5 * (1 + math.cos(math.pi * share(s, 4, 20))) / 2,
  ),
  "linear": ({"schedule": "linear"}, lambda s: 1 - share(s, 4, 20)),
  "linear to a fifth": (
    {"schedule": "linear", "final_fraction": 0.2},
    lambda s: 1 - 0.8 * share(s, 4, 20),
  ),
  "constant": ({"schedule": "constant"}, lambda s: 1.0),
  # By default the last fifth of the steps.
  "wsd": ({"schedule": "wsd"}, lambda s: 1 - share(s, 20, 4)),
  "wsd by a square root": (
    {"schedule": "wsd", "decay_steps": 10, "decay": "1-sqrt"},
    lambda s: 1 - math.sqrt(share(s, 14, 10)),
  ),
  "wsd all the way": ({"schedule": "wsd", "decay_steps": 20}, lambda s: 1 - share(s, 4, 20)),
  "inverse_sqrt": ({"schedule": "inverse_sqrt"}, lambda s: math.sqrt(4 / (s + 1))),
}


@pytest.mark.parametrize("name", WANTED)
def test_is_as_defined(name):
  keys, after = WANTED[name]
  wanted = [
    PEAK * ((step + 1) / WARMUP if step < WARMUP else after(step)) for step in range(STEPS + 3)
  ]
  np.testing.assert_allclose(rates(**keys), wanted, rtol=1e-5, atol=1e-7)


def test_is_the_same_under_jit_and_in_any_order_of_steps():
  import jax

  schedule = schedules.learning_rate_schedule(
    config_of(warmup_steps=0, schedule="wsd", decay="1-sqrt")
  )
  steps = np.arange(STEPS, dtype=np.int32)[::-1]
  with jax.numpy_dtype_promotion("standard"):  # as in the step
    found = jax.jit(jax.vmap(schedule))(steps)
  np.testing.assert_allclose(found[::-1], [float(schedule(step)) for step in range(STEPS)])


def test_stays_the_same_up_to_the_decay_whatever_the_number_of_steps():
  """So a decay may begin at any checkpoint of a longer run."""
  short = schedules.learning_rate_schedule(config_of(schedule="wsd", warmup_steps=2, decay_steps=5))
  config = config_of(schedule="wsd", warmup_steps=2, decay_steps=5)
  config.unlock()
  config.training.steps = 1000
  long = schedules.learning_rate_schedule(config)
  assert [float(short(step)) for step in range(19)] == [float(long(step)) for step in range(19)]
  assert float(short(20)) < float(long(20)) == PEAK


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"schedule": "wsd", "decay_steps": 24, "warmup_steps": 1}, "decay_steps=24: from 1 to 23"),
    ({"schedule": "wsd", "decay_steps": 0}, "decay_steps=0: from 1 to 23"),
    ({"decay_steps": 3}, "decay_steps=3 and optimizer.decay='linear': schedule=cosine has no"),
    ({"decay": "1-sqrt"}, "schedule=cosine has no stable phase"),
    ({"schedule": "wsd", "decay": "sqrt"}, "optimizer.decay='sqrt': one of linear, 1-sqrt"),
    ({"schedule": "constant", "final_fraction": 0.1}, "schedule=constant has no end"),
    ({"final_fraction": 1.5}, "final_fraction=1.5: from 0 to 1"),
    ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "it falls from the warm-up on"),
    ({"schedule": "wds"}, "did you mean 'wsd'?"),
    ({"independent_weight_decay": True, "learning_rate": 0.0}, "learning_rate above 0"),
    ({"independent_weight_decay": True, "name": "lamb"}, "lamb does not use it"),
    ({"warmup_tokens": 1 << 20, "warmup_steps": 3}, "warmup_steps=3: set one of the two"),
    ({"decay_tokens": 1 << 20}, "schedule=cosine has no stable phase"),
  ],
)
def test_what_does_not_go_together_is_refused(keys, said):
  with pytest.raises(ValueError, match=said.replace(".", r"\.").replace("?", r"\?")):
    config_of(**keys)
