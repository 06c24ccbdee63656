"""Learning-rate schedules by name: step -> learning rate. Each begins with a linear warm-up."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

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
  "optimizer.schedule_changes": (),
}


@dataclasses.dataclass(frozen=True)
class Curve:
  """A schedule for some number of steps.

  Attributes:
    rate: step -> learning rate.
    falls_from: the step with which its decay begins.
    steps: at which it ends.
  """

  rate: optax.Schedule
  falls_from: int
  steps: int


def learning_rate_schedule(keys: Any, steps: int) -> optax.Schedule:
  """Returns the schedule of a run.

  - `cosine` decays to `optimizer.final_fraction` of the peak. Source: arXiv:1608.03983.
  - `linear` does so in a line. Source: arXiv:2310.07831.
  - `constant` stays at the peak.
  - `wsd` (warm-up, stable, decay) stays, and decays in the last `optimizer.decay_steps`, in a line
    or by one minus the square root. Sources: arXiv:2404.06395, arXiv:2405.18392.
  - `inverse_sqrt` falls with the square root of the step after the warm-up. Source:
    arXiv:1706.03762, section 5.3.

  Where a run has resumed with another number of steps (`optimizer.schedule_changes`), it continues
  from the learning rate that it had reached.

  Args:
    keys: the section `optimizer` of a finalized config, or an `OptimizerSpec`.
    steps: of the run.
  """
  changes = keys.schedule_changes
  totals = [*(before for _, before, _ in changes), steps]
  curve = _from_the_first_step(keys, totals[0])
  for (done, _, how), total in zip(changes, totals[1:], strict=True):
    changed = _restarted if how == "restart" else _stretched
    curve = changed(curve, keys, done, total)
  return curve.rate


def change_text(old: Mapping[str, Any], keys: Any, total: int, steps: int, done: int) -> str:
  """Returns what becomes of the learning rate where a run resumes; "" where nothing has changed.

  Args:
    old: the section `optimizer` of the checkpoint's config.
    keys: that of the finalized config.
    total: the steps of the run up to then.
    steps: of the run now.
    done: the step to resume from.
  """
  old, changes = ConfigDict({"schedule_changes": (), **old}), keys.schedule_changes
  reached = float(learning_rate_schedule(old, total)(done))
  following = float(learning_rate_schedule(keys, steps)(done))
  same = math.isclose(reached, following, rel_tol=1e-3)
  if (steps == total and same) or done >= steps:
    return ""
  how = f"the schedule is that of a run of {steps:,} steps, {keys.warmup_steps:,} of them warm-up"
  if changes and changes[-1][0] == done and changes[-1][2] == "restart":
    peak = f"{keys.learning_rate:.3g}"
    how = f"it warms up again from {reached:.3g} to {peak}, and decays over the further steps"
  elif changes and done >= total:
    how = (
      "it stays where it has ended; --config.optimizer.schedule_on_resume=restart warms up again"
    )
  elif changes:
    how = f"the rest of its schedule ({keys.schedule}) is stretched over the rest of the steps"
  number = f"{following:.3g}" + ("" if same else f" instead of {reached:.3g}")
  return (
    f"training.steps was {total:,} and is {steps:,}; learning rate of step {done + 1:,}: {number}; "
    f"{how}"
  )


def _from_the_first_step(keys: Any, steps: int) -> Curve:
  peak, warmup = keys.learning_rate, keys.warmup_steps
  falls_from = steps - keys.decay_steps if keys.schedule == "wsd" else warmup
  after = _after_warmup(keys, max(1, steps - warmup))
  if warmup == 0:
    return Curve(after, falls_from, steps)
  # The first step has 1/warmup of the peak, not 0.
  rising = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
  return Curve(optax.join_schedules([rising, after], [warmup]), falls_from, steps)


def _stretched(curve: Curve, keys: Any, done: int, steps: int) -> Curve:
  """Returns a curve whose decay, or what is left of it after `done` steps, ends at `steps`.

  The learning rate does not jump. After the end of the curve it stays.
  """
  old = new = max(done, curve.falls_from)  # what is stretched begins there, before and now
  if keys.schedule == "wsd" and done <= curve.falls_from:
    new = max(done, steps - (curve.steps - old))  # a decay that is to come stays as long as it was
  share = max(0, curve.steps - old) / max(1, steps - new)

  def rate(step):
    step = jnp.asarray(step, jnp.result_type(float))
    return curve.rate(jnp.where(step < new, jnp.minimum(step, old), old + (step - new) * share))

  return Curve(rate, new, steps)


def _restarted(curve: Curve, keys: Any, done: int, steps: int) -> Curve:
  """Returns a curve that rises to the peak again after `done` steps, and decays until `steps`."""
  warmup = min(keys.warmup_steps, steps - done)
  after = _after_warmup(keys, max(1, steps - done - warmup))

  def rate(step):
    step = jnp.asarray(step, jnp.result_type(float))
    reached = curve.rate(done)
    share = (step - done + 1) / max(1, warmup)
    rising = reached + (keys.learning_rate - reached) * share
    again = jnp.where(step < done + warmup, rising, after(jnp.maximum(step - done - warmup, 0)))
    return jnp.where(step < done, curve.rate(step), again)

  falls_from = max(done, steps - keys.decay_steps) if keys.schedule == "wsd" else done + warmup
  return Curve(rate, falls_from, steps)


def _after_warmup(keys: Any, steps: int) -> optax.Schedule:
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
