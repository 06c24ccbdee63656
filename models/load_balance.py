"""Load balancing of experts: auxiliary losses, the update of a router's bias, and metrics.

Losses are of each row (sequence) and of each token, so that their sum depends neither on the mesh
nor on how the batch is cut into microbatches; a loss of the batch's own balance would, because it
is a product of two means over it. Tokens whose weight is 0 (padding) do not count.

Dims beside those of the decoder: E experts, k experts of a token, X any leading dims.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from models.losses import COUNTS, Sums
from partitioning.dtypes import wide_dtype

# Numbers of a layer that are summed over the rows of a batch; see `models.experts.Experts`.
BALANCE, Z_LOSS = "balance_loss", "router_z_loss"


def chosen(experts: Int[Array, "*X k"], count: int) -> Bool[Array, "*X k E"]:
  """Returns one-hot rows of the chosen experts.

  Args:
    experts: indices.
    count: E.
  """
  indices = jnp.arange(count, dtype=experts.dtype)
  return experts[..., None] == indices.reshape((1,) * experts.ndim + (-1,))


class RowSums(NamedTuple):
  """What the balance of rows is computed from; over a split sequence, sums of the parts are added.

  Attributes:
    counts: of the tokens that each expert has been assigned.
    probabilities: sums over tokens.
    tokens: those that count.
  """

  counts: Int[Array, "B E"]
  probabilities: Float[Array, "B E"]
  tokens: Int[Array, " B"]


def row_sums(
  experts: Int[Array, "B T k"], probabilities: Float[Array, "B T E"], weights: Num[Array, "B T"]
) -> RowSums:
  """Returns the sums over the tokens of each row.

  Args:
    experts: that were chosen.
    probabilities: of all experts; see `models.experts.Routed`.
    weights: of the tokens in the loss; whether they are 0 is what matters.
  """
  counted = weights != 0
  counted_BT11 = counted[..., None, None]
  hot = chosen(experts, probabilities.shape[-1]) & counted_BT11
  sums = jnp.where(counted[..., None], probabilities, jnp.zeros((), probabilities.dtype))
  return RowSums(
    jnp.sum(hot, axis=(1, 2), dtype=jnp.int32),
    jnp.sum(sums, axis=1, dtype=wide_dtype(probabilities.dtype)),
    jnp.sum(counted, axis=1, dtype=jnp.int32),
  )


def sequence_balance(sums: RowSums, top_k: int) -> Float[Array, " B"]:
  """Returns the auxiliary loss of each row: 1 where the load is balanced, E / k at most.

  sum over e of f_e P_e, where f_e is E / k times the share of the row's tokens that go to expert e
  and P_e the mean of its probability. Source: arXiv:2412.19437, equations 17 to 20, there times
  alpha; assignments here are those that were made, also where a bias or groups have decided. f, of
  integers, has no gradient. A row without tokens has loss 0.

  Args:
    sums: complete, also where the sequence is split.
    top_k: experts of a token.
  """
  dtype = sums.probabilities.dtype
  tokens = jnp.maximum(sums.tokens, 1).astype(dtype)[:, None]
  share = sums.counts.astype(dtype) / tokens * (sums.counts.shape[-1] / top_k)
  return jnp.sum(share * sums.probabilities / tokens, axis=-1)


def router_z_loss(logits: Float[Array, "*X E"]) -> Float[Array, "*X"]:
  """Returns log(sum(exp(logits))) ** 2 of each token. Source: arXiv:2202.08906, equation 5."""
  return jax.nn.logsumexp(logits.astype(wide_dtype(logits.dtype)), axis=-1) ** 2


def updated_bias(
  bias: Float[Array, "*X E"], counts: Int[Array, "*X E"], rate: float
) -> Float[Array, "*X E"]:
  """Returns the bias of the choice for the next step: b + rate * sign(mean load - load).

  Compared in integers: a sum of counts in float32 may depend on the order, and with it the sign.
  Source: arXiv:2408.15664, algorithm 1; arXiv:2412.19437, section 2.1.2.

  Args:
    bias: of each expert.
    counts: of the tokens that the experts had in the global batch; their sum is below 2**31.
    rate: at least 0.
  """
  experts = counts.shape[-1]
  total = jnp.sum(counts, axis=-1, keepdims=True, dtype=counts.dtype)
  mean, rest = total // experts, total % experts
  below = (counts < mean) | ((counts == mean) & (rest > 0))
  sign = below.astype(bias.dtype) - (counts > mean).astype(bias.dtype)
  return bias + jnp.asarray(rate, bias.dtype) * sign


def largest_load(counts: Num[Array, "*X E"]) -> Float[Array, "*X"]:
  """Returns the tokens of the fullest expert over the mean of all: 1 if balanced, E / k at most.

  0 where there are no tokens.
  """
  return jnp.max(token_shares(counts), axis=-1) * counts.shape[-1]


def token_shares(counts: Num[Array, "*X E"]) -> Float[Array, "*X E"]:
  """Returns each expert's share of the assignments; 0 where there are none."""
  counts = counts.astype(jnp.float32)
  return counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1.0)


def router_entropy(probabilities: Float[Array, "*X E"]) -> Float[Array, "*X"]:
  """Returns the entropy of each token's probabilities, in nats: log(E) where all are equal."""
  return jnp.sum(jax.scipy.special.entr(probabilities), axis=-1)


# ------------------------------ sums over a batch ------------------------------
# All but the counts are means over the sparse layers, times the weight of the batch, as every sum
# is that a step divides by the weight of the global batch.

FULLEST_EXPERT = "fullest_expert"
SHARE = "expert_share/{}"  # a metric of each expert


def sums_of(
  rows: Mapping[str, jax.Array], weights_BT: Float[Array, "B T"], layers: int | None = None
) -> Sums:
  """Returns sums over the rows.

  Args:
    rows: of `models.experts.Experts`, stacked over the sparse layers: [L, B] or [L, B, e].
    weights_BT: of the tokens in the loss.
    layers: the sparse layers of the model, where a pipeline stage has some of them; None: these.
  """
  counts_Le = jnp.sum(rows[COUNTS], axis=1, dtype=jnp.int32)
  layers = layers or counts_Le.shape[0]
  sums = {name: jnp.sum(x) / layers for name, x in rows.items() if name != COUNTS}
  dtype = sums[BALANCE].dtype
  fullest = (jnp.sum(largest_load(counts_Le)) / layers).astype(dtype)
  weight = jnp.sum(weights_BT.astype(dtype))
  return {**sums, FULLEST_EXPERT: fullest * weight, COUNTS: counts_Le}


def auxiliary_loss(sums: Sums, balance: float, z: float) -> jax.Array | float:
  """Returns what the sums of `sums_of` add to the loss in training.

  Args:
    sums: of the batch.
    balance: `training.balance_loss`.
    z: `training.router_z_loss`.
  """
  total = 0.0
  for name, coefficient in ((BALANCE, balance), (Z_LOSS, z)):
    if coefficient and name in sums:
      total = total + coefficient * sums[name]
  return total


def shares(counts_Le: Int[Array, "L e"]) -> dict[str, jax.Array]:
  """Returns each expert's share of the assignments of all layers, by the metric's name."""
  share_e = jnp.mean(token_shares(counts_Le), axis=0)
  width = len(str(share_e.shape[0] - 1))
  return {SHARE.format(str(expert).zfill(width)): x for expert, x in enumerate(share_e)}
