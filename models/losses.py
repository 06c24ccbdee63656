"""Cross-entropy, also over a vocabulary that mesh axes split."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.dtypes import wide_dtype
from partitioning.dims import Axes
from partitioning.parallel import products


def cross_entropy(
  logits: Float[Array, "*X V"], targets: Int[Array, "*X"], axes: Axes = ()
) -> Float[Array, "*X"]:
  """Returns -log softmax(logits)[target], in nats.

  The target's logit is picked by a masked sum: a gather along a dim that is split over
  `tensor` would need the whole row on each device.

  Args:
    logits: of all classes, or of a device's share of them.
    targets: among all classes.
    axes: of the mesh, inside of a `jax.shard_map`, over which the classes are split.
  """
  logits = logits.astype(wide_dtype(logits.dtype))
  classes = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  if axes:
    first = jax.lax.axis_index(axes) * logits.shape[-1]
    targets = targets - first.astype(targets.dtype)
  hot = targets[..., None] == classes.reshape((1,) * targets.ndim + (-1,))
  picked = jnp.sum(jnp.where(hot, logits, jnp.zeros_like(logits)), axis=-1)
  if not axes:
    return jax.nn.logsumexp(logits, axis=-1) - picked
  largest = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
  total = products.total(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1), axes)
  return jnp.log(total) + largest - products.total(picked, axes)
