"""Group relative policy optimization (GRPO): answers that the model has drawn, by their rewards.

Sources: GRPO, arXiv:2402.03300, equation 3, and its k3 estimator of the divergence, equation 4;
Dr. GRPO, arXiv:2503.20783; clip-higher and the mean over tokens of DAPO, arXiv:2503.14476; the
ratio of a whole answer of GSPO, arXiv:2507.18071. Advantages and the tokens' weights, which say how
their means are taken, are numbers of the batch (`inference.grpo`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from models.losses import Batch, Sums, weighted_sum
from models.preferences import without_adapters
from models.spec import GrpoSpec

_OF_TOKENS = ("tokens", "targets", "token_weights", "sampled", "reference")


def answer_sums(model: Any, batch: Batch, key: Key[Array, ""] | None = None) -> Sums:
  """Returns the sums over answers: the loss, the rewards, and what a run watches.

  An evaluation's loss is minus the reward: what is maximized.

  Args:
    model: a `Transformer`.
    batch: of the task `grpo`: `weights`, `advantages` and `rewards` [B] of the answers; of tokens
      `tokens`, `targets`, `token_weights` (how they weigh in the loss of their answer; 0 of the
      prompt), `sampled` and `reference` (log p by the sampler and by the reference) [B, T].
    key: of a train step; None: the rewards are all that is wanted.
  """
  reward = weighted_sum(batch["rewards"], batch["weights"])
  if key is None:
    return {"loss": -reward, "reward": reward}
  log_p_BT, ordered, sums = _log_probabilities(model, batch)
  found = grpo(log_p_BT, ordered, batch["advantages"], batch["weights"], model.spec.grpo)
  return {**found, "reward": reward, **sums}


def log_probabilities(
  model: Any, batch: Batch, *, base: bool = False
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
  """Returns log p of each target by whole rows, and the place of each in its row.

  Args:
    model: a `Transformer`.
    batch: as of `answer_sums`.
    base: of the model without its adapters.
  """
  log_p_BT, ordered, _ = _log_probabilities(without_adapters(model) if base else model, batch)
  return log_p_BT, ordered["places"]


def _log_probabilities(model: Any, batch: Batch) -> tuple[Float[Array, "B T"], Batch, Sums]:
  """Returns log p of each target, what the batch has of tokens in their order, and sums of blocks.

  Without dropout, as the sampler has drawn them.
  """
  rows = {name: batch[name] for name in _OF_TOKENS}
  places_T = jnp.arange(rows["tokens"].shape[1], dtype=jnp.int32)
  rows |= {
    "weights": (rows["token_weights"] > 0).astype(jnp.float32),
    "segments": jnp.zeros_like(rows["tokens"]),
    "places": jnp.broadcast_to(places_T[None], rows["tokens"].shape),
  }
  temperature = model.spec.grpo.temperature
  [losses_BT], ordered, sums = model.per_token(rows, None, ("loss",), temperature)
  return -losses_BT, ordered, sums


def grpo(
  log_p_BT: Float[Array, "B T"],
  tokens: Batch,
  advantages_B: Float[Array, " B"],
  weights_B: Float[Array, " B"],
  spec: GrpoSpec,
) -> Sums:
  """Returns the summed loss of answers, and sums of means over their tokens.

  These are `entropy`, -log p of what was drawn; `clipped`, the share of tokens whose ratio is
  clipped; and, with `spec.kl`, `kl`.

  Args:
    log_p_BT: of each target, of the model that is trained.
    tokens: `token_weights`, `sampled` and `reference`, see `answer_sums`, and `weights`, 1 of the
      tokens of answers.
    advantages_B: of the answers.
    weights_B: of the answers.
    spec: the keys.
  """
  wide = log_p_BT.dtype
  drawn_BT, weights_BT = tokens["weights"] > 0, tokens["token_weights"].astype(wide)
  log_ratio_BT = jnp.where(drawn_BT, log_p_BT - tokens["sampled"].astype(wide), 0)
  if spec.ratio == "answer":
    count_B1 = jnp.maximum(jnp.sum(drawn_BT, axis=1, keepdims=True), 1).astype(wide)
    mean_B1 = jnp.sum(log_ratio_BT, axis=1, keepdims=True) / count_B1
    log_ratio_BT = jnp.broadcast_to(mean_B1, log_ratio_BT.shape)
  ratio_BT, advantages_B1 = jnp.exp(log_ratio_BT), advantages_B.astype(wide)[:, None]
  free_BT = ratio_BT * advantages_B1
  kept_BT = jnp.clip(ratio_BT, 1 - spec.clip_low, 1 + spec.clip_high) * advantages_B1
  losses_BT = -jnp.minimum(free_BT, kept_BT)
  of_tokens = {"clipped": (kept_BT < free_BT).astype(wide), "entropy": -log_p_BT}
  if spec.kl:
    other_BT = jnp.where(drawn_BT, tokens["reference"].astype(wide) - log_p_BT, 0)
    of_tokens["kl"] = jnp.exp(other_BT) - other_BT - 1
    losses_BT += spec.kl * of_tokens["kl"]

  def summed(x_BT: jax.Array) -> jax.Array:
    return weighted_sum(jnp.sum(x_BT * weights_BT, axis=1), weights_B)

  return {"loss": summed(losses_BT), **{name: summed(x_BT) for name, x_BT in of_tokens.items()}}
