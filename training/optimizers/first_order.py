"""Optimizers that see each parameter by itself: SGD, Adafactor, schedule-free AdamW.

SGD and Adafactor are optax's, with the arguments that the table of optimizers gives.

The parameters of schedule-free AdamW are the average of iterates that take AdamW's steps. Source:
arXiv:2405.15682, algorithm 1. Gradients are taken between the average and the iterates, at
`gradient_point`, which the step asks for. The train state holds the average, not that point: what
reads the parameters (evaluation, sampling, export, a run that starts from them) reads those that
are to be evaluated.
"""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partitioning.dtypes import wide_dtype
from partitioning.rules import named_leaves
from training.state import merged, split


def sgd(learning_rate, momentum=0.0, nesterov=False, accumulator_dtype=None):
  """Returns stochastic gradient descent; a momentum of 0 has no state.

  Raises:
    ValueError: Nesterov's momentum without a momentum.
  """
  if nesterov and not momentum:
    raise ValueError("optimizer.arguments: nesterov=True needs optimizer.momentum above 0")
  return optax.sgd(learning_rate, momentum or None, nesterov, accumulator_dtype)


def adafactor(learning_rate, weight_decay=0.0, mask=None, **arguments):
  """Returns optax's Adafactor, with a decoupled weight decay. Source: arXiv:1804.04235.

  Args:
    learning_rate: relative to the root mean square of a parameter, unless
      `multiply_by_parameter_scale` is False.
    weight_decay: times the learning rate, which optax's own `weight_decay_rate` is not.
    mask: parameters -> which of them decay.
    **arguments: of `optax.adafactor`.
  """
  optimizer = optax.adafactor(learning_rate, weight_decay_mask=mask, **arguments)
  if not weight_decay:
    return optimizer  # whose state, and its names in a checkpoint, are then optax's

  def taken_off(step):
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    return -weight_decay * rate

  return optax.chain(optimizer, optax.add_decayed_weights(taken_off, mask))


_OURS = [*inspect.signature(adafactor).parameters.values()][:3]
_OPTAX = inspect.signature(optax.adafactor).parameters.values()
# What `optimizer.arguments` may give.
adafactor.__signature__ = inspect.Signature(
  [*_OURS, *(one for one in _OPTAX if one.name not in ("learning_rate", "weight_decay_mask"))]
)


class ScheduleFree(NamedTuple):
  """The state of schedule-free AdamW.

  Attributes:
    count: int32 scalar, the number of updates.
    weight: scalar, the weights of all iterates in the average over that of the last one.
    rate: scalar, the learning rate of the last update.
    beta_1: scalar, the average's share of the point where the next gradients are taken.
    iterates: a tree like the parameters.
    second_moment: likewise, of the gradients.
  """

  count: jax.Array
  weight: jax.Array
  rate: jax.Array
  beta_1: jax.Array
  iterates: Any
  second_moment: Any


def schedule_free_adamw(
  learning_rate: optax.ScalarOrSchedule,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  mask: Any = None,
) -> optax.GradientTransformation:
  """Returns schedule-free AdamW.

  Args:
    learning_rate: a warm-up, then constant: the average takes the place of a decay.
    b1: the average's share of the points where gradients are taken; at 0 they are the iterates.
    b2: decay of the second moment.
    eps: added to its root.
    weight_decay: of those points, decoupled, times the learning rate.
    mask: parameters -> which of them decay.

  Raises:
    ValueError: beta_1 is not from 0 to below 1.
  """
  if not 0 <= b1 < 1:
    raise ValueError(f"optimizer.beta_1={b1}: from 0 to below 1, such as 0.9")
  steps = optax.add_decayed_weights(weight_decay, mask)

  def init(params: Any) -> ScheduleFree:
    dtype = _scalars(params)
    zero = jnp.zeros((), dtype)
    return ScheduleFree(
      count=jnp.zeros((), jnp.int32),
      weight=zero,
      rate=zero,
      beta_1=jnp.asarray(b1, dtype),
      iterates=params,
      second_moment=jax.tree.map(jnp.zeros_like, params),
    )

  def update(grads: Any, state: ScheduleFree, params: Any = None) -> tuple[Any, ScheduleFree]:
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    rate, count = jnp.asarray(rate, state.rate.dtype), state.count + 1
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.second_moment, grads)
    correction = 1 - b2 ** count.astype(rate.dtype)
    scaled = jax.tree.map(
      lambda g, v: g / (jnp.sqrt(v / correction.astype(v.dtype)) + eps), grads, second
    )
    point = jax.tree.map(lambda x, z: _between(x, z, state.beta_1), params, state.iterates)
    scaled, _ = steps.update(scaled, steps.init(point), point)
    iterates = jax.tree.map(lambda z, u: z - rate.astype(z.dtype) * u, state.iterates, scaled)
    # An iterate weighs as the square of its learning rate: in sums of these, after a million steps,
    # float32 would lose the next one.
    weight = 1 + state.weight * jnp.where(rate > 0, state.rate / rate, 1.0) ** 2
    updates = jax.tree.map(lambda x, z: (z - x) / weight.astype(x.dtype), params, iterates)
    beta_1 = jnp.full_like(state.beta_1, b1)
    return updates, ScheduleFree(count, weight, rate, beta_1, iterates, second)

  return optax.GradientTransformation(init, update)


def gradient_point(params: Any, state: Any) -> Any:
  """Returns where the gradients of a step are taken: the parameters, but for schedule-free ones.

  Args:
    params: nested dict of the trained parameters.
    state: the optimizer's, of any kind; with groups only some parameters may be schedule-free.
  """
  for found in jax.tree.leaves(state, is_leaf=_is_schedule_free):
    if _is_schedule_free(found):
      iterates = named_leaves(found.iterates)
      ours, others = split(params, iterates.__contains__)
      between = [
        _between(x, iterates[name], found.beta_1) for name, x in named_leaves(ours).items()
      ]
      params = merged(jax.tree.unflatten(jax.tree.structure(ours), between), others)
  return params


def averaged(state: Any) -> set[str]:
  """Returns the names of the parameters that are schedule-free, by the optimizer's state."""
  nodes = filter(_is_schedule_free, jax.tree.leaves(state, is_leaf=_is_schedule_free))
  return {name for found in nodes for name in named_leaves(found.iterates)}


def _is_schedule_free(node: Any) -> bool:
  return isinstance(node, ScheduleFree)


def _between(average: jax.Array, iterate: jax.Array, beta_1: jax.Array) -> jax.Array:
  return iterate + beta_1.astype(iterate.dtype) * (average - iterate)


def _scalars(params: Any) -> jnp.dtype:
  """Returns the dtype of the state's scalars: float32 or wider."""
  return jnp.result_type(*[wide_dtype(x.dtype) for x in jax.tree.leaves(params)])
