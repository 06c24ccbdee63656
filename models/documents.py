"""Documents in a row of tokens: which one a token belongs to, and where in it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from models.attention import Cache
from partitioning.constraints import constrain

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


def read_on(
  tokens_BT: Int[Array, "B T"], counts_B: Int[Array, " B"], cache: Cache
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Cache]:
  """Returns the documents and the positions of tokens that follow those in a cache, and the cache.

  Args:
    tokens_BT: token ids, each row's padded on the right with anything.
    counts_B: int32, how many of a row's T are tokens.
    cache: of all layers. In the one that is returned the documents of the tokens are written; the
      lengths are as they were.
  """
  places_BT = jax.lax.broadcasted_iota(jnp.int32, tokens_BT.shape, 1)
  slots_BT = cache.lengths[:, None] + places_BT
  ended_BT = (tokens_BT == END) & (places_BT < counts_B[:, None])
  ends_BT = ended_BT.astype(jnp.int32)
  segments_BT = cache.ends[:, None] + jnp.cumsum(ends_BT, axis=1) - ends_BT
  # A document starts behind the last token before it that ends one.
  following_BT = jnp.where(ended_BT, slots_BT + 1, jnp.zeros_like(slots_BT))
  latest_BT = jnp.maximum(jax.lax.cummax(following_BT, axis=1), cache.starts[:, None])
  starts_BT = jnp.concatenate([cache.starts[:, None], latest_BT[:, :-1]], axis=1)

  def write(row_S: Array, new_T: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(row_S, new_T, start, axis=0)

  segments_BS = jax.vmap(write)(cache.segments, segments_BT, cache.lengths)
  cache = dataclasses.replace(
    cache,
    segments=constrain(segments_BS, "BS"),
    ends=constrain(cache.ends + jnp.sum(ends_BT, axis=1, dtype=jnp.int32), "B"),
    starts=constrain(latest_BT[:, -1], "B"),
  )
  return constrain(segments_BT, "BT"), constrain(slots_BT - starts_BT, "BT"), cache
