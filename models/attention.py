"""Attention's arithmetic, without parameters: rotary positions, masked softmax, the cache.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.dtypes import wide_dtype
from partitioning.constraints import constrain

# The cache's dims, of the stack of layers.
CACHE = {
  "keys": "LBSKH",
  "values": "LBSKH",
  "lengths": "B",
  "segments": "BS",
  "ends": "B",
  "starts": "B",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """What attention keeps of the tokens read so far, of one layer or (with L first) of all.

  Slot s of a row holds its s-th token, so rows may differ in length: what lies at or past a row's
  length is never seen, whatever it holds.

  Attributes:
    keys: [L, B, S, K, H], turned by their positions, in the compute dtype.
    values: likewise.
    lengths: int32 [B], tokens read of each row.
    segments: int32 [B, S], the document that each slot's token belongs to, counted from 0 within
      the row; None where documents are not kept apart. Likewise the following.
    ends: int32 [B], how many documents each row has read to their ends.
    starts: int32 [B], the slot at which each row's last document starts, which is its length where
      the token read last has ended one.
  """

  keys: Any
  values: Any
  lengths: Any
  segments: Any = None
  ends: Any = None
  starts: Any = None


def rotary_frequencies(
  head_size: int, base: float, scaling: tuple[float, ...] = (), *, dtype: jnp.dtype
) -> Float[Array, " h"]:
  """Returns by how much each of the H/2 pairs turns from one position to the next, in radians.

  Args:
    head_size: H.
    base: of the geometric series.
    scaling: Llama 3's, for longer texts than it was first trained on: (factor, low, high, length).
      Pairs that turn less than `low` times in `length` positions turn `factor` times slower, those
      that turn more than `high` times are left alone, in between it is interpolated. Source: the
      definition of `rope_type: llama3` in Llama 3.1's configuration. () leaves all alone.
    dtype: of the result, float32 or wider.
  """
  half = head_size // 2
  frequency_h = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  if not scaling:
    return frequency_h
  factor, low, high, length = (jnp.asarray(value, dtype) for value in scaling)
  turns_h = length * frequency_h / jnp.asarray(2 * math.pi, dtype)
  share_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
  return frequency_h * (share_h + (1 - share_h) / factor)


def turns(
  positions_BT: Int[Array, "#B T"], frequency_h: Float[Array, " h"]
) -> Float[Array, "2 #B T h"]:
  """Returns cosine and sine of how far each pair is turned at each position."""
  angle_BTh = positions_BT.astype(frequency_h.dtype)[:, :, None] * frequency_h[None, None]
  return jnp.stack([jnp.cos(angle_BTh), jnp.sin(angle_BTh)])


def rotate(
  x_BTNH: Float[Array, "B T N H"], turns_2BTh: Float[Array, "2 #B T h"]
) -> Float[Array, "B T N H"]:
  """Turns each pair (i, i + H/2) by its position, in float32 or wider. Source: arXiv:2104.09864."""
  wide = wide_dtype(x_BTNH.dtype)
  half = x_BTNH.shape[-1] // 2
  cos, sin = turns_2BTh.astype(wide)[:, :, :, None]
  first, second = x_BTNH[..., :half].astype(wide), x_BTNH[..., half:].astype(wide)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


def soft_cap(x: Float[Array, "*X"], cap: float) -> Float[Array, "*X"]:
  """Keeps x within (-cap, cap), smoothly; 0 leaves it. Source: arXiv:2408.00118, section 2."""
  return cap * jnp.tanh(x / cap) if cap else x


def causal_attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSNH: Float[Array, "B S N H"],
  v_BSNH: Float[Array, "B S N H"],
  slots_BT: Int[Array, "#B T"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
  window: Int[Array, ""] | int | None = None,
  blocks: int = 1,
) -> Float[Array, "B T N H"]:
  """Attends to the past and to itself; the softmax is float32 or wider. arXiv:1706.03762, 3.2.1.

  Args:
    q_BTNH: queries.
    k_BSNH: keys, the one in slot s being the s-th of its row.
    v_BSNH: values, likewise.
    slots_BT: of the queries; each sees the slots up to its own.
    segments: the documents of queries and keys; each sees its own alone. None: all are one.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores, see `soft_cap`; 0 is off.
    window: each sees that many slots, its own the last of them; None: all of its past.
    blocks: of queries, whose scores are computed one block after the other, and not those of keys
      that none of a block sees; a divisor of T. More than 1 only where query t is in slot t.
  """
  size = q_BTNH.shape[1] // blocks
  mixed = []
  for block in range(blocks):
    rows = slice(block * size, (block + 1) * size)
    past = slice(0, rows.stop if blocks > 1 else None)
    slots = slots_BT[:, rows], jnp.arange(k_BSNH.shape[1], dtype=slots_BT.dtype)[past]
    seen_BTS = _seen(*slots, window)
    if segments is not None:
      segments_BT, segments_BS = segments[0][:, rows], segments[1][:, past]
      seen_BTS = seen_BTS & (segments_BT[:, :, None] == segments_BS[:, None, :])
    q, k, v = q_BTNH[:, rows], k_BSNH[:, past], v_BSNH[:, past]
    mixed.append(_attend(q, k, v, seen_BTS, scale=scale, cap=cap))
  return mixed[0] if blocks == 1 else jnp.concatenate(mixed, axis=1)


def blocks_of(length: int) -> int:
  """Returns into how many blocks of queries a whole row's attention is cut.

  Four leave out three eighths of the scores; sixteen would leave out 47 %, in four times the code.
  """
  return next((count for count in (4, 2) if length % (64 * count) == 0), 1)


def _seen(
  slots_BT: Int[Array, "#B T"], slots_S: Int[Array, " S"], window: Int[Array, ""] | int | None
) -> Bool[Array, "#B T S"]:
  """Returns which slots each query may see."""
  seen_BTS = slots_S[None, None, :] <= slots_BT[:, :, None]
  if window is None:
    return seen_BTS
  return seen_BTS & (slots_S[None, None, :] > slots_BT[:, :, None] - window)


def _attend(
  q_BTNH: Float[Array, "B T N H"],
  k_BSNH: Float[Array, "B S N H"],
  v_BSNH: Float[Array, "B S N H"],
  seen_BTS: Bool[Array, "#B T S"],
  *,
  scale: float | None,
  cap: float,
) -> Float[Array, "B T N H"]:
  """Returns the mean of the values that each query sees, weighted by a softmax of its scores."""
  wide = wide_dtype(q_BTNH.dtype)
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
  scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=wide)
  scores_BNTS = soft_cap(scores_BNTS, cap)
  # Added and not selected: the gradient needs no mask then, which each layer would keep.
  unseen_BTS = jnp.logical_not(seen_BTS).astype(wide) * float(jnp.finfo(wide).min)
  scores_BNTS = scores_BNTS + unseen_BTS[:, None]
  weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v_BSNH.dtype)
  return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


def remember(
  cache: Cache, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
) -> Cache:
  """Returns one layer's cache with keys and values written behind what each row has read.

  The lengths stay as they are: how many of the T are tokens and not padding, the caller knows.
  """

  def write(row_SKH: Array, new_TKH: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(row_SKH, new_TKH, start, axis=0)

  keys_BSKH = jax.vmap(write)(cache.keys, k_BTKH, cache.lengths)
  values_BSKH = jax.vmap(write)(cache.values, v_BTKH, cache.lengths)
  keys_BSKH, values_BSKH = constrain(keys_BSKH, "BSKH"), constrain(values_BSKH, "BSKH")
  return dataclasses.replace(cache, keys=keys_BSKH, values=values_BSKH)


def layer_of(cache: Cache, layer: Int[Array, ""]) -> Cache:
  """Returns one layer's cache."""
  keys_BSKH, values_BSKH = (
    constrain(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), "BSKH")
    for x in (cache.keys, cache.values)
  )
  return dataclasses.replace(cache, keys=keys_BSKH, values=values_BSKH)


def with_layer(cache: Cache, layer: Int[Array, ""], new: Cache) -> Cache:
  """Returns the stack with one layer's keys and values replaced."""
  keys_LBSKH, values_LBSKH = (
    jax.lax.dynamic_update_index_in_dim(x, new_x, layer, axis=0)
    for x, new_x in ((cache.keys, new.keys), (cache.values, new.values))
  )
  return dataclasses.replace(cache, keys=keys_LBSKH, values=values_LBSKH)
