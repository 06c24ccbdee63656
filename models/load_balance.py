"""Load balancing of experts: auxiliary losses, the update of a router's bias, and metrics.

Losses are of each row (sequence) and of each token, so that their sum depends neither on the mesh
nor on how the batch is cut into microbatches; a loss of the batch's own balance would, because it
is a product of two means over it. Tokens whose weight is 0 (padding) do not count.

Dims beside those of the decoder: E experts, k experts of a token, X any leading dims.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from models.router import chosen
from partitioning.dtypes import wide_dtype

# Numbers of a layer that are summed over the rows of a batch; see `models.experts.Experts`.
BALANCE, Z_LOSS, COUNTS = "balance_loss", "router_z_loss", "expert_counts"


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
    probabilities: of all experts; see `models.router.Routed`.
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
