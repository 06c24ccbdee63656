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


def cosine_to_14(s):
  """The first 14 of 24 steps, of which 4 are warm-up."""
  return (s + 1) / 4 if s < 4 else cosine((s - 4) / 20)


# name -> (keys, changes of training.steps, then, step -> learning rate over the peak)
CHANGED = {
  "cosine, in the middle": (
    {},
    [(14, 24, "stretch")],
    44,
    lambda s: cosine_to_14(s) if s < 14 else cosine(0.5 + 0.5 * (s - 14) / 30),
  ),
  "cosine, twice": (
    {},
    [(14, 24, "stretch"), (29, 44, "stretch")],
    59,
    lambda s: (
      cosine_to_14(s)
      if s < 14
      else cosine(0.5 + 0.5 * (s - 14) / 30)
      if s < 29
      else cosine(0.75 + 0.25 * (s - 29) / 30)
    ),
  ),
  "cosine, after the end": (
    {},
    [(24, 24, "stretch")],
    44,
    lambda s: (s + 1) / 4 if s < 4 else cosine(min(1, (s - 4) / 20)),
  ),
  "cosine, after the end, restarted": (
    {},
    [(24, 24, "restart")],
    44,
    lambda s: (
      ((s + 1) / 4 if s < 4 else cosine((s - 4) / 20))
      if s < 24
      else 0.1 + 0.9 * (s - 23) / 4
      if s < 28
      else cosine((s - 28) / 16)
    ),
  ),
  "wsd, before its decay": (
    {"schedule": "wsd", "decay_steps": 4},
    [(14, 24, "stretch")],
    44,
    lambda s: min(1, (s + 1) / 4) if s < 40 else 1 - (s - 40) / 4,
  ),
  "wsd, in its decay": (
    {"schedule": "wsd", "decay_steps": 4},
    [(22, 24, "stretch")],
    44,
    lambda s: (
      min(1, (s + 1) / 4) if s < 20 else 1 - (s - 20) / 4 if s < 22 else 0.5 - 0.5 * (s - 22) / 22
    ),
  ),
  "wsd, fewer than its decay": (
    {"schedule": "wsd", "decay_steps": 8},
    [(14, 24, "stretch")],
    18,
    lambda s: min(1, (s + 1) / 4) if s < 14 else 1 - min(1, (s - 14) / 4),
  ),
  "wsd, after the end, restarted": (
    {"schedule": "wsd", "decay_steps": 4},
    [(24, 24, "restart")],
    44,
    lambda s: (
      (min(1, (s + 1) / 4) if s < 20 else 1 - (s - 20) / 4)
      if s < 24
      else min(1, (s - 23) / 4)
      if s < 40
      else 1 - (s - 40) / 4
    ),
  ),
  "inverse_sqrt": (
    {"schedule": "inverse_sqrt"},
    [(14, 24, "stretch")],
    44,
    lambda s: (s + 1) / 4 if s < 4 else math.sqrt(4 / (s + 1)),
  ),
  "inverse_sqrt, restarted": (
    {"schedule": "inverse_sqrt"},
    [(15, 24, "restart")],
    44,
    lambda s: (
      ((s + 1) / 4 if s < 4 else math.sqrt(4 / (s + 1)))
      if s < 15
      else 0.5 + 0.5 * (s - 14) / 4
      if s < 19
      else math.sqrt(4 / (s - 19 + 5))
    ),
  ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_where_the_number_of_steps_has_changed(name):
  keys, changes, steps, after = CHANGED[name]
  config = config_of(steps, warmup_steps=WARMUP, **keys, schedule_changes=tuple(changes))
  wanted = [PEAK * after(step) for step in range(steps)]
  schedule = schedule_of(config)
  with jax.numpy_dtype_promotion("standard"):
    found = jax.jit(jax.vmap(schedule))(np.arange(steps, dtype=np.int32))
  np.testing.assert_allclose(found, wanted, rtol=2e-5)


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
