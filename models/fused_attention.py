"""Causal attention without all scores in memory: in plain JAX, and by kernels of TPUs and GPUs.

Plain JAX (`partitioning.parallel.attention_blocks`) runs on every platform, splash attention
(`partitioning.parallel.splash_kernel`) on TPUs. Both also are the steps of ring attention. cuDNN's
kernel is called through `jax.nn`.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from partitioning.constraints import on_gpus
from partitioning.dtypes import wide_dtype
from partitioning.parallel.attention_blocks import Blocks, Facts, Scores, by_kind
from partitioning.parallel.sharded_function import on_shards
from partitioning.parallel.splash_kernel import SplashBlocks
from runtime.rematerialization import ATTENTION_OUTPUT

# ------------------------------ blocks of queries and keys ------------------------------


def attention(
  how: Blocks | SplashBlocks,
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKU: Float[Array, "B S K U"],
  slots_BT: Int[Array, "#B T"] | None = None,
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  kind: Int[Array, ""] | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  value_head: str = "H",
) -> Float[Array, "B T N U"]:
  """Returns the same as `attention.causal_attention`, in memory linear in T and S.

  Args:
    how: scores are computed, in which blocks, and the windows of the kinds of layers.
    q_BTNH: queries.
    k_BSKH: keys; slot s has the s-th of its row. Each of the K heads serves N/K query heads.
    v_BSKU: values, likewise; their heads may have another size.
    slots_BT: of the queries; each attends to the slots up to its own. None: query t is in slot t.
    segments: document of each query and key; a query attends only to its own. None: one document.
    kind: which of the windows; None: the first.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    value_head: the legend's letter of the size of the values' heads.
  """
  # Slots that all rows share have no B, which is split over devices.
  shared = slots_BT is None or slots_BT.shape[0] == 1
  slots = slots_BT[0] if shared and slots_BT is not None else slots_BT
  of_keys = "BSN" if k_BSKH.shape[2] == q_BTNH.shape[2] else "BSK"
  facts = Facts(slots, *(segments or (None, None)), kind)
  letters = Facts("T" if shared else "BT", "BT", "BS", "")
  given = (how.prepared(q_BTNH), k_BSKH, v_BSKU, sinks_N, *facts)
  named = ("BTNH", f"{of_keys}H", of_keys + value_head, "N", *letters)

  def on_device(q, k, v, sinks, *facts: Array | None) -> Array:
    return _attend(how, q, k, v, sinks, Facts(*facts))

  return on_shards(on_device, named, f"BTN{value_head}", *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how, q: Array, k: Array, v: Array, sinks: Array | None, facts: Facts) -> Array:
  return _forward(how, q, k, v, sinks, facts)[0]


def _forward(how, q: Array, k: Array, v: Array, sinks: Array | None, facts: Facts):
  """Returns the attention output, and what the backward pass needs."""
  out, normalizer = how.attend(q, k, v, sinks, facts)
  out = checkpoint_name(out, ATTENTION_OUTPUT)
  return out, (q, k, v, sinks, facts, out, checkpoint_name(normalizer, ATTENTION_OUTPUT))


def _backward(how, saved, d_out: Array):
  """Returns the gradients."""
  q, k, v, sinks, facts, out, normalizer = saved
  d_q, d_k, d_v, d_sinks = how.gradients(q, k, v, sinks, facts, out, normalizer, d_out)
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None


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
      the program is compiled for GPUs. Elsewhere, where a plan for GPUs is traced, blockwise
      attention: it saves the same arrays for its backward pass.
  """
  if implementation is None and on_gpus():
    implementation = "cudnn"

  def kernel(q, k, v, slots, kind) -> Array:
    if implementation is None:
      scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, wide_dtype(q.dtype))
      how = Blocks(scores, *_PLANNED_BLOCKS, complete=True, windows=windows)
      return attention(how, q, k, v, slots, kind=kind)
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
