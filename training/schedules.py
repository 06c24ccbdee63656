"""Learning-rate schedules by name: step -> learning rate. Each begins with a linear warm-up."""

import math

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

# Decay of a stable phase -> function of the share of it that is done -> what is left, from 1 to 0.
DECAYS = {
  "linear": lambda share: 1 - share,
  "1-sqrt": lambda share: 1 - jnp.sqrt(share),
}


# Keys with which all steps have the same learning rate -> their values.
CONSTANT = {
  "optimizer.warmup_steps": 0,
  "optimizer.warmup_tokens": 0,
  "optimizer.schedule": "constant",
  "optimizer.final_fraction": None,
  "optimizer.decay_steps": None,
  "optimizer.decay_tokens": 0,
  "optimizer.decay": "linear",
}


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
  """Returns the schedule of a finalized config.

  - `cosine` decays to `optimizer.final_fraction` of the peak. Source: arXiv:1608.03983.
  - `linear` does so in a line. Source: arXiv:2310.07831.
  - `constant` stays at the peak.
  - `wsd` (warm-up, stable, decay) stays, and decays in the last `optimizer.decay_steps`, in a line
    or by one minus the square root. Sources: arXiv:2404.06395, arXiv:2405.18392.
  - `inverse_sqrt` falls with the square root of the step after the warm-up. Source:
    arXiv:1706.03762, section 5.3.

  Args:
    config: finalized.
  """
  keys, steps = config.optimizer, config.training.steps
  peak, warmup = keys.learning_rate, keys.warmup_steps
  after = _after_warmup(keys, max(1, steps - warmup))
  if warmup == 0:
    return after
  # The first step has 1/warmup of the peak, not 0.
  return optax.join_schedules(
    [optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), after], [warmup]
  )


def _after_warmup(keys: ConfigDict, steps: int) -> optax.Schedule:
  """Returns the schedule by steps after the warm-up, of which there are `steps`."""
  peak, final = keys.learning_rate, keys.final_fraction
  if keys.schedule == "constant":
    return optax.constant_schedule(peak)
  if keys.schedule == "linear":
    return optax.linear_schedule(peak, peak * final, steps)
  if keys.schedule == "inverse_sqrt":
    return lambda step: peak * math.sqrt(keys.warmup_steps) / jnp.sqrt(step + 1 + keys.warmup_steps)
  if keys.schedule == "wsd":
    left = DECAYS[keys.decay]
    length = max(1, min(keys.decay_steps, steps))

    def stable_then_decaying(step):
      share = jnp.clip((step - (steps - length)) / length, 0.0, 1.0)
      return peak * (final + (1 - final) * left(share))

    return stable_then_decaying
  return optax.cosine_decay_schedule(peak, steps, alpha=final)
