"""Adafactor of optax, with the decoupled weight decay that the other optimizers have."""

from typing import Any

import jax.numpy as jnp
import optax


def adafactor(
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: float = 0.0,
  mask: Any = None,
  min_dim_size_to_factor: int = 128,
  decay_rate: float = 0.8,
  decay_offset: int = 0,
  multiply_by_parameter_scale: bool = True,
  clipping_threshold: float | None = 1.0,
  momentum: float | None = None,
  dtype_momentum: Any = jnp.float32,
  weight_decay_rate: float | None = None,
  eps: float = 1e-30,
  factored: bool = True,
) -> optax.GradientTransformation:
  """Returns Adafactor. Source: arXiv:1804.04235.

  Args:
    learning_rate: relative to the root mean square of a parameter, unless
      `multiply_by_parameter_scale` is False.
    weight_decay: decoupled, times the learning rate.
    mask: parameters -> which of them decay.
    min_dim_size_to_factor: both of the largest dims of a factored parameter are at least this.
    decay_rate: exponent c of the second moment's decay, 1 - step ** -c.
    decay_offset: step from which that counts.
    multiply_by_parameter_scale: as above.
    clipping_threshold: limit of an update's root mean square; None: none.
    momentum: decay of the first moment; None: there is none.
    dtype_momentum: of the first moment.
    weight_decay_rate: optax's own decay, which is not times the learning rate.
    eps: added to squared gradients.
    factored: whether second moments are factored.
  """
  optimizer = optax.adafactor(
    learning_rate,
    min_dim_size_to_factor=min_dim_size_to_factor,
    decay_rate=decay_rate,
    decay_offset=decay_offset,
    multiply_by_parameter_scale=multiply_by_parameter_scale,
    clipping_threshold=clipping_threshold,
    momentum=momentum,
    dtype_momentum=dtype_momentum,
    weight_decay_rate=weight_decay_rate,
    eps=eps,
    factored=factored,
    weight_decay_mask=mask,
  )
  if not weight_decay:
    return optimizer  # whose state, and its names in a checkpoint, are then optax's

  def taken_off(step):
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    return -weight_decay * rate

  return optax.chain(optimizer, optax.add_decayed_weights(taken_off, mask))
