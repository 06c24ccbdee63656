"""Losses, as sums over the rows of a batch; cross-entropy, also of the vocabulary in chunks.

Sums of weighted losses and of weights are accumulated over microbatches, devices and evaluation
batches; they are divided once, for the global batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from models.spec import LORA_B
from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives
from partitioning.rules import Axes

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]  # each a scalar, float32 or wider


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
  return normalizer - _picked(logits, targets, classes), normalizer


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


def _picked(logits: jax.Array, targets: jax.Array, classes: jax.Array) -> jax.Array:
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
  """

  names: tuple[str, ...]
  finished: Callable[[jax.Array, jax.Array | int], jax.Array]

  @property
  def results(self) -> int:
    """Returns how many numbers a token has."""
    return len(self.names)

  def of_all(self, logits: Float[Array, "*X V"], targets: Int[Array, "*X"]) -> list[jax.Array]:
    """Returns the numbers, from finished logits of all classes."""
    loss, normalizer = cross_entropy_and_normalizer(logits, targets)
    found = {"loss": loss, "normalizer": normalizer}
    if "likeliest" in self.names:
      found["likeliest"] = is_likeliest(logits, targets).astype(loss.dtype)
    return [found[name] for name in self.names]

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
    logits: Float[Array, "*X V"],
    targets: Int[Array, "*X"],
    first: jax.Array | int,
  ) -> dict[str, jax.Array]:
    """Returns what is known with the logits of classes from `first` on, not finished.

    The chunks come in the order of their classes.
    The online softmax of arXiv:1805.02867: sums are relative to the largest logit so far.
    """
    logits = self.finished(logits, first)
    classes = first + jnp.arange(logits.shape[-1], dtype=targets.dtype)
    here = jnp.max(jax.lax.stop_gradient(logits), axis=-1)
    largest = jnp.maximum(found["largest"], here)
    picked = found["picked"] + _picked(logits, targets, classes)
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


# ------------------------------ preferences ------------------------------
# Direct preference optimization (DPO): pairs of answers, of which one was preferred. Sources:
# arXiv:2305.18290, equation 7; with label smoothing, the conservative DPO of
# https://ericmitchell.ai/cdpo.pdf, equation 3.

SIDES = ("chosen", "rejected")


def pair_sums(model: Any, batch: Batch, key: Key[Array, ""] | None = None) -> Sums:
  """Returns the sums of DPO over pairs: the loss, the rewards, and how many are ranked right.

  Args:
    model: a `Transformer`. With adapters, the reference is the model without them.
    batch: of the task `dpo`: `weights` [B] of the pairs; of each side (`chosen_`, `rejected_`)
      `tokens`, `targets` and `weights` [B, T]; and `reference_chosen` and `reference_rejected` [B],
      log p under the reference, which are read where there are no adapters.
    key: draws the dropout; None turns it off.
  """
  policy_PC, sums = log_probabilities(model, batch, key)
  if model.spec.lora.rank:
    reference_PC, _ = log_probabilities(_without_adapters(model), batch)
  else:
    sides = [batch[f"reference_{side}"] for side in SIDES]
    reference_PC = jnp.stack(sides, axis=1).astype(policy_PC.dtype)
  beta, smoothing = model.spec.dpo_beta, model.spec.dpo_label_smoothing
  return {**dpo(policy_PC, reference_PC, batch["weights"], beta, smoothing), **sums}


def log_probabilities(
  model: Any, batch: Batch, key: Key[Array, ""] | None = None
) -> tuple[Float[Array, "P 2"], Sums]:
  """Returns log p of both answers of each pair, and the sums of the model's blocks."""
  [losses_BT], weights_BT, sums = model.per_token(side_by_side(batch), key, ("loss",))
  total_B = jnp.sum(losses_BT * weights_BT.astype(losses_BT.dtype), axis=1)
  return -total_B.reshape(-1, len(SIDES)), sums


def _without_adapters(model: Any) -> Any:
  """Returns a model with the same parameters, but for adapters, which add nothing."""
  graphdef, state = nnx.split(model)

  def zeroed(path: tuple, leaf: Array) -> Array:
    return jnp.zeros_like(leaf) if LORA_B in jax.tree_util.keystr(path) else leaf

  return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(zeroed, state))


def side_by_side(batch: Batch) -> dict[str, Array]:
  """Returns both sides of pairs as rows of tokens: `tokens`, `targets`, `weights`, `segments`.

  Row 2 p is what was chosen of pair p, and row 2 p + 1 what was rejected: both are on the device of
  the pair.
  """
  found = {}
  for key in ("tokens", "targets", "weights"):
    both_PCT = jnp.stack([batch[f"{side}_{key}"] for side in SIDES], axis=1)
    found[key] = both_PCT.reshape(-1, both_PCT.shape[-1])
  return {**found, "segments": jnp.zeros_like(found["tokens"])}


def dpo(
  policy_PC: Float[Array, "P 2"],
  reference_PC: Float[Array, "P 2"],
  weights_P: Float[Array, " P"],
  beta: float,
  label_smoothing: float,
) -> Sums:
  """Returns the summed DPO loss of pairs, their rewards, and how many are ranked right.

  Args:
    policy_PC: log p of the chosen and of the rejected answer, of the model that is trained.
    reference_PC: likewise, of the reference.
    weights_P: of the pairs.
    beta: how strongly the model is kept near the reference.
    label_smoothing: the assumed share of pairs whose answers are the wrong way around.
  """
  rewards_PC = beta * (policy_PC - jax.lax.stop_gradient(reference_PC))
  margin_P = rewards_PC[:, 0] - rewards_PC[:, 1]
  losses_P = -jax.nn.log_sigmoid(margin_P)
  if label_smoothing:
    flipped_P = -jax.nn.log_sigmoid(-margin_P)
    losses_P = (1 - label_smoothing) * losses_P + label_smoothing * flipped_P
  right_P = (margin_P > 0).astype(margin_P.dtype)
  return {
    "loss": weighted_sum(losses_P, weights_P),
    "reward_chosen": weighted_sum(rewards_PC[:, 0], weights_P),
    "reward_rejected": weighted_sum(rewards_PC[:, 1], weights_P),
    "reward_margin": weighted_sum(margin_P, weights_P),
    "reward_accuracy": weighted_sum(right_P, weights_P),
  }
