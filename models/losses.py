"""Losses, as sums over the rows of a batch; cross-entropy, also of the vocabulary in chunks.

Sums of weighted losses and of weights are accumulated over microbatches, devices and evaluation
batches; they are divided once, for the global batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives
from partitioning.rules import Axes

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # each a scalar, float32 or wider
COUNTS = "expert_counts"  # the sum that is none: the tokens of each expert, of each layer


def cross_entropy(logits: Float[Array, "*X V"], targets: Int[Array, "*X"]) -> Float[Array, "*X"]:
  """Returns -log softmax(logits)[target], in nats; see `cross_entropy_and_normalizer`."""
  return cross_entropy_and_normalizer(logits, targets)[0]


def cross_entropy_and_normalizer(
  logits: Float[Array, "*X V"], targets: Int[Array, "*X"]
) -> tuple[Float[Array, "*X"], Float[Array, "*X"]]:
  """Returns -log softmax(logits)[target] in nats, and log(sum(exp(logits))).

  The target's logit is selected by a masked sum: a gather along a dim that is split over `tensor`
  would need the full row on each device.
  """
  logits = logits.astype(wide_dtype(logits.dtype))
  normalizer = jax.nn.logsumexp(logits, axis=-1)
  classes = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  return normalizer - picked_logits(logits, targets, classes), normalizer


def is_likeliest(logits: Float[Array, "*X V"], targets: Int[Array, "*X"]) -> Bool[Array, "*X"]:
  """Returns whether the target is the first class with the largest logit."""
  classes = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  return targets == _first_largest(logits, jnp.max(logits, axis=-1), classes)


def in_chunk(value: Any, dtype: jnp.dtype, first: jax.Array | int) -> jax.Array:
  """Returns a constant that JAX leaves in the loop over chunks.

  It moves what is the same in each iteration out of a loop, a constant as an array of the size that
  it is broadcast to: each chunk would read two arrays as large as its logits.

  Args:
    value: of the constant.
    dtype: of the constant.
    first: the id of the chunk's first class, which is another in each iteration.
  """
  return jnp.asarray(value, dtype) + (0 * jnp.asarray(first)).astype(dtype)


def picked_logits(logits: jax.Array, targets: jax.Array, classes: jax.Array) -> jax.Array:
  """Returns the target's logit, 0 where it is not among the classes."""
  hot = targets[..., None] == classes.reshape((1,) * targets.ndim + (-1,))
  return jnp.sum(jnp.where(hot, logits, in_chunk(0, logits.dtype, classes[0])), axis=-1)


def _first_largest(logits: jax.Array, largest: jax.Array, classes: jax.Array) -> jax.Array:
  """Returns the first of the classes whose logit is the largest."""
  none = in_chunk(jnp.iinfo(classes.dtype).max, classes.dtype, classes[0])
  classes = classes.reshape((1,) * largest.ndim + (-1,))
  return jnp.min(jnp.where(logits == largest[..., None], classes, none), axis=-1)


@dataclasses.dataclass(frozen=True)
class TokenNumbers:
  """Numbers of each token, from its logits: of all classes at once, or of one chunk at a time.

  Attributes:
    names: among `loss`, the cross-entropy in nats, `normalizer`, log(sum(exp(logits))), and
      `likeliest`, whether the target is the first class with the largest logit.
    finished: makes logits, given with the id of the first, those that the losses are of.
    temperature: that these are divided by.
  """

  names: tuple[str, ...]
  finished: Callable[[jax.Array, jax.Array | int], jax.Array]
  temperature: float = 1.0

  @property
  def results(self) -> int:
    """Returns how many numbers a token has."""
    return len(self.names)

  def of_all(self, logits: Float[Array, "*X V"], targets: Int[Array, "*X"]) -> list[jax.Array]:
    """Returns the numbers, from finished logits of all classes."""
    logits = self._tempered(logits)
    loss, normalizer = cross_entropy_and_normalizer(logits, targets)
    found = {"loss": loss, "normalizer": normalizer}
    if "likeliest" in self.names:
      found["likeliest"] = is_likeliest(logits, targets).astype(loss.dtype)
    return [found[name] for name in self.names]

  def chunk(self, logits: Float[Array, "*X V"], first: jax.Array | int) -> Float[Array, "*X V"]:
    """Returns finished logits of classes from `first` on, over the temperature."""
    return self._tempered(self.finished(logits, first))

  def _tempered(self, logits: Float[Array, "*X V"]) -> Float[Array, "*X V"]:
    return logits if self.temperature == 1.0 else logits / self.temperature

  def start(self, targets: Int[Array, "*X"], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Returns what is known of each token's logits before the first chunk."""
    found = {name: jnp.zeros(targets.shape, dtype) for name in ("total", "picked")}
    found["largest"] = jnp.full(targets.shape, jnp.finfo(dtype).min, dtype)
    if "likeliest" in self.names:
      found["class"] = jnp.zeros_like(targets)
    return found

  def add(
    self,
    found: dict[str, jax.Array],
    heads: Sequence[Float[Array, "*X V"]],
    targets: Int[Array, "*X"],
    first: jax.Array | int,
  ) -> dict[str, jax.Array]:
    """Returns what is known with the one head's logits of classes from `first` on, not finished.

    The chunks come in the order of their classes.
    The online softmax of arXiv:1805.02867: sums are relative to the largest logit so far.
    """
    [logits] = heads
    logits = self.chunk(logits, first)
    classes = first + jnp.arange(logits.shape[-1], dtype=targets.dtype)
    here = jnp.max(jax.lax.stop_gradient(logits), axis=-1)
    largest = jnp.maximum(found["largest"], here)
    picked = found["picked"] + picked_logits(logits, targets, classes)
    total = found["total"] * jnp.exp(found["largest"] - largest)
    total += jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)
    known = {"total": total, "picked": picked, "largest": largest}
    if "class" in found:
      one = _first_largest(logits, here, classes)
      known["class"] = jnp.where(here > found["largest"], one, found["class"])
    return known

  def finish(
    self, found: dict[str, jax.Array], targets: Int[Array, "*X"], axes: Axes
  ) -> tuple[jax.Array, ...]:
    """Returns the numbers; `axes` split the classes, each device having seen its own part."""
    own, total, picked = found["largest"], found["total"], found["picked"]
    largest = jax.lax.pmax(own, axes) if axes else own
    if axes:
      total = collectives.total(total * jnp.exp(own - largest), axes)
      picked = collectives.total(picked, axes)
    normalizer = jnp.log(total) + largest
    numbers = {"loss": normalizer - picked, "normalizer": normalizer}
    if "class" in found:
      none = jnp.asarray(jnp.iinfo(targets.dtype).max, targets.dtype)
      first = jnp.where(own == largest, found["class"], none)
      first = jax.lax.pmin(first, axes) if axes else first
      numbers["likeliest"] = (targets == first).astype(normalizer.dtype)
    return tuple(numbers[name] for name in self.names)


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
