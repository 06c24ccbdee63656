"""The optimizer and its learning-rate schedule, both optax's."""

import jax
import optax
from ml_collections import ConfigDict

from partitioning.rules import named_leaves

# Parameters that weight decay leaves alone, by the last part of their name.
NOT_DECAYED = ("scale", "bias")


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
  """Returns step -> learning rate: linear warm-up, then a cosine to a tenth, or constant."""
  peak, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
  if config.optimizer.schedule == "constant":
    after = optax.constant_schedule(peak)
  else:
    after = optax.cosine_decay_schedule(peak, max(1, config.training.steps - warmup), alpha=0.1)
  if warmup == 0:
    return after
  # The first step already moves: it is 1/warmup of the peak, not 0.
  return optax.join_schedules(
    [optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), after], [warmup]
  )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """Returns AdamW (arXiv:1711.05101) or SGD, without clipping, which the step does itself."""
  keys = config.optimizer
  schedule = learning_rate_schedule(config)
  if keys.name == "sgd":
    return optax.sgd(schedule, momentum=keys.momentum or None)
  return optax.adamw(
    schedule,
    b1=keys.beta_1,
    b2=keys.beta_2,
    eps=keys.epsilon,
    weight_decay=keys.weight_decay,
    mask=decayed,
  )


def decayed(params):
  """Returns a tree of booleans: True for kernels and tables, False for scales and biases."""
  flags = [not name.endswith(NOT_DECAYED) for name in named_leaves(params)]
  return jax.tree.unflatten(jax.tree.structure(params), flags)
