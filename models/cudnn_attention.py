"""cuDNN's flash attention, for GPUs of Hopper's generation and later, through `jax.nn`.

It never materializes all scores (arXiv:2205.14135). JAX gives access to causal masks, sliding
windows and groups of query heads; not to documents, soft caps and sinks, and not to other rows than
complete ones. configs/schema/model_checks.py refuses the rest.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from models import blockwise_attention
from partitioning.parallel.sharded_function import on_shards
from runtime.rematerialization import ATTENTION_OUTPUT

NAME = "cudnn_attention"  # of the kernel in a trace, by which plans know it
# Of the blocks of keys in a plan, where nothing runs: only what is read and written counts there.
_PLANNED_BLOCKS = (512, 512)


def attention(
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
      return blockwise_attention.attention(q, k, v, slots, **given, **how)
    of_keys = "BSNH" if k.shape[2] == q.shape[2] else "BSKH"
    named = ("BTNH", of_keys, of_keys, "")
    on_device = functools.partial(_attend, implementation, scale, windows)
    out_BTNH = on_shards(on_device, named, "BTNH", q, k, v, kind)
    return checkpoint_name(out_BTNH, ATTENTION_OUTPUT)

  kernel.__name__ = NAME
  # A new function each time: JAX would reuse one that was traced under another activation layout.
  return jax.jit(kernel)(q_BTNH, k_BSKH, v_BSKH, slots_BT, kind)


def _attend(
  implementation: str, scale: float | None, windows: tuple, q: Array, k: Array, v: Array, kind
) -> Array:
  """Returns the attention output on one device."""

  def of_window(window: int | None, q: Array, k: Array, v: Array) -> Array:
    beyond = window is None or window >= k.shape[1]
    past = None if beyond else (window - 1, 0)  # tokens before the query's own, and after
    how = {"scale": scale, "is_causal": True, "local_window_size": past}
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **how)

  ways = [functools.partial(of_window, window) for window in windows]
  return ways[0](q, k, v) if kind is None else jax.lax.switch(kind, ways, q, k, v)
