"""Clipping of gradients other than by one norm of all: by group, and by a quantile of past norms.

Clipping by one limit for the norm of all gradients is the step's (`training/step.py`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


class Clipped(NamedTuple):
  """The state of an optimizer whose gradients are clipped by a quantile.

  Attributes:
    count: int32 scalar, the number of updates.
    norms: float32 [W], those of the last W gradients, in a ring; NaN where there is none yet.
    inner: the optimizer's own state.
  """

  count: jax.Array
  norms: jax.Array
  inner: Any


def clipped(
  keys: ConfigDict, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Returns an optimizer that clips what it is given, apart from what the step clips.

  Args:
    keys: the section `optimizer` of a config.
    optimizer: what updates the parameters.
  """
  if keys.clip_quantile:
    return by_quantile(optimizer, keys.clip_quantile, keys.clip_window)
  if keys.clip_groups and keys.clip_norm:
    return by_norm(optimizer, keys.clip_norm)
  return optimizer


def norm_of_all(keys: ConfigDict) -> float:
  """Returns the limit for the norm of all gradients, which the step applies; 0: none."""
  return 0.0 if keys.clip_groups or keys.clip_quantile else keys.clip_norm


def by_norm(optimizer: optax.GradientTransformation, limit: float) -> optax.GradientTransformation:
  """Returns an optimizer whose gradients are scaled down to a norm of at most `limit`."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return optimizer.update(_scaled(updates, optax.tree.norm(updates), limit), state, params)

  return optax.GradientTransformation(optimizer.init, update)


def by_quantile(
  optimizer: optax.GradientTransformation, quantile: float, window: int
) -> optax.GradientTransformation:
  """Returns an optimizer that clips to a quantile of the last norms, the new one among them.

  Source: arXiv:2007.14469 (AutoClip), with a window.

  Args:
    optimizer: what updates the parameters.
    quantile: above 0 and below 1.
    window: W, how many norms.
  """

  def init(params: Any) -> Clipped:
    norms = jnp.full((window,), jnp.nan, jnp.float32)
    return Clipped(jnp.zeros((), jnp.int32), norms, optimizer.init(params))

  def update(updates: Any, state: Clipped, params: Any = None) -> tuple[Any, Clipped]:
    norm = optax.tree.norm(updates)
    norms = state.norms.at[state.count % window].set(norm.astype(jnp.float32))
    limit = jnp.nanquantile(norms, quantile).astype(norm.dtype)
    updates, inner = optimizer.update(_scaled(updates, norm, limit), state.inner, params)
    return updates, Clipped(state.count + 1, norms, inner)

  return optax.GradientTransformation(init, update)


def _scaled(updates: Any, norm: jax.Array, limit: jax.Array | float) -> Any:
  """Returns gradients of this norm, scaled down to the limit."""
  scale = limit / jnp.maximum(norm, limit)
  return jax.tree.map(lambda x: x * scale.astype(x.dtype), updates)
