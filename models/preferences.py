"""Direct preference optimization (DPO): pairs of answers, of which one was preferred.

Sources: arXiv:2305.18290, equation 7; with label smoothing, the conservative DPO of
https://ericmitchell.ai/cdpo.pdf, equation 3.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from models.losses import Batch, Sums, weighted_sum
from models.spec import LORA_B

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
    reference_PC, _ = log_probabilities(without_adapters(model), batch)
  else:
    sides = [batch[f"reference_{side}"] for side in SIDES]
    reference_PC = jnp.stack(sides, axis=1).astype(policy_PC.dtype)
  beta, smoothing = model.spec.dpo_beta, model.spec.dpo_label_smoothing
  return {**dpo(policy_PC, reference_PC, batch["weights"], beta, smoothing), **sums}


def log_probabilities(
  model: Any, batch: Batch, key: Key[Array, ""] | None = None
) -> tuple[Float[Array, "P 2"], Sums]:
  """Returns log p of both answers of each pair, and the sums of the model's blocks."""
  [losses_BT], ordered, sums = model.per_token(side_by_side(batch), key, ("loss",))
  total_B = jnp.sum(losses_BT * ordered["weights"].astype(losses_BT.dtype), axis=1)
  return -total_B.reshape(-1, len(SIDES)), sums


def without_adapters(model: Any) -> Any:
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
