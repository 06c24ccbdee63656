"""Causal attention by a kernel for TPUs that never has all scores in memory, splash attention.

`partitioning.parallel.splash_kernel` calls it; ring attention does so as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from partitioning.dtypes import scaled
from partitioning.parallel.attention_blocks import by_kind
from partitioning.parallel.sharded_function import on_shards
from partitioning.parallel.splash_kernel import CAUSAL, LANES, SLOTS, Kernel
from runtime.rematerialization import ATTENTION_OUTPUT


def attention(
  q_BTNH: Float[Array, "B T N H"],
  k_BSKH: Float[Array, "B S K H"],
  v_BSKU: Float[Array, "B S K U"],
  segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
  *,
  slots_T: Int[Array, " T"] | None = None,
  scale: float | None = None,
  cap: float = 0.0,
  windows: tuple[int | None, ...] = (None,),
  kind: Int[Array, ""] | None = None,
  sinks_N: Float[Array, " N"] | None = None,
  block: int = 512,
  value_head: str = "H",
) -> Float[Array, "B T N U"]:
  """Returns the same as `attention.causal_attention`, of rows that all begin with slot 0.

  Args:
    q_BTNH: queries.
    k_BSKH: keys, slot s with the s-th of its row; each of the K heads serves N/K query heads.
    v_BSKU: values; their heads may have another size.
    segments: document of each query and key; None: one document.
    slots_T: of the queries, each device's in turn; None: query t is in slot t.
    scale: of the scores; None: H ** -0.5.
    cap: of the scaled scores; 0 is off.
    windows: the sliding windows of the kinds of layers; None: the full past.
    kind: which of them; None: the first.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    block: most tokens of a block of queries, and of keys.
    value_head: the legend's letter of the size of the values' heads.
  """
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = scaled(q_BTNH, scale)
  how = _How(cap, windows, block, complete=slots_T is None)
  of_keys = "BSN" if k_BSKH.shape[2] == q_BTNH.shape[2] else "BSK"
  given = (q_BTNH, k_BSKH, v_BSKU, sinks_N, slots_T, *(segments or (None, None)), kind)
  named = ("BTNH", f"{of_keys}H", of_keys + value_head, "N", "T", "BT", "BS", "")

  def on_device(q, k, v, sinks, *facts: Array | None) -> Array:
    return _attend(how, q, k, v, sinks, _Facts(*facts))

  return on_shards(on_device, named, f"BTN{value_head}", *given)


class _Facts(NamedTuple):
  """What decides which keys a query attends to: arguments of `attention`."""

  slots_T: Array | None
  segments_BT: Array | None
  segments_BS: Array | None
  kind: Array | None


@dataclasses.dataclass(frozen=True)
class _How:
  """The static part of an attention."""

  cap: float
  windows: tuple[int | None, ...]
  block: int
  complete: bool

  def run(self, kind: Array | None, function: Callable, *given: Any) -> Any:
    """Returns function(kernel, *given) with the kernel of a layer's kind."""
    mask = CAUSAL if self.complete else SLOTS

    def of_window(window: int | None, *given: Any) -> Any:
      return function(Kernel(self.cap, window, mask, self.block), *given)

    return by_kind(self.windows, kind, of_window, *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts) -> Array:
  return _forward(how, q, k, v, sinks, facts)[0]


def _forward(how: _How, q: Array, k: Array, v: Array, sinks: Array | None, facts: _Facts):
  """Returns the attention output, and what the backward pass needs."""
  wide_BN = None if sinks is None else jnp.tile(sinks.astype(jnp.float32)[None], (q.shape[0], 1))
  given = (*map(_by_heads, (q, k, v)), _segments(facts), wide_BN, _slots(how, facts))
  out_BNTU, normalizer_BNT = how.run(facts.kind, Kernel.forward, *given)
  out = checkpoint_name(_by_tokens(out_BNTU, q.shape[1]), ATTENTION_OUTPUT)
  normalizer_BNT = checkpoint_name(normalizer_BNT[..., : q.shape[1]], ATTENTION_OUTPUT)
  return out, (q, k, v, sinks, facts, out, normalizer_BNT)


def _backward(how: _How, saved, d_out: Array):
  """Returns the gradients."""
  q, k, v, sinks, facts, out, normalizer_BNT = saved
  length = q.shape[1]
  arrays = tuple(map(_by_heads, (q, k, v)))
  more = -length % LANES
  padded_BNT = jnp.pad(normalizer_BNT, ((0, 0), (0, 0), (0, more)))
  given = (*arrays, _segments(facts), _by_heads(out), padded_BNT, _by_heads(d_out))
  d_q, d_k, d_v = how.run(facts.kind, Kernel.backward, *given, _slots(how, facts))
  d_q, d_k, d_v = _by_tokens(d_q, length), *(_by_tokens(x, k.shape[1]) for x in (d_k, d_v))
  d_sinks = None
  if sinks is not None:
    wide = normalizer_BNT.dtype
    products_BNT = jnp.einsum("BTNU,BTNU->BNT", out.astype(wide), d_out.astype(wide))
    weights_BNT = jnp.exp(sinks.astype(wide)[None, :, None] - normalizer_BNT)
    d_sinks = -jnp.sum(weights_BNT * products_BNT, axis=(0, 2)).astype(sinks.dtype)
  return d_q, d_k, d_v, d_sinks, None


def _segments(facts: _Facts) -> tuple[Array, Array] | None:
  """Returns the documents of queries and keys, those of padding the last one."""
  if facts.segments_BT is None:
    return None
  pairs = facts.segments_BT, facts.segments_BS
  return tuple(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), mode="edge") for x in pairs)


def _slots(how: _How, facts: _Facts) -> Array | None:
  """Returns the slots of the queries, those of padding the last one; None of complete rows."""
  if how.complete:
    return None
  return jnp.pad(facts.slots_T, (0, -facts.slots_T.size % LANES), mode="edge")


def _by_heads(x_BTNH: Array) -> Array:
  """Returns B N T H, T padded with zeros: later slots, which no query sees."""
  padded = jnp.pad(x_BTNH, ((0, 0), (0, -x_BTNH.shape[1] % LANES), (0, 0), (0, 0)))
  return jnp.moveaxis(padded, 2, 1)


def _by_tokens(x_BNTH: Array, length: int) -> Array:
  """Returns B T N H, the first T: the inverse of `_by_heads`."""
  return jnp.moveaxis(x_BNTH[:, :, :length], 1, 2)


_attend.defvjp(_forward, _backward)
