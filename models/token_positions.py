"""Positions and segments of tokens: which document a token belongs to, and where in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.kv_cache import Cache
from models.layer_pattern import Layer, LayerPattern
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


@dataclasses.dataclass(frozen=True)
class Rows:
  """Slots, positions and documents of the tokens that the model is given.

  Attributes:
    slots_BT: int32, within their rows.
    positions_BT: int32, within their documents.
    rope_X2BTh: the rope table of each variant among the layers; computed once, before the scan
      over the layers. None: no rotary positions.
    segments_BT: the documents, for intra-document attention masking; None: a row is one.
    key_segments_BS: those of the keys, where these are not of the same tokens.
    ring: whether the tokens are in the zigzag order of `partitioning.parallel.ring_attention`.
  """

  slots_BT: Int[Array, "#B T"]
  positions_BT: Int[Array, "#B T"]
  rope_X2BTh: Float[Array, "X 2 #B T h"] | None
  segments_BT: Int[Array, "B T"] | None = None
  key_segments_BS: Int[Array, "B S"] | None = None
  ring: bool = False

  def rope(self, layer: Layer) -> Float[Array, "2 #B T h"] | None:
    """Returns a layer's rope table; None without rotary positions."""
    if self.rope_X2BTh is None:
      return None
    return self.rope_X2BTh[0 if layer.rotary is None else layer.rotary]


def rows_of(
  tokens_BT: Int[Array, "B T"],
  order_T: np.ndarray | None,
  pattern: LayerPattern,
  *,
  separate_documents: bool,
) -> Rows:
  """Returns slots, positions and documents of complete rows.

  Args:
    tokens_BT: in the order of the text.
    order_T: the order into which the tokens are brought, None: that of the text.
    pattern: what differs between the layers.
    separate_documents: whether attention is masked to each token's own document.
  """
  slots_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
  segments_BT, positions_BT = None, slots_BT
  if separate_documents:
    segments_BT = segments(tokens_BT)
    positions_BT = positions(segments_BT)
  if order_T is not None:
    slots_BT, positions_BT = slots_BT[:, order_T], positions_BT[:, order_T]
    segments_BT = None if segments_BT is None else segments_BT[:, order_T]
  if segments_BT is not None:
    segments_BT, positions_BT = constrain(segments_BT, "BT"), constrain(positions_BT, "BT")
  tables = pattern.rope_tables(positions_BT)
  return Rows(slots_BT, positions_BT, tables, segments_BT, ring=order_T is not None)
