"""Updates of an optimizer alone, by given gradients."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state
from training.setup import Job

Leaves = dict[str, np.ndarray]


def updated(job: Job, grads: Iterable[Any]) -> tuple[Leaves, Leaves]:
  """Returns a job's parameters by name, before and after an update by each of these gradients."""
  state = first_state(job)
  params, optimizer = state.params, state.optimizer
  before, update = named_leaves(jax.device_get(params)), _compiled(job.program.optimizer)
  for given in grads:
    optimizer, params = update(given, optimizer, params)
  return before, named_leaves(jax.device_get(params))


@functools.lru_cache(maxsize=4)
def _compiled(made: optax.GradientTransformation) -> Callable:
  @jax.jit
  def update(grads, optimizer, params):
    with jax.numpy_dtype_promotion("standard"):
      updates, optimizer = made.update(grads, optimizer, params)
      return optimizer, optax.apply_updates(params, updates)

  return update
