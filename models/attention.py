"""Causal self-attention: the caches, the masked softmax and where it runs, grouped-query attention.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from models.layers import Linear, Norm, adapter_dropout, named, rms_norm
from models.positions import Layer, Rows, apply_rope, layer_pattern
from models.spec import RESIDUAL, DecoderSpec, LayersSpec
from partitioning.constraints import axes_splitting, constrain, tie_to
from partitioning.dtypes import scaled, wide_dtype
from partitioning.parallel import split_sequence
from partitioning.parallel.matmuls import column_parallel, row_parallel
from partitioning.parallel.sharded_function import splits
from runtime.rematerialization import ATTENTION_OUTPUT

# ------------------------------ block sizes ------------------------------


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Block sizes on one kind of device.

  Attributes:
    blockwise: most tokens of a block of queries and of keys in plain JAX.
    splash: most tokens of a block of the kernel for TPUs.
    source: where the sizes come from.
  """

  blockwise: tuple[int, int]
  splash: int
  source: str


# By JAX's `device_kind`, in lower case.
TILES = {
  "cpu": Tiles(
    (128, 128),
    128,
    "measured on two cores: rows of 256 to 4,096 tokens took 0.37 to 0.80 of the time of plain "
    "attention, forward and backward, with larger blocks up to twice as much",
  ),
}
# Compiled for TPUs and GPUs ahead of time, and not timed: blocks whose scores are some MiB. Splash
# with blocks of 1024 needs more than a v5p's VMEM for heads of 256, with 2048 for heads of 128.
DEFAULT_TILES = Tiles((512, 512), 512, "not measured")


def device_tiles() -> Tiles:
  """Returns the block sizes for the devices of the mesh in force."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return TILES.get(device.device_kind.lower() if device else "", DEFAULT_TILES)


# ------------------------------ the caches of generation ------------------------------

# What the layers keep of the tokens read so far, by name, of one layer or (with L first) of all:
# the arrays that the class of the attention names in `cached`, and LENGTHS. A row is one document.
# Slot s of a row holds its s-th token, so rows may differ in length: what is at or past a row's
# length is masked, whatever it is.
Cache = dict[str, jax.Array]
LENGTHS = "lengths"  # int32 [B], tokens read of each row
STATES = "states"
# Name -> letters of the array of all layers, in the compute dtype; states in float32 or wider.
CACHE = {
  "keys": "LBSKH",  # rotated by their positions
  "values": "LBSKH",
  "latents": "LBSC",  # after their norm
  "rotary_keys": "LBSI",  # of all heads, rotated by their positions
  STATES: "yBAhu",  # of mixers; then the last inputs of their convolutions
  **dict.fromkeys(("query_tails", "key_tails"), "yBoGh"),
  "value_tails": "yBoAu",
  "channel_tails": "yBoX",
  LENGTHS: "B",
}


def update_cache(cache: Cache, **new: Float[Array, "B T ..."]) -> Cache:
  """Returns one layer's cache with what new tokens add to its arrays, appended to each row.

  The lengths are unchanged: the caller knows how many of the T are tokens and not padding.
  """

  def write(row: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

  found = {name: jax.vmap(write)(cache[name], x, cache[LENGTHS]) for name, x in new.items()}
  return cache | {name: constrain(x, CACHE[name][1:]) for name, x in found.items()}


def cache_layer(cache: Cache, layer: Int[Array, ""], names: Iterable[str]) -> Cache:
  """Returns one layer's cache: the arrays of these names, and the lengths."""
  one = functools.partial(jax.lax.dynamic_index_in_dim, index=layer, keepdims=False)
  found = {name: constrain(one(cache[name]), CACHE[name][1:]) for name in names}
  return {**found, LENGTHS: cache[LENGTHS]}


def set_cache_layer(cache: Cache, layer: Int[Array, ""], new: Cache) -> Cache:
  """Returns the cache of all layers with one layer's arrays replaced."""
  put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
  return cache | {name: put(cache[name], x) for name, x in per_layer(new).items()}


def per_layer(cache: Cache) -> Cache:
  """Returns the arrays that have the layers as their first dim, without the lengths."""
  return {name: x for name, x in cache.items() if name != LENGTHS}


# ------------------------------ the masked softmax ------------------------------

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
  mask_BTS: Bool[Array, "#B T S"] | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
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
  mask_BTS: Bool[Array, "#B T S"] | None,
  sinks_N: Float[Array, " N"] | None = None,
  *,
  cap: float,
) -> Float[Array, "B N T S"]:
  """Returns the softmax of soft-capped scores over the slots that are not masked.

  Args:
    scores_BNTS: scaled, in float32 or wider.
    mask_BTS: of `causal_mask`; None: a query attends to all.
    sinks_N: as in `causal_attention`.
    cap: of the scores, see `soft_cap`.
  """
  wide = scores_BNTS.dtype
  scores_BNTS = soft_cap(scores_BNTS, cap)
  if mask_BTS is None:
    return _weights(scores_BNTS, sinks_N)
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
    chunked: windows do not slide: a token attends to its own chunk of as many.
    groups: query heads that a key/value head serves.
    value_head: the letter of the size of the values' heads.
  """

  kernel: str
  scale: float
  cap: float
  windows: tuple[int | None, ...]
  chunked: bool
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
      chunked=spec.window_chunks,
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
    outputs, values = QUERIES[:-1] + self.value_head, KEYS[:-1] + self.value_head
    if not rows.ring:
      attend = self._of_heads if rows.way == split_sequence.ULYSSES else self._gathered
      output_BTNU = attend(q_BTNH, k_BSKH, v_BSKU, layer, rows, sinks_N, cached=cached)
      return constrain(output_BTNU, outputs)
    from partitioning.parallel.ring_attention import ring_attention

    output_BTNU = ring_attention(
      *(q_BTNH, constrain(k_BSKH, KEYS), constrain(v_BSKU, values)),
      self._documents(layer, rows, q_BTNH.shape[0]),
      layer.kind if self.kernel == "splash" else layer.window,
      blocks=self._blocks(q_BTNH),
      letters=(QUERIES, KEYS, values),
      sinks_N=sinks_N,
      name=ATTENTION_OUTPUT,
    )
    return constrain(output_BTNU, outputs)

  def _of_heads(
    self,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKU: Array,
    layer: Layer,
    rows: Rows,
    sinks_N: Array | None,
    **more: bool,
  ) -> Float[Array, "B T N U"]:
    """Returns the output, of complete rows of a device's share of the heads (DeepSpeed-Ulysses).

    Pairs of constraints exchange the sequence for heads, and in the backward pass back at the same
    place; the caller's exchanges the output's.
    """
    heads, values = k_BTKH.shape[2], KEYS[:-1] + self.value_head
    often = split_sequence.repeats(heads, *map(split_sequence.devices_along, "TN"))
    attend = dataclasses.replace(self, groups=self.groups // often)
    with split_sequence.resized("K", heads * often):
      if often > 1:
        k_BTKH, v_BTKU = (jnp.repeat(x, often, axis=2) for x in (k_BTKH, v_BTKU))
      given = (q_BTNH, QUERIES), (k_BTKH, KEYS), (v_BTKU, values)
      q_BTNH, k_BTKH, v_BTKU = (constrain(x, letters) for x, letters in given)
      with split_sequence.exchanged("T", "NK"):
        q_BTNH = constrain(q_BTNH, QUERIES)
        if rows.segments_BT is not None:
          segments_BT = constrain(rows.segments_BT, QUERIES[:2])
          rows = dataclasses.replace(rows, segments_BT=segments_BT)
        output = attend._gathered(q_BTNH, k_BTKH, v_BTKU, layer, rows, sinks_N, **more)
        return constrain(output, QUERIES[:-1] + self.value_head)

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
    segments, segments_BT = None, self._documents(layer, rows, q_BTNH.shape[0])
    if cached and segments_BT is not None:  # slots of a cache are positions in its one document
      slots_S = jnp.arange(k_BSKH.shape[1], dtype=segments_BT.dtype)
      segments_BS = jnp.broadcast_to(slots_S - slots_S % layer.window, k_BSKH.shape[:2])
      segments = segments_BT, constrain(segments_BS, "BS")
    elif segments_BT is not None:
      segments = segments_BT, constrain(segments_BT, "BS")
    complete = not cached and not axes_splitting("T")
    slots_BT = None  # query t is in slot t
    if not (self.kernel == "splash" and complete):
      q_BTNH, (slots_BT, segments) = tie_to(q_BTNH, (rows.slots_BT, segments))
    if self.kernel == "xla":
      output_BTNU = causal_attention(
        *(q_BTNH, self._repeated(k_BSKH), self._repeated(v_BSKU, self.value_head)),
        *(slots_BT, segments),
        scale=self.scale,
        cap=self.cap,
        window=layer.window,
        sinks_N=sinks_N,
        blocks=blocks_of(q_BTNH.shape[1]) if complete else 1,
      )
      return named(output_BTNU, ATTENTION_OUTPUT)
    from models import fused_attention

    arrays = q_BTNH, self._served(k_BSKH), self._served(v_BSKU, self.value_head)
    if self.kernel == "cudnn" and complete:
      how = {"scale": self.scale, "windows": self.windows, "kind": layer.kind}
      return fused_attention.cudnn_attention(*arrays, slots_BT, **how)
    how = self._blocks(q_BTNH, complete=complete, cached=cached)
    given = {"kind": layer.kind, "sinks_N": sinks_N, "value_head": self.value_head}
    return fused_attention.attention(how, *arrays, slots_BT, segments, **given)

  def _documents(self, layer: Layer, rows: Rows, batch: int) -> Int[Array, "B T"] | None:
    """Returns the document of each token, or its chunk, to which attention is masked."""
    if not self.chunked:
      return rows.segments_BT
    chunks_BT = rows.chunks(layer)
    return constrain(jnp.broadcast_to(chunks_BT, (batch, chunks_BT.shape[1])), "BT")

  def _blocks(self, q_BTNH: Array, *, complete: bool = False, cached: bool = False) -> Any:
    """Returns `SplashBlocks`, or `Blocks` of all other kernels, with blocks of the device's sizes.

    Args:
      q_BTNH: queries.
      complete: query t is in slot t.
      cached: whether keys are a cache's, whose rows have slots of their own.
    """
    from partitioning.parallel.attention_blocks import Blocks, Scores

    tiles = device_tiles()
    if self.kernel == "splash" and not cached:
      from partitioning.parallel.splash_kernel import SplashBlocks

      return SplashBlocks(self.scale, self.cap, self.windows, tiles.splash, complete)
    # With all scores, each ring step's are one block.
    sizes = (q_BTNH.shape[1],) * 2 if self.kernel == "xla" else tiles.blockwise
    scores = Scores(self.scale, wide_dtype(q_BTNH.dtype), self.cap)
    return Blocks(scores, *sizes, complete=complete, windows=self.windows)

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


# ------------------------------ projections ------------------------------

SINK_DEVIATION = 0.02  # of the initial sinks, as of gpt-oss in the transformers library


def out_dims(spec: LayersSpec, heads: str) -> dict[str, str]:
  """Returns the rows of the projection `out` of an attention with these letters of values."""
  return {"out/kernel": f"{heads}D", **({"out/bias": "D"} if spec.has_bias("out") else {})}


class GroupedQueryAttention(nnx.Module):
  """Grouped-query attention. Sources: arXiv:2305.13245; 2104.09864 for rotary positions."""

  cached = "keys", "values"

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs, name: str = "layers/attention"):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    self.spec, linear = spec, functools.partial(Linear, spec=spec, rngs=rngs)
    self.query, self.key = linear(f"{name}/query"), linear(f"{name}/key")
    self.value = linear(f"{name}/value")
    if spec.query_key_norm:
      self.query_norm = Norm(f"{name}/query_norm", spec)
      self.key_norm = Norm(f"{name}/key_norm", spec)
    if spec.attention_gate:
      self.gate = linear(f"{name}/gate")
    self.out = linear(f"{name}/out", scale=spec.out_scale)
    if spec.attention_sinks:
      dtype, shape = spec.parameter_dtype, spec.sizes("N")
      deviation = jnp.asarray(SINK_DEVIATION, dtype)
      self.sinks = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.attend = Attend.of(spec)

  @staticmethod
  def dims(spec: DecoderSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    found, rows = {"query/kernel": "DNH", "(key|value)/kernel": "DKH"}, {"query": "NH", "key": "KH"}
    biases = {**rows, "value": "KH"}
    found |= {f"{name}/bias": letters for name, letters in biases.items() if spec.has_bias(name)}
    if spec.query_key_norm:
      across = {f"{name}_norm/scale": letters for name, letters in rows.items()}
      found |= across if spec.query_key_norm_across_heads else {"(query|key)_norm/scale": "H"}
    if spec.attention_gate:
      found["gate/kernel"] = "DNH"
    if spec.attention_sinks:
      found["sinks"] = "N"
    return found | out_dims(spec, "NH")

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
    spec, keys = self.spec, (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, spec.lora.dropout, slots_T=rows.slots_BT[0])
    projections = {"query": self.query, "key": self.key, "value": self.value}
    if spec.attention_gate:
      projections["gate"] = self.gate
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    projected = column_parallel(x_BRD, [*projections.values()], RESIDUAL, inputs)
    q_BTNH, k_BTKH, v_BTKH, *gate = (
      named(linear.add_bias(x), name)
      for (name, linear), x in zip(projections.items(), projected, strict=True)
    )
    if spec.query_key_norm:
      q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
    if most := spec.clip_qkv:
      q_BTNH, k_BTKH, v_BTKH = (jnp.clip(x, -most, most) for x in (q_BTNH, k_BTKH, v_BTKH))
    if (table_2BTh := rows.rope(layer)) is not None:
      adjacent = spec.rotary_pairs == "adjacent"
      q_BTNH, k_BTKH = (apply_rope(x, table_2BTh, adjacent=adjacent) for x in (q_BTNH, k_BTKH))
    if spec.query_key_unit_norm:
      q_BTNH, k_BTKH = (self._unit_norm(x, layer) for x in (q_BTNH, k_BTKH))
    q_BTNH = layer.scaled(q_BTNH, rows)
    if cache is not None:
      k_BTKH, v_BTKH = constrain(k_BTKH, "BSKH"), constrain(v_BTKH, "BSKH")
      cache = update_cache(cache, keys=k_BTKH, values=v_BTKH)
      k_BTKH, v_BTKH = cache["keys"], cache["values"]
    sinks_N = constrain(self.sinks[...], "N") if spec.attention_sinks else None
    output_BTNH = self.attend(
      q_BTNH, k_BTKH, v_BTKH, layer, rows, sinks_N, cached=cache is not None
    )
    if gate:
      output_BTNH = output_BTNH * jax.nn.sigmoid(gate[0])
    inputs = dropped(key=keys[1], letters=QUERIES, shape=output_BTNH.shape)
    return self.out.add_bias(row_parallel(output_BTNH, self.out, RESIDUAL, inputs)), cache

  def _unit_norm(self, x: Float[Array, "B T N H"], layer: Layer) -> Float[Array, "B T N H"]:
    """Returns heads of unit root mean square, in layers that rotate them; in others, the same."""
    normed = rms_norm(x, jnp.ones(x.shape[-1:], x.dtype), epsilon=self.spec.norm_epsilon)
    return normed if layer.rotated is None else jnp.where(layer.rotated, normed, x)


class BidirectionalAttention(nnx.Module):
  """Multi-head attention of every token to all: that of an encoder."""

  def __init__(self, spec: LayersSpec, *, rngs: nnx.Rngs, name: str = "layers/attention"):
    """Draws the four projections; the last is scaled down by the depth, as in GPT-2."""
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.query, self.key = linear(f"{name}/query"), linear(f"{name}/key")
    self.value = linear(f"{name}/value")
    self.out = linear(f"{name}/out", scale=spec.out_scale)

  @staticmethod
  def dims(spec: LayersSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    rows = {"(query|key|value)/kernel": "DNH", "(query|key|value)/bias": "NH"}
    return rows | out_dims(spec, "NH")

  def __call__(
    self,
    x_BRD: Float[Array, "B R D"],
    layer: Layer,
    rows: Rows,
    cache: None = None,
    key: Key[Array, ""] | None = None,
  ) -> tuple[Float[Array, "B R D"], None]:
    """Returns the update of the residual, given its normalized value; the others are not read."""
    del layer, rows, key
    projections = [self.query, self.key, self.value]
    projected = column_parallel(x_BRD, projections, RESIDUAL)
    q_BTNH, k_BTNH, v_BTNH = (
      linear.add_bias(x) for linear, x in zip(projections, projected, strict=True)
    )
    k_BSNH, v_BSNH = constrain(k_BTNH, "BSNH"), constrain(v_BTNH, "BSNH")
    output_BTNH = constrain(_attend(q_BTNH, k_BSNH, v_BSNH), QUERIES)
    return self.out.add_bias(row_parallel(output_BTNH, self.out, RESIDUAL)), cache
