"""Causal self-attention: the projections, the masked softmax, and the call of ring attention.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key
from ml_collections import ConfigDict

from models import attention_tiles, blockwise_attention, splash_attention
from models.dtypes import wide_dtype
from models.kv_cache import Cache, update_cache
from models.layer_pattern import Layer, layer_pattern
from models.layers import Linear, Norm, adapter_dropout
from models.rematerialization import named
from models.rope import apply_rope
from models.token_positions import Rows
from models.transformer_dims import KEYS, QUERIES, RESIDUAL, SINKS, sizes
from partitioning.constraints import constrain, tie_to
from partitioning.parallel.block_pairs import Blocks, Scores
from partitioning.parallel.matmuls import column_parallel, row_parallel
from partitioning.parallel.ring_attention import ring_attention, sequence_axes
from partitioning.parallel.sharded_function import splits
from runtime.rematerialization import ATTENTION_OUTPUT

SINK_DEVIATION = 0.02  # of the initial sinks, as of gpt-oss in the transformers library


def soft_cap(x: Float[Array, "*X"], cap: float) -> Float[Array, "*X"]:
  """Soft-caps x to (-cap, cap) by a tanh; 0 is off. Source: arXiv:2408.00118, section 2."""
  return cap * jnp.tanh(x / cap) if cap else x


def causal_attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSNH: Float[Array, "B S N H"],
  v_BSNU: Float[Array, "B S N U"],
  slots_BT: Int[Array, "#B T"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
  window: Int[Array, ""] | int | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  blocks: int = 1,
) -> Float[Array, "B T N U"]:
  """Causal attention with the softmax in float32 or wider. Source: arXiv:1706.03762, 3.2.1.

  Args:
    q_BTNH: queries.
    k_BSNH: keys; slot s has the s-th of its row.
    v_BSNU: values, likewise; their heads may have another size.
    slots_BT: of the queries; each attends to the slots up to its own.
    segments: document of each query and key; a query attends only to its own. None: one document.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores, see `soft_cap`; 0 is off.
    window: sliding window: slots that a query attends to, its own the last; None: its full past.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    blocks: number of query blocks, a divisor of T. Each block's scores are computed in turn,
      without the keys that are masked for all of it. More than 1 only where query t is in slot t.
  """
  size = q_BTNH.shape[1] // blocks
  outputs = []
  for block in range(blocks):
    rows = slice(block * size, (block + 1) * size)
    past = slice(0, rows.stop if blocks > 1 else None)
    slots = slots_BT[:, rows], jnp.arange(k_BSNH.shape[1], dtype=slots_BT.dtype)[past]
    mask_BTS = causal_mask(*slots, window)
    if segments is not None:
      segments_BT, segments_BS = segments[0][:, rows], segments[1][:, past]
      mask_BTS = mask_BTS & (segments_BT[:, :, None] == segments_BS[:, None, :])
    q, k, v = q_BTNH[:, rows], k_BSNH[:, past], v_BSNU[:, past]
    outputs.append(_attend(q, k, v, mask_BTS, sinks_N, scale=scale, cap=cap))
  return outputs[0] if blocks == 1 else jnp.concatenate(outputs, axis=1)


def blocks_of(length: int) -> int:
  """Returns the number of query blocks for the attention of a complete row.

  Four skip three eighths of the scores; sixteen would skip 47 %, in four times the code.
  """
  return next((count for count in (4, 2) if length % (64 * count) == 0), 1)


def causal_mask(
  slots_BT: Int[Array, "#B T"], slots_S: Int[Array, " S"], window: Int[Array, ""] | int | None
) -> Bool[Array, "#B T S"]:
  """Returns True for the slots that each query may attend to."""
  mask_BTS = slots_S[None, None, :] <= slots_BT[:, :, None]
  if window is None:
    return mask_BTS
  return mask_BTS & (slots_S[None, None, :] > slots_BT[:, :, None] - window)


def _attend(
  q_BTNH: Float[Array, "B T N H"],
  k_BSNH: Float[Array, "B S N H"],
  v_BSNU: Float[Array, "B S N U"],
  mask_BTS: Bool[Array, "#B T S"],
  sinks_N: Float[Array, " N"] | None,
  *,
  scale: float | None,
  cap: float,
) -> Float[Array, "B T N U"]:
  """Returns the values, averaged with the softmax of each query's scores as weights."""
  wide = wide_dtype(q_BTNH.dtype)
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
  scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=wide)
  scores_BNTS = soft_cap(scores_BNTS, cap)
  # Added, not selected by `where`: then no layer saves the mask for its gradient.
  mask_bias_BTS = jnp.logical_not(mask_BTS).astype(wide) * float(jnp.finfo(wide).min)
  scores_BNTS = scores_BNTS + mask_bias_BTS[:, None]
  weights_BNTS = _weights(scores_BNTS, sinks_N).astype(v_BSNU.dtype)
  return jnp.einsum("BNTS,BSNU->BTNU", weights_BNTS, v_BSNU)


def _weights(
  scores_BNTS: Float[Array, "B N T S"], sinks_N: Float[Array, " N"] | None
) -> Float[Array, "B N T S"]:
  """Returns the softmax over S, in whose normalizer a head's sink takes part."""
  if sinks_N is None:
    return jax.nn.softmax(scores_BNTS, axis=-1)
  sinks_1N11 = sinks_N.astype(scores_BNTS.dtype)[None, :, None, None]
  largest_BNT1 = jnp.maximum(scores_BNTS.max(axis=-1, keepdims=True), sinks_1N11)
  largest_BNT1 = jax.lax.stop_gradient(largest_BNT1)
  weights_BNTS = jnp.exp(scores_BNTS - largest_BNT1)
  sink_BNT1 = jnp.exp(sinks_1N11 - largest_BNT1)
  return weights_BNTS / (weights_BNTS.sum(axis=-1, keepdims=True) + sink_BNT1)


class Attention(nnx.Module):
  """Grouped-query attention. Sources: arXiv:2305.13245; 2104.09864 for rotary positions."""

  def __init__(self, config: ConfigDict, *, rngs: nnx.Rngs):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    model = config.model
    linear = functools.partial(Linear, config=config, rngs=rngs)
    self.query, self.key = linear("layers/attention/query"), linear("layers/attention/key")
    self.value = linear("layers/attention/value")
    self.query_key_norm = model.query_key_norm
    if self.query_key_norm:
      self.query_norm = Norm("layers/attention/query_norm", config)
      self.key_norm = Norm("layers/attention/key_norm", config)
    self.out = linear("layers/attention/out", scale=(2 * model.layers) ** -0.5)
    self.has_sinks = model.attention_sinks
    if self.has_sinks:
      dtype, shape = jnp.dtype(config.training.parameter_dtype), sizes(config, SINKS)
      deviation = jnp.asarray(SINK_DEVIATION, dtype)
      self.sinks = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.groups = model.heads // model.kv_heads
    self.scale, self.cap = model.attention_scale, model.attention_soft_cap
    self.kernel = config.training.attention_kernel
    self.windows = layer_pattern(config).kinds
    self.adapter_dropout = config.lora.dropout

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: Cache | None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], Cache | None]:
    """Returns the residual's update, and the cache with these tokens in it.

    Args:
      x_BRD: the normalized residual.
      layer: the numbers that differ between layers.
      rows: slots, positions and documents of the tokens.
      cache: this layer's; None if x has all tokens.
      key: draws the dropout of the adapters' inputs; None turns it off.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, self.adapter_dropout, slots_T=rows.slots_BT[0])
    projections = [self.query, self.key, self.value]
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    projected = column_parallel(x_BRD, projections, RESIDUAL, inputs)
    q_BTNH, k_BTKH, v_BTKH = (
      named(linear.add_bias(x), name)
      for linear, x, name in zip(projections, projected, ("query", "key", "value"), strict=True)
    )
    if self.query_key_norm:
      q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
    if (table_2BTh := rows.rope(layer)) is not None:
      q_BTNH, k_BTKH = apply_rope(q_BTNH, table_2BTh), apply_rope(k_BTKH, table_2BTh)
    if rows.ring:
      k_BTKH, v_BTKH = constrain(k_BTKH, KEYS), constrain(v_BTKH, KEYS)
      scores = Scores(self.scale, wide_dtype(q_BTNH.dtype), self.cap)
      # With all scores, each ring step's are one block.
      every = (q_BTNH.shape[1],) * 2
      sizes = every if self.kernel == "xla" else attention_tiles.of_devices().blockwise
      output_BTNH = ring_attention(
        *(q_BTNH, k_BTKH, v_BTKH, rows.segments_BT, layer.window),
        blocks=Blocks(scores, *sizes),
        letters=(QUERIES, KEYS, KEYS),
        sinks_N=self._sinks(),
        name=ATTENTION_OUTPUT,
      )
    else:
      output_BTNH, cache = self._gathered(q_BTNH, k_BTKH, v_BTKH, layer, rows, cache)
    output_BTNH = constrain(output_BTNH, QUERIES)
    inputs = dropped(key=keys[1], letters=QUERIES, shape=output_BTNH.shape)
    return self.out.add_bias(row_parallel(output_BTNH, self.out, RESIDUAL, inputs)), cache

  def _gathered(
    self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, layer: Layer, rows: Rows, cache: Cache | None
  ) -> tuple[Float[Array, "B T N H"], Cache | None]:
    """Returns the attention output, with keys and values all-gathered along the sequence."""
    k_BSKH, v_BSKH = constrain(k_BTKH, "BSKH"), constrain(v_BTKH, "BSKH")
    if cache is not None:
      cache = update_cache(cache, k_BSKH, v_BSKH)
      k_BSKH, v_BSKH = cache.keys, cache.values
    segments = None
    if rows.segments_BT is not None:
      segments = rows.segments_BT, constrain(rows.segments_BT, "BS")
    complete = cache is None and not sequence_axes("T")
    given = {"scale": self.scale, "cap": self.cap, "sinks_N": self._sinks()}
    if self.kernel != "xla":
      k_BSKH, v_BSKH = self._served(k_BSKH), self._served(v_BSKH)
      given |= {"windows": self.windows, "kind": layer.kind}
    if self.kernel == "splash" and complete:
      block = attention_tiles.of_devices().splash
      return splash_attention.attention(
        q_BTNH, k_BSKH, v_BSKH, segments, block=block, **given
      ), cache
    q_BTNH, (slots_BT, segments) = tie_to(q_BTNH, (rows.slots_BT, segments))
    if self.kernel != "xla":
      output_BTNH = blockwise_attention.attention(
        *(q_BTNH, k_BSKH, v_BSKH, slots_BT, segments),
        complete=complete,
        blocks=attention_tiles.of_devices().blockwise,
        **given,
      )
      return output_BTNH, cache
    output_BTNH = causal_attention(
      *(q_BTNH, self._repeated(k_BSKH), self._repeated(v_BSKH), slots_BT, segments),
      window=layer.window,
      blocks=blocks_of(q_BTNH.shape[1]) if complete else 1,
      **given,
    )
    return named(output_BTNH, ATTENTION_OUTPUT), cache

  def _sinks(self) -> Float[Array, " N"] | None:
    return constrain(self.sinks[...], SINKS) if self.has_sinks else None

  def _repeated(self, x_BSKH: Float[Array, "B S K H"]) -> Float[Array, "B S N H"]:
    """Returns keys or values for each query head; each serves N/K of them.

    Repeated heads can be split over tensor even where it does not divide K.
    """
    return constrain(jnp.repeat(x_BSKH, self.groups, axis=2), "BSNH")

  def _served(self, x_BSKH: Float[Array, "B S K H"]) -> Array:
    """Returns keys or values, repeated only where a device lacks those of its query heads."""
    heads = x_BSKH.shape[2]
    alike = splits("K", heads) == splits("N", heads * self.groups)
    return x_BSKH if alike else self._repeated(x_BSKH)
