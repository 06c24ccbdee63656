"""Causal self-attention of queries over keys and values: the masked softmax, and where it runs.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models import attention_tiles, blockwise_attention, cudnn_attention, splash_attention
from models.layer_pattern import Layer, layer_pattern
from models.rematerialization import named
from models.spec import DecoderSpec
from models.token_positions import Rows
from partitioning.constraints import constrain, tie_to
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel.attention_blocks import Blocks, Scores
from partitioning.parallel.ring_attention import ring_attention, sequence_axes
from partitioning.parallel.sharded_function import splits
from partitioning.parallel.splash_kernel import SplashBlocks
from runtime.rematerialization import ATTENTION_OUTPUT

# Queries, keys and values inside a block.
QUERIES, KEYS = "BTNH", "BTKH"


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
  q_BTNH = scaled(q_BTNH, scale)
  scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=wide)
  weights_BNTS = masked_softmax(scores_BNTS, mask_BTS, sinks_N, cap=cap).astype(v_BSNU.dtype)
  return jnp.einsum("BNTS,BSNU->BTNU", weights_BNTS, v_BSNU)


def masked_softmax(
  scores_BNTS: Float[Array, "B N T S"],
  mask_BTS: Bool[Array, "#B T S"],
  sinks_N: Float[Array, " N"] | None = None,
  *,
  cap: float,
) -> Float[Array, "B N T S"]:
  """Returns the softmax of soft-capped scores over the slots that are not masked.

  Args:
    scores_BNTS: scaled, in float32 or wider.
    mask_BTS: of `causal_mask`.
    sinks_N: as in `causal_attention`.
    cap: of the scores, see `soft_cap`.
  """
  wide = scores_BNTS.dtype
  scores_BNTS = soft_cap(scores_BNTS, cap)
  # Added, not selected by `where`: then no layer saves the mask for its gradient.
  mask_bias_BTS = jnp.logical_not(mask_BTS).astype(wide) * float(jnp.finfo(wide).min)
  return _weights(scores_BNTS + mask_bias_BTS[:, None], sinks_N)


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


@dataclasses.dataclass(frozen=True)
class Attend:
  """Attention of queries over keys and values, by the kernel of a model.

  Attributes:
    kernel: `training.attention_kernel`.
    scale: of the scores.
    cap: of the scaled scores, see `soft_cap`.
    windows: the distinct windows of the layers.
    groups: query heads that a key/value head serves.
    value_head: the letter of the size of the values' heads.
  """

  kernel: str
  scale: float
  cap: float
  windows: tuple[int | None, ...]
  groups: int
  value_head: str

  @classmethod
  def of(cls, spec: DecoderSpec, value_head: str = "H") -> "Attend":
    """Returns the one of a decoder."""
    return cls(
      kernel=spec.attention_kernel,
      scale=spec.attention_scale,
      cap=spec.attention_soft_cap,
      windows=layer_pattern(spec).kinds,
      groups=spec.heads // spec.kv_heads,
      value_head=value_head,
    )

  def __call__(
    self,
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKU: Float[Array, "B S K U"],
    layer: Layer,
    rows: Rows,
    sinks_N: Float[Array, " N"] | None = None,
    *,
    cached: bool = False,
  ) -> Float[Array, "B T N U"]:
    """Returns the values, averaged with the softmax of each query's scores as weights.

    Args:
      q_BTNH: queries.
      k_BSKH: keys of the same tokens, or of all slots of a cache.
      v_BSKU: values, likewise.
      layer: the numbers that differ between layers.
      rows: slots and documents of the queries.
      sinks_N: as in `causal_attention`.
      cached: whether keys and values are a cache's.
    """
    if rows.ring:
      output_BTNU = self._around_the_ring(q_BTNH, k_BSKH, v_BSKU, layer, rows, sinks_N)
    else:
      output_BTNU = self._gathered(q_BTNH, k_BSKH, v_BSKU, layer, rows, sinks_N, cached=cached)
    return constrain(output_BTNU, QUERIES[:-1] + self.value_head)

  def _around_the_ring(
    self,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKU: Array,
    layer: Layer,
    rows: Rows,
    sinks_N: Array | None,
  ) -> Float[Array, "B T N U"]:
    values = KEYS[:-1] + self.value_head
    k_BTKH, v_BTKU = constrain(k_BTKH, KEYS), constrain(v_BTKU, values)
    if self.kernel == "splash":
      q_BTNH = scaled(q_BTNH, self.scale)
      blocks = SplashBlocks(self.cap, self.windows, attention_tiles.of_devices().splash)
    else:
      scores = Scores(self.scale, wide_dtype(q_BTNH.dtype), self.cap)
      # With all scores, each ring step's are one block.
      every = (q_BTNH.shape[1],) * 2
      sizes = every if self.kernel == "xla" else attention_tiles.of_devices().blockwise
      blocks = Blocks(scores, *sizes)
    return ring_attention(
      *(q_BTNH, k_BTKH, v_BTKU, rows.segments_BT),
      layer.kind if self.kernel == "splash" else layer.window,
      blocks=blocks,
      letters=(QUERIES, KEYS, values),
      sinks_N=sinks_N,
      name=ATTENTION_OUTPUT,
    )

  def _gathered(
    self,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKU: Array,
    layer: Layer,
    rows: Rows,
    sinks_N: Array | None,
    *,
    cached: bool,
  ) -> Float[Array, "B T N U"]:
    """Returns the output, with keys and values all-gathered along the sequence."""
    k_BSKH, v_BSKU = constrain(k_BTKH, "BSKH"), constrain(v_BTKU, "BSK" + self.value_head)
    segments = None
    if rows.segments_BT is not None:
      segments = rows.segments_BT, constrain(rows.segments_BT, "BS")
    complete = not cached and not sequence_axes("T")
    given = {"scale": self.scale, "cap": self.cap, "sinks_N": sinks_N}
    if self.kernel != "xla":
      k_BSKH, v_BSKU = self._served(k_BSKH), self._served(v_BSKU, self.value_head)
      given |= {"windows": self.windows, "kind": layer.kind, "value_head": self.value_head}
    if self.kernel == "splash" and complete:
      block = attention_tiles.of_devices().splash
      return splash_attention.attention(q_BTNH, k_BSKH, v_BSKU, segments, block=block, **given)
    q_BTNH, (slots_BT, segments) = tie_to(q_BTNH, (rows.slots_BT, segments))
    if self.kernel == "splash" and not cached:  # a device's queries of rows that axes split
      block = attention_tiles.of_devices().splash
      given |= {"slots_T": slots_BT[0], "block": block}
      return splash_attention.attention(q_BTNH, k_BSKH, v_BSKU, segments, **given)
    if self.kernel == "cudnn" and complete:
      its = {name: given[name] for name in ("scale", "windows", "kind")}
      return cudnn_attention.attention(q_BTNH, k_BSKH, v_BSKU, slots_BT, **its)
    if self.kernel != "xla":
      return blockwise_attention.attention(
        *(q_BTNH, k_BSKH, v_BSKU, slots_BT, segments),
        complete=complete,
        blocks=attention_tiles.of_devices().blockwise,
        **given,
      )
    output_BTNU = causal_attention(
      *(q_BTNH, self._repeated(k_BSKH), self._repeated(v_BSKU, self.value_head)),
      *(slots_BT, segments),
      window=layer.window,
      blocks=blocks_of(q_BTNH.shape[1]) if complete else 1,
      **given,
    )
    return named(output_BTNU, ATTENTION_OUTPUT)

  def _repeated(self, x_BSKH: Float[Array, "B S K H"], head: str = "H") -> Float[Array, "B S N H"]:
    """Returns keys or values for each query head; each serves N/K of them.

    Repeated heads can be split over tensor even where it does not divide K.
    """
    return constrain(jnp.repeat(x_BSKH, self.groups, axis=2), f"BSN{head}")

  def _served(self, x_BSKH: Float[Array, "B S K H"], head: str = "H") -> Array:
    """Returns keys or values, repeated only where a device lacks those of its query heads."""
    heads = x_BSKH.shape[2]
    alike = splits("K", heads) == splits("N", heads * self.groups)
    return x_BSKH if alike else self._repeated(x_BSKH, head)
