"""Causal attention that never has all scores in memory, in plain JAX, for every platform.

`partitioning.parallel.attention_blocks` has the online softmax and its gradients; ring attention
uses them as well.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from partitioning.dtypes import wide_dtype
from partitioning.parallel import attention_blocks
from partitioning.parallel.attention_blocks import (
  Blocks,
  Keys,
  Queries,
  Saved,
  Scores,
  Softmax,
  by_heads,
  by_kind,
  by_tokens,
  empty_softmax,
  grouped,
)
from partitioning.parallel.sharded_function import on_shards
from runtime.rematerialization import ATTENTION_OUTPUT


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKU: Float[Array, "B S K U"],
  slots_BT: Int[Array, "#B T"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
  windows: tuple[int | None, ...] = (None,),
  kind: Int[Array, ""] | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  complete: bool,
  blocks: tuple[int, int],
  value_head: str = "H",
) -> Float[Array, "B T N U"]:
  """Returns the same as `attention.causal_attention`, in memory linear in T and S.

  Args:
    q_BTNH: queries.
    k_BSKH: keys; slot s has the s-th of its row. Each of the K heads serves N/K query heads.
    v_BSKU: values, likewise; their heads may have another size.
    slots_BT: of the queries; each attends to the slots up to its own.
    segments: document of each query and key; a query attends only to its own. None: one document.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores; 0 is off.
    windows: the sliding windows of the kinds of layers; None: the full past.
    kind: which of them; None: the first.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    complete: query t is in slot t.
    blocks: most tokens of a block of queries, and of keys.
    value_head: the legend's letter of the size of the values' heads.
  """
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  scores = Scores(scale, wide_dtype(q_BTNH.dtype), cap)
  how = _How(Blocks(scores, *blocks, complete=complete), windows)
  # Slots that all rows share have no B, which is split over devices.
  shared = slots_BT.shape[0] == 1
  of_keys = "BSN" if k_BSKH.shape[2] == q_BTNH.shape[2] else "BSK"
  facts = _Facts(slots_BT[0] if shared else slots_BT, *(segments or (None, None)), kind)
  letters = _Facts("T" if shared else "BT", "BT", "BS", "")
  given = (q_BTNH, k_BSKH, v_BSKU, sinks_N, *facts)
  named = ("BTNH", f"{of_keys}H", of_keys + value_head, "N", *letters)

  def on_device(q, k, v, sinks, *facts: Array | None) -> Array:
    return _attend(how, q, k, v, sinks, _Facts(*facts))

  return on_shards(on_device, named, f"BTN{value_head}", *given)


class _Facts(NamedTuple):
  """What decides which keys a query attends to: arguments of `attention`."""

  slots: Array  # T, or B T
  segments_BT: Array | None
  segments_BS: Array | None
  kind: Array | None


class _How(NamedTuple):
  """The static part: blocks, and the windows of the kinds of layers."""

  blocks: Blocks
  windows: tuple[int | None, ...]


def _pairs(q_BTNH: Array, k_BSKH: Array, v_BSKU: Array, facts: _Facts) -> tuple[Queries, Keys]:
  """Returns the arguments of `attention_blocks`."""
  slots_BT = facts.slots if facts.slots.ndim == 2 else facts.slots[None]
  slots_S = jnp.arange(k_BSKH.shape[1], dtype=slots_BT.dtype)
  queries = Queries(by_heads(q_BTNH, k_BSKH.shape[2]), slots_BT, facts.segments_BT)
  k_BKSH, v_BKSU = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKU, 1, 2)
  return queries, Keys(k_BKSH, v_BKSU, slots_S, facts.segments_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts) -> Array:
  return _forward(how, q, k, v, sinks, facts)[0]


def _forward(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts):
  """Returns the attention output, and what the backward pass needs."""
  queries, keys = _pairs(q, k, v, facts)

  def softmax(window: int | None, queries: Queries, keys: Keys) -> Softmax:
    shape = (*queries.q_BKGTH.shape[:-1], v.shape[-1])
    start = empty_softmax(shape, how.blocks.scores.dtype, grouped(sinks, k.shape[2]))
    return attention_blocks.add_keys(how.blocks, start, queries, keys, window)

  found = by_kind(how.windows, facts.kind, softmax, queries, keys)
  out_BKGTU, normalizer_BKGT = found.finished()
  out = checkpoint_name(by_tokens(out_BKGTU).astype(v.dtype), ATTENTION_OUTPUT)
  normalizer_BKGT = checkpoint_name(normalizer_BKGT, ATTENTION_OUTPUT)
  return out, (q, k, v, sinks, facts, out, normalizer_BKGT)


def _backward(how: _How, saved, d_out: Array):
  """Returns the gradients."""
  q, k, v, sinks, facts, out, normalizer_BKGT = saved
  queries, keys = _pairs(q, k, v, facts)
  heads = k.shape[2]
  given = attention_blocks.saved(by_heads(out, heads), by_heads(d_out, heads), normalizer_BKGT)

  def gradients(window: int | None, given: Saved, queries: Queries, keys: Keys):
    arrays = queries.q_BKGTH, keys.k_BKSH, keys.v_BKSU
    zeros = tuple(jnp.zeros(x.shape, how.blocks.scores.dtype) for x in arrays)
    return attention_blocks.add_gradients(how.blocks, zeros, given, queries, keys, window)

  d_q, d_k, d_v = by_kind(how.windows, facts.kind, gradients, given, queries, keys)
  d_sinks = attention_blocks.sink_gradient(sinks, given)
  d_k, d_v = jnp.swapaxes(d_k, 1, 2).astype(k.dtype), jnp.swapaxes(d_v, 1, 2).astype(v.dtype)
  return by_tokens(d_q).astype(q.dtype), d_k, d_v, d_sinks, None


_attend.defvjp(_forward, _backward)


# ------------------------------ cuDNN ------------------------------
# Flash attention (arXiv:2205.14135) for GPUs of Hopper's generation and later, through `jax.nn`,
# which gives access to causal masks, sliding windows and groups of query heads; not to documents,
# soft caps and sinks, and not to other rows than complete ones. configs/schema/model_checks.py
# refuses the rest.

CUDNN_KERNEL = "cudnn_attention"  # of the kernel in a trace, by which plans know it
# Of the blocks of keys in a plan, where nothing runs: only what is read and written counts there.
_PLANNED_BLOCKS = (512, 512)


def cudnn_attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKH: Float[Array, "B S K H"],
  slots_BT: Int[Array, "#B T"],
  *,
  scale: float | None = None,
  windows: tuple[int | None, ...] = (None,),
  kind: Int[Array, ""] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B T N H"]:
  """Returns the same as `attention.causal_attention`, for complete rows.

  Args:
    q_BTNH: queries, in float16 or bfloat16 for cuDNN.
    k_BSKH: keys, as many; each of the K heads serves N/K query heads.
    v_BSKH: values.
    slots_BT: of the queries: t.
    scale: of the scores; None: H ** -0.5.
    windows: the sliding windows of the kinds of layers; None: the full past.
    kind: which of them; None: the first.
    implementation: `cudnn`, or `xla`: JAX's in plain operations, with all scores. None: cudnn where
      there are GPUs. Elsewhere, where a plan for GPUs is traced, blockwise attention: it saves the
      same arrays for its backward pass.
  """
  if implementation is None and jax.default_backend() == "gpu":
    implementation = "cudnn"

  def kernel(q, k, v, slots, kind) -> Array:
    given = {"scale": scale, "windows": windows, "kind": kind}
    if implementation is None:
      how = {"complete": True, "blocks": _PLANNED_BLOCKS}
      return attention(q, k, v, slots, **given, **how)
    of_keys = "BSNH" if k.shape[2] == q.shape[2] else "BSKH"
    named = ("BTNH", of_keys, of_keys, "")
    on_device = functools.partial(_cudnn_on_device, implementation, scale, windows)
    out_BTNH = on_shards(on_device, named, "BTNH", q, k, v, kind)
    return checkpoint_name(out_BTNH, ATTENTION_OUTPUT)

  kernel.__name__ = CUDNN_KERNEL
  # A new function each time: JAX would reuse one that was traced under another activation layout.
  return jax.jit(kernel)(q_BTNH, k_BSKH, v_BSKH, slots_BT, kind)


def _cudnn_on_device(
  implementation: str, scale: float | None, windows: tuple, q: Array, k: Array, v: Array, kind
) -> Array:
  """Returns the attention output on one device."""

  def of_window(window: int | None, q: Array, k: Array, v: Array) -> Array:
    beyond = window is None or window >= k.shape[1]
    past = None if beyond else (window - 1, 0)  # tokens before the query's own, and after
    how = {"scale": scale, "is_causal": True, "local_window_size": past}
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **how)

  return by_kind(windows, kind, of_window, q, k, v)
