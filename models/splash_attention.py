"""JAX's splash attention, a flash-attention kernel in Pallas for TPUs.

It never materializes all scores: blocks of queries iterate over blocks of keys with an online
softmax (arXiv:2205.14135), and fully masked blocks are skipped. On other platforms the kernel is
interpreted, which is slow and serves for tests.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from partitioning.parallel.sharded_function import on_shards
from runtime.rematerialization import ATTENTION_OUTPUT

LANES = 128  # rows are padded to a multiple


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKU: Float[Array, "B S K U"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
  windows: tuple[int | None, ...] = (None,),
  kind: Int[Array, ""] | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  block: int = 512,
  value_head: str = "H",
) -> Float[Array, "B T N U"]:
  """Returns the same as `attention.causal_attention`, for complete rows.

  Args:
    q_BTNH: queries.
    k_BSKH: keys, as many; each of the K heads serves N/K query heads.
    v_BSKU: values; their heads may have another size.
    segments: document of each query and key; None: one document.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores; 0 is off.
    windows: the sliding windows of the kinds of layers; None: the full past.
    kind: which of them; None: the first.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    block: most tokens of a block of queries, and of keys.
    value_head: the legend's letter of the size of the values' heads.
  """
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
  how = _How(cap, windows, block)
  of_keys = "BSN" if k_BSKH.shape[2] == q_BTNH.shape[2] else "BSK"
  given = (q_BTNH, k_BSKH, v_BSKU, sinks_N, *(segments or (None, None)), kind)
  named = ("BTNH", f"{of_keys}H", of_keys + value_head, "N", "BT", "BS", "")

  def on_device(q, k, v, sinks, *facts: Array | None) -> Array:
    return _attend(how, q, k, v, sinks, _Facts(*facts))

  return on_shards(on_device, named, f"BTN{value_head}", *given)


class _Facts(NamedTuple):
  """What decides which keys a query attends to: arguments of `attention`."""

  segments_BT: Array | None
  segments_BS: Array | None
  kind: Array | None


@dataclasses.dataclass(frozen=True)
class _How:
  """The static part of an attention."""

  cap: float
  windows: tuple[int | None, ...]
  block: int

  def run(self, function: Callable, kind: Array | None, heads: int, *given: Any) -> Any:
    """Returns function(kernel, *given) with the kernel of a layer's kind, for each row."""
    length = given[0].shape[-2]

    def on_platform(window: int | None, *given: Any, interpret: bool) -> Any:
      kernel = _kernel(self, window, heads, length, interpret)
      return jax.vmap(functools.partial(function, kernel))(*given)

    def of_window(window: int | None, *given: Any) -> Any:
      one = functools.partial(on_platform, window)
      tpu, default = (functools.partial(one, interpret=interpret) for interpret in (False, True))
      return jax.lax.platform_dependent(*given, tpu=tpu, default=default)

    ways = [functools.partial(of_window, window) for window in self.windows]
    return ways[0](*given) if kind is None else jax.lax.switch(kind, ways, *given)


def _pallas() -> ModuleType:
  # Experimental: JAX has no public attention kernel for TPUs (jax.nn.dot_product_attention is XLA's
  # there). Imported here: it takes a third of a second.
  from jax.experimental.pallas.ops.tpu import splash_attention as pallas

  return pallas


def _kernel(how: _How, window: int | None, heads: int, length: int, interpret: bool) -> Any:
  pallas, shape = _pallas(), (length, length)
  mask = pallas.CausalMask(shape)
  if window is not None and window < length:
    mask = pallas.LocalMask(shape, (window - 1, 0), 0)
  # The largest multiple of the lanes that divides the row.
  block = max(x for x in range(LANES, max(how.block, LANES) + 1, LANES) if length % x == 0)
  names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"]
  names += ["block_kv_dkv_compute", "block_q_dq", "block_kv_dq"]
  return pallas.make_splash_mha(
    pallas.MultiHeadMask([mask] * heads),
    block_sizes=pallas.BlockSizes(**dict.fromkeys(names, block)),
    head_shards=1,
    q_seq_shards=1,
    save_residuals=True,
    attn_logits_soft_cap=how.cap or None,
    interpret=interpret,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts) -> Array:
  return _forward(how, q, k, v, sinks, facts)[0]


def _forward(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts):
  """Returns the attention output, and what the backward pass needs."""

  def row(kernel, q, k, v, sinks, segments):
    out, (normalizer,) = kernel(q, k, v, _documents(segments), sinks)
    return out, normalizer

  q_BNTH, k_BKSH, v_BKSU = map(_by_heads, (q, k, v))
  wide_BN = None if sinks is None else jnp.tile(sinks.astype(jnp.float32)[None], (q.shape[0], 1))
  given = q_BNTH, k_BKSH, v_BKSU, wide_BN, _segments(facts)
  out_BNTU, normalizer_BNT = how.run(row, facts.kind, q.shape[2], *given)
  out = checkpoint_name(_by_tokens(out_BNTU, q.shape[1]), ATTENTION_OUTPUT)
  normalizer_BNT = checkpoint_name(normalizer_BNT[..., : q.shape[1]], ATTENTION_OUTPUT)
  return out, (q, k, v, sinks, facts, out, normalizer_BNT)


def _backward(how: _How, saved, d_out: Array):
  """Returns the gradients."""
  # Private: differentiating the kernel would save its arguments and results once for each kind of
  # layers, since each has a kernel of its own. The same function in jax 0.10 and 0.12.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

  q, k, v, sinks, facts, out, normalizer_BNT = saved

  def row(kernel, q, k, v, segments, out, normalizer, d_out):
    infos = kernel.dq_mask_info, kernel.dkv_mask_info
    kept = (q, k, v, _documents(segments), None, out, normalizer, *infos)
    static = {"save_residuals": False, "residual_checkpoint_name": None}
    names = ("mask_value", "is_mqa", "block_sizes", "mask_function", "attn_logits_soft_cap")
    static |= {name: kernel.kwargs[name] for name in (*names, "interpret")}
    found = splash_attention_kernel._splash_attention_bwd(**static, res=kept, do=d_out)
    return found[3:6]

  length = q.shape[1]
  arrays = tuple(map(_by_heads, (q, k, v)))
  more = -length % LANES
  padded_BNT = jnp.pad(normalizer_BNT, ((0, 0), (0, 0), (0, more)))
  given = (*arrays, _segments(facts), _by_heads(out), padded_BNT, _by_heads(d_out))
  found = how.run(row, facts.kind, q.shape[2], *given)
  d_q, d_k, d_v = (_by_tokens(x, length) for x in found)
  d_sinks = None
  if sinks is not None:
    wide = normalizer_BNT.dtype
    products_BNT = jnp.einsum("BTNU,BTNU->BNT", out.astype(wide), d_out.astype(wide))
    weights_BNT = jnp.exp(sinks.astype(wide)[None, :, None] - normalizer_BNT)
    d_sinks = -jnp.sum(weights_BNT * products_BNT, axis=(0, 2)).astype(sinks.dtype)
  return d_q, d_k, d_v, d_sinks, None


def _documents(segments: tuple[Array, Array] | None) -> Any:
  """Returns a row's documents as the kernel takes them."""
  return None if segments is None else _pallas().SegmentIds(*segments)


def _segments(facts: _Facts) -> tuple[Array, Array] | None:
  """Returns the documents of queries and keys, those of padding the last one."""
  if facts.segments_BT is None:
    return None
  pairs = facts.segments_BT, facts.segments_BS
  return tuple(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), mode="edge") for x in pairs)


def _by_heads(x_BTNH: Array) -> Array:
  """Returns B N T H, T padded with zeros: later slots, which no query sees."""
  padded = jnp.pad(x_BTNH, ((0, 0), (0, -x_BTNH.shape[1] % LANES), (0, 0), (0, 0)))
  return jnp.moveaxis(padded, 2, 1)


def _by_tokens(x_BNTH: Array, length: int) -> Array:
  """Returns B T N H, the first T: the inverse of `_by_heads`."""
  return jnp.moveaxis(x_BNTH[:, :, :length], 1, 2)


_attend.defvjp(_forward, _backward)
