"""JAX's splash attention, a flash-attention kernel in Pallas for TPUs.

It never materializes all scores: blocks of queries iterate over blocks of keys with an online
softmax (arXiv:2205.14135), and fully masked blocks are skipped. On other platforms the kernel is
interpreted, which is slow and serves for tests.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from partitioning.parallel.sharded_function import on_shards
from runtime.rematerialization import ATTENTION_OUTPUT

_BLOCKS = (512, 256, 128)  # tokens; the largest that divides a row


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSNH: Float[Array, "B S N H"],
  v_BSNH: Float[Array, "B S N H"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  scale: float | None = None,
  cap: float = 0.0,
) -> Float[Array, "B T N H"]:
  """Returns the same as `attention.causal_attention`, for complete rows without a window.

  Args:
    q_BTNH: queries; T is a multiple of 128.
    k_BSNH: keys, as many.
    v_BSNH: values.
    segments: document of each query and key; None: one document.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores; 0 is off.
  """
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
  if segments is None:
    return on_shards(
      functools.partial(_shard, cap=cap),
      ("BTNH", "BSNH", "BSNH"),
      "BTNH",
      *(q_BTNH, k_BSNH, v_BSNH),
    )
  return on_shards(
    functools.partial(_shard, cap=cap),
    ("BTNH", "BSNH", "BSNH", "BT", "BS"),
    "BTNH",
    *(q_BTNH, k_BSNH, v_BSNH, *segments),
  )


def _shard(q_BTNH: Array, k_BSNH: Array, v_BSNH: Array, *segments: Array, cap: float) -> Array:
  """Runs the kernel for each row of a shard."""
  # Experimental: JAX has no public attention kernel for TPUs (jax.nn.dot_product_attention is XLA's
  # there). Imported here: it takes a third of a second.
  from jax.experimental.pallas.ops.tpu import splash_attention as pallas

  turned = [jnp.moveaxis(x, 2, 1) for x in (q_BTNH, k_BSNH, v_BSNH)]
  heads, length = turned[0].shape[1:3]

  def rows(q_BNTH, k_BNSH, v_BNSH, *segments, interpret: bool) -> Array:
    kernel = _kernel(pallas, heads, length, cap=cap, interpret=interpret)
    if not segments:
      return jax.vmap(kernel)(q_BNTH, k_BNSH, v_BNSH)
    return jax.vmap(kernel)(q_BNTH, k_BNSH, v_BNSH, pallas.SegmentIds(*segments))

  mixed_BNTH = jax.lax.platform_dependent(
    *turned,
    *segments,
    tpu=functools.partial(rows, interpret=False),
    default=functools.partial(rows, interpret=True),
  )
  return jnp.moveaxis(mixed_BNTH, 1, 2)


def _kernel(
  pallas: ModuleType, heads: int, length: int, *, cap: float, interpret: bool
) -> Callable[..., Array]:
  block = next(size for size in _BLOCKS if length % size == 0)
  mask = pallas.MultiHeadMask([pallas.CausalMask((length, length)) for _ in range(heads)])
  sizes = dict.fromkeys(
    [
      *("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"),
      *("block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
    ],
    block,
  )
  return pallas.make_splash_mha(
    mask,
    block_sizes=pallas.BlockSizes(**sizes),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=ATTENTION_OUTPUT,  # the output, and the softmax's normalizer
    attn_logits_soft_cap=cap or None,
    interpret=interpret,
  )
