"""Documents in a row of tokens: which one a token belongs to, and where in it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

END = 0  # the token that ends a document, and belongs to it


def segments(tokens_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the number of each token's document within its row, from 0."""
  ends_BT = (tokens_BT == END).astype(jnp.int32)
  return jnp.cumsum(ends_BT, axis=1) - ends_BT


def positions(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns each token's place within its document, as far as the row shows it, from 0."""
  slots_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
  before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
  starts_BT = jnp.where(segments_BT != before_BT, slots_BT, jnp.zeros_like(slots_BT))
  return slots_BT - jax.lax.cummax(starts_BT, axis=1)
