"""Losses, as sums over the rows of a batch; cross-entropy, also vocabulary-parallel.

Sums of weighted losses and of weights are accumulated over microbatches, devices and evaluation
batches; they are divided once, for the global batch.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.dtypes import wide_dtype
from partitioning.dims import Axes
from partitioning.parallel import collectives

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # each a scalar, float32 or wider


def cross_entropy(
  logits: Float[Array, "*X V"], targets: Int[Array, "*X"], axes: Axes = ()
) -> Float[Array, "*X"]:
  """Returns -log softmax(logits)[target], in nats; see `cross_entropy_and_normalizer`."""
  return cross_entropy_and_normalizer(logits, targets, axes)[0]


def cross_entropy_and_normalizer(
  logits: Float[Array, "*X V"], targets: Int[Array, "*X"], axes: Axes = ()
) -> tuple[Float[Array, "*X"], Float[Array, "*X"]]:
  """Returns -log softmax(logits)[target] in nats, and log(sum(exp(logits))).

  The target's logit is selected by a masked sum: a gather along a dim that is split over `tensor`
  would need the full row on each device.

  Args:
    logits: of all classes, or a device's shard of them.
    targets: class ids, global.
    axes: mesh axes that split the classes, inside a `jax.shard_map`.
  """
  logits = logits.astype(wide_dtype(logits.dtype))
  classes = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  if axes:
    first = jax.lax.axis_index(axes) * logits.shape[-1]
    targets = targets - first.astype(targets.dtype)
  hot = targets[..., None] == classes.reshape((1,) * targets.ndim + (-1,))
  picked = jnp.sum(jnp.where(hot, logits, jnp.zeros_like(logits)), axis=-1)
  if not axes:
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return normalizer - picked, normalizer
  largest = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
  total = collectives.total(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1), axes)
  normalizer = jnp.log(total) + largest
  return normalizer - collectives.total(picked, axes), normalizer


def is_likeliest(
  logits: Float[Array, "*X V"], targets: Int[Array, "*X"], axes: Axes = ()
) -> Bool[Array, "*X"]:
  """Returns whether the target is the first class with the largest logit; arguments as above."""
  classes = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  if axes:
    classes = classes + (jax.lax.axis_index(axes) * logits.shape[-1]).astype(targets.dtype)
    largest = jax.lax.pmax(largest, axes)
  none = jnp.asarray(jnp.iinfo(targets.dtype).max, targets.dtype)
  classes = classes.reshape((1,) * targets.ndim + (-1,))
  first = jnp.min(jnp.where(logits == largest, classes, none), axis=-1)
  return targets == (jax.lax.pmin(first, axes) if axes else first)


def weighted_sum(losses: Float[Array, "*X"], weights: Float[Array, "*X"]) -> Float[Array, ""]:
  """Returns the sum of losses times weights, in the dtype of the losses."""
  return jnp.sum(losses * weights.astype(losses.dtype))


def classification(logits_BO: Float[Array, "B O"], batch: Batch) -> Sums:
  """Returns the summed weighted cross-entropy of the labels, and the number of correct ones."""
  loss_B = cross_entropy(logits_BO, batch["targets"])
  weights_B = batch["weights"].astype(loss_B.dtype)
  right_B = jax.lax.argmax(logits_BO, 1, batch["targets"].dtype) == batch["targets"]
  correct = jnp.sum(jnp.where(right_B, weights_B, jnp.zeros_like(weights_B)))
  return {"loss": jnp.sum(loss_B * weights_B), "correct": correct}


def squared_error(outputs_BO: Float[Array, "B O"], batch: Batch) -> Sums:
  """Returns the weighted sum over rows of the squared error summed over outputs."""
  wide = wide_dtype(outputs_BO.dtype)
  error_BO = outputs_BO.astype(wide) - batch["targets"].astype(wide)
  return {"loss": weighted_sum(jnp.sum(error_BO**2, axis=-1), batch["weights"])}
