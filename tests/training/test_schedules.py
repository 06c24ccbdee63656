"""Learning-rate schedules, next to their definitions in plain Python."""

import math

import jax
import numpy as np
import pytest

from configs import base
from configs.schema import finalize, validate
from training import schedules

PEAK, WARMUP, STEPS = 0.5, 4, 24


def config_of(steps=STEPS, **keys):
  config = base.get_config("lm")
  config.update_from_flattened_dict({"training.steps": steps, "optimizer.learning_rate": PEAK})
  config.update_from_flattened_dict({f"optimizer.{key}": value for key, value in keys.items()})
  config = finalize.finalize(config, "cpu")
  validate.check(config, dict(config.mesh))
  return config


def schedule_of(config):
  return schedules.learning_rate_schedule(config.optimizer, config.training.steps)


def rates(**keys):
  schedule = schedule_of(config_of(warmup_steps=WARMUP, **keys))
  return [float(schedule(step)) for step in range(STEPS + 3)]


def share(step, begin, length):
  return min(1.0, max(0.0, (step - begin) / length))


# name -> (keys, function of the step after the warm-up)
WANTED = {
  "cosine": ({}, lambda s: 0.1 + 0.9 * (1 + math.cos(math.pi * share(s, 4, 20))) / 2),
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
  "inverse_sqrt": ({"schedule": "inverse_sqrt"}, lambda s: math.sqrt(4 / (s + 1))),
}


@pytest.mark.parametrize("name", WANTED)
def test_is_as_defined(name):
  keys, after = WANTED[name]
  wanted = [
    PEAK * ((step + 1) / WARMUP if step < WARMUP else after(step)) for step in range(STEPS + 3)
  ]
  np.testing.assert_allclose(rates(**keys), wanted, rtol=1e-5, atol=1e-7)


def cosine(share):
  return 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2


WSD = {"schedule": "wsd", "decay_steps": 4}
# (keys, changes of training.steps of a run of 24, then, step -> learning rate over the peak)
CHANGED = [
  ({}, [(14, 24, "stretch")], 44, {3: 1, 13: cosine(9 / 20), 14: cosine(0.5), 29: cosine(0.75)}),
  (
    {},
    [(14, 24, "stretch"), (29, 44, "stretch")],
    59,
    {13: cosine(9 / 20), 28: cosine(0.5 + 7 / 30), 29: cosine(0.75), 44: cosine(0.875)},
  ),
  ({}, [(24, 24, "stretch")], 44, {23: cosine(19 / 20), 24: 0.1, 43: 0.1}),
  ({}, [(24, 24, "restart")], 44, {23: cosine(19 / 20), 24: 0.325, 27: 1, 28: 1, 36: cosine(0.5)}),
  (WSD, [(14, 24, "stretch")], 44, {14: 1, 39: 1, 40: 1, 42: 0.5, 43: 0.25}),
  (WSD, [(22, 24, "stretch")], 44, {20: 1, 21: 0.75, 22: 0.5, 33: 0.25}),
  ({**WSD, "decay_steps": 8}, [(14, 24, "stretch")], 18, {13: 1, 14: 1, 16: 0.5, 17: 0.25}),
  (WSD, [(24, 24, "restart")], 44, {23: 0.25, 24: 0.25, 27: 1, 39: 1, 42: 0.5}),
  (
    {"schedule": "inverse_sqrt"},
    [(15, 24, "restart")],
    44,
    {3: 1, 14: math.sqrt(4 / 15), 15: 0.625, 18: 1, 19: math.sqrt(4 / 5), 35: math.sqrt(4 / 21)},
  ),
]


@pytest.mark.parametrize(("keys", "changes", "steps", "wanted"), CHANGED)
def test_where_the_number_of_steps_has_changed(keys, changes, steps, wanted):
  config = config_of(steps, warmup_steps=WARMUP, **keys, schedule_changes=tuple(changes))
  with jax.numpy_dtype_promotion("standard"):
    found = jax.jit(jax.vmap(schedule_of(config)))(np.array([*wanted], np.int32))
  np.testing.assert_allclose(found, PEAK * np.array([*wanted.values()]), rtol=2e-5)


def test_a_schedule_that_has_ended_at_0_is_not_made_longer_in_silence():
  for keys in ({"schedule": "linear"}, {"schedule": "wsd"}, {"final_fraction": 0.0}):
    config_of(44, **keys, schedule_changes=((23, 24, "stretch"),))
    with pytest.raises(ValueError, match=r"set optimizer\.schedule_on_resume=restart to warm up"):
      config_of(44, **keys, schedule_changes=((24, 24, "stretch"),))


def test_a_change_that_is_not_one_is_dropped():
  same = ((14, 24, "stretch"),)
  assert config_of(24, schedule_changes=same).optimizer.schedule_changes == ()
  earlier = ((10, 20, "stretch"), *same)
  assert config_of(24, schedule_changes=earlier).optimizer.schedule_changes == earlier[:1]
  again = {"schedule_changes": earlier, "schedule_on_resume": "recompute"}
  assert config_of(44, **again).optimizer.schedule_changes == ()
  for wrong in (((1, 2),), (16,), ((1, 2, 3),)):
    with pytest.raises(ValueError, match="leave it out, it is filled in where a run resumes"):
      config_of(schedule_changes=wrong)


def test_stays_the_same_up_to_the_decay_whatever_the_number_of_steps():
  """So a decay may begin at any checkpoint of a longer run."""
  config = config_of(schedule="wsd", warmup_steps=2, decay_steps=5)
  short = schedule_of(config)
  long = schedules.learning_rate_schedule(config.optimizer, 1000)
  assert [float(short(step)) for step in range(19)] == [float(long(step)) for step in range(19)]
  assert float(short(20)) < float(long(20)) == PEAK


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"schedule": "wsd", "decay_steps": 24, "warmup_steps": 1}, "decay_steps=24: from 1 to 23"),
    ({"schedule": "wsd", "decay_steps": 0}, "decay_steps=0: from 1 to 23"),
    ({"decay_steps": 3}, "decay_steps=3 is about optimizer.schedule=wsd, and it is"),
    ({"decay": "1-sqrt"}, "is about optimizer.schedule=wsd, and it is 'cosine'; set"),
    ({"schedule": "wsd", "decay": "sqrt"}, "optimizer.decay='sqrt': one of linear, 1-sqrt"),
    ({"schedule": "constant", "final_fraction": 0.1}, "schedule=constant has no end"),
    ({"final_fraction": 1.5}, "final_fraction=1.5: from 0 to 1"),
    ({"schedule": "inverse_sqrt", "warmup_steps": 0}, "it falls from the warm-up on"),
    ({"schedule": "wds"}, "did you mean 'wsd'?"),
    ({"independent_weight_decay": True, "learning_rate": 0.0}, "learning_rate above 0"),
    ({"independent_weight_decay": True, "name": "lamb"}, "lamb does not use it"),
    ({"warmup_tokens": 1 << 20, "warmup_steps": 3}, "warmup_steps=3: set one of the two"),
    ({"decay_tokens": 1 << 20}, "is about optimizer.schedule=wsd"),
  ],
)
def test_what_does_not_go_together_is_refused(keys, said):
  with pytest.raises(ValueError, match=said.replace(".", r"\.").replace("?", r"\?")):
    config_of(**keys)
