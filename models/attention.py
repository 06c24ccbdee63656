"""Attention's arithmetic, without parameters: rotary positions, masked softmax, the cache.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from models import splash_attention
from models.dtypes import wide_dtype
from models.kv_cache import Cache, remember
from models.layer_pattern import Layer
from models.layers import Kernel, Norm
from models.rope import rotate
from models.token_positions import Rows
from partitioning.constraints import constrain, together
from partitioning.parallel.products import gathered_products, scattered_product
from partitioning.parallel.ring_attention import Scores, ring_attention, splitting


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


class Attention(nnx.Module):
  """Grouped-query attention. Sources: arXiv:2305.13245; 2104.09864 for rotary positions."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    model = config.model
    kernel = functools.partial(Kernel, config=config, rngs=rngs)
    inner = model.biases in ("qkv", "all")
    self.query = kernel("DNH", fan_in=model.model_size, bias="NH" if inner else "")
    self.key = kernel("DKH", fan_in=model.model_size, bias="KH" if inner else "")
    self.value = kernel("DKH", fan_in=model.model_size, bias="KH" if inner else "")
    self.normed = model.query_key_norm
    if self.normed:
      self.query_norm, self.key_norm = Norm(config, "H"), Norm(config, "H")
    depth = (2 * model.layers) ** -0.5
    self.out = kernel(
      "NHD",
      fan_in=model.heads * model.head_size,
      scale=depth,
      bias="D" if model.biases == "all" else "",
    )
    self.groups = model.heads // model.kv_heads
    self.scale, self.cap = model.attention_scale, model.attention_soft_cap
    self.splash = config.training.attention_kernel == "splash"

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns what each position reads from its past, and the cache with these positions in it.

    Args:
      x_BRD: the normalised residual.
      layer: in what this layer differs from others.
      rows: where the tokens are.
      cache: this layer's; None where x is all that there is.
    """
    q_BTNH, k_BTKH, v_BTKH = gathered_products(
      x_BRD,
      [self.query.kernel[...], self.key.kernel[...], self.value.kernel[...]],
      (("DNH", "BTNH"), ("DKH", "BTKH"), ("DKH", "BTKH")),
    )
    q_BTNH, k_BTKH = self.query.biased(q_BTNH), self.key.biased(k_BTKH)
    v_BTKH = self.value.biased(v_BTKH)
    if self.normed:
      q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
    if (turns_2BTh := rows.turns(layer)) is not None:
      q_BTNH, k_BTKH = rotate(q_BTNH, turns_2BTh), rotate(k_BTKH, turns_2BTh)
    if rows.ring:
      k_BTKH, v_BTKH = constrain(k_BTKH, "BTKH"), constrain(v_BTKH, "BTKH")
      scores = Scores(self.scale, wide_dtype(q_BTNH.dtype), self.cap)
      mixed_BTNH = ring_attention(
        q_BTNH, k_BTKH, v_BTKH, rows.segments_BT, layer.window, scores=scores
      )
    else:
      mixed_BTNH, cache = self._gathered(q_BTNH, k_BTKH, v_BTKH, layer, rows, cache)
    mixed_BTNH = constrain(mixed_BTNH, "BTNH")
    return self.out.biased(
      scattered_product(mixed_BTNH, self.out.kernel[...], "NHD", "BTNH")
    ), cache

  def _gathered(
    self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, layer: Layer, rows: Rows, cache: Cache | None
  ) -> tuple[Float[Array, "B T N H"], Cache | None]:
    """Returns what each query reads, from keys and values that are gathered over the sequence."""
    k_BSKH, v_BSKH = constrain(k_BTKH, "BSKH"), constrain(v_BTKH, "BSKH")
    if cache is not None:
      cache = remember(cache, k_BSKH, v_BSKH)
      k_BSKH, v_BSKH = cache.keys, cache.values
    # Each key/value head serves N/K query heads. Repeated, the heads split over tensor even
    # where it does not divide K.
    k_BSNH = constrain(jnp.repeat(k_BSKH, self.groups, axis=2), "BSNH")
    v_BSNH = constrain(jnp.repeat(v_BSKH, self.groups, axis=2), "BSNH")
    segments = None
    if rows.segments_BT is not None:
      of_keys = rows.segments_BT if rows.key_segments_BS is None else rows.key_segments_BS
      segments = rows.segments_BT, constrain(of_keys, "BS")
    given = {"scale": self.scale, "cap": self.cap}
    if self.splash and cache is None:
      return splash_attention.attention(q_BTNH, k_BSNH, v_BSNH, segments, **given), None
    whole = cache is None and not splitting()
    q_BTNH, (slots_BT, segments) = together(q_BTNH, (rows.slots_BT, segments))
    mixed_BTNH = causal_attention(
      *(q_BTNH, k_BSNH, v_BSNH, slots_BT, segments),
      window=layer.window,
      blocks=blocks_of(q_BTNH.shape[1]) if whole else 1,
      **given,
    )
    return mixed_BTNH, cache
