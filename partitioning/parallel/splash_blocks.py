"""The steps of a ring by splash attention: what `attention_blocks` does, in a kernel for TPUs.

Queries and keys are pieces of consecutive slots, as `ring_attention` passes them around. Each call
of the kernel is an online softmax over its keys, which is added to the one so far.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.parallel.attention_blocks import Saved, Softmax
from partitioning.parallel.block_pairs import Keys, Queries
from partitioning.parallel.splash_kernel import CAUSAL, EVERY, SLOTS, Kernel

_NO_KEY = -1e30  # the logarithm of a normalizer below which no key was seen


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
  """The static part of an attention, as `block_pairs.Blocks`.

  Attributes:
    cap: soft cap of the scores, of queries that are scaled; 0 is off.
    windows: the sliding windows of the kinds of layers; None: the full past.
    block: most tokens of a block of queries, and of keys.
    dtype: of the softmax and of sums of gradients.
  """

  cap: float
  windows: tuple[int | None, ...]
  block: int
  dtype: Any = jnp.float32

  def each(self, kind: jax.Array | None, function: Callable, *given: Any) -> Any:
    """Returns function(window, *given) with the window of a layer's kind."""
    ways = [functools.partial(function, window) for window in self.windows]
    return ways[0](*given) if kind is None else jax.lax.switch(kind, ways, *given)

  def parts(
    self, window: int | None, queries: Queries, keys: Keys, every: bool
  ) -> Iterator[tuple[Kernel, slice, jax.Array | None]]:
    """Yields the calls of the kernel: its static part, the keys, and the slots of the queries.

    Args:
      window: of the layer.
      queries: one piece or two.
      keys: likewise; unless the queries see all of them, those of the queries' slots.
      every: whether the queries see all keys, but for windows and documents.
    """
    length, size = queries.q_BKGTH.shape[3], keys.k_BKSH.shape[2]
    make = functools.partial(Kernel, self.cap, window, block=self.block)
    if window is not None:  # which keys are seen depends on how far away they are
      piece = size // 2 if length == size else min(length, size)
      for start in range(0, size, piece):
        first = keys.slots_S[start]
        yield make(mask=SLOTS), slice(start, start + piece), queries.slots_BT[0] - first
      return
    # The early piece of a device comes before its late one: as in a row of these two alone.
    yield make(mask=EVERY if every else CAUSAL), slice(0, size), None


def add_keys(
  how: SplashBlocks,
  total: Softmax,
  queries: Queries,
  keys: Keys,
  kind: jax.Array | None,
  *,
  every: bool,
) -> Softmax:
  """Returns the softmax with more keys.

  Args:
    how: the static part.
    total: the softmax so far.
    queries: those that it is of, scaled.
    keys: more keys.
    kind: of the layer; None: the first.
    every: as in `SplashBlocks.parts`.
  """
  shape_BKGT = queries.q_BKGTH.shape[:-1]

  def added(window: int | None, total: Softmax, queries: Queries, keys: Keys) -> Softmax:
    for kernel, columns, slots_T in how.parts(window, queries, keys, every):
      given = _arrays(queries, keys, columns)
      out_BNTU, normalizer_BNT = kernel.forward(*given, slots_T=slots_T)
      largest = normalizer_BNT.reshape(shape_BKGT)
      out = out_BNTU.reshape(*shape_BKGT, -1).astype(how.dtype)
      seen = largest > _NO_KEY
      part = Softmax(jnp.where(seen[..., None], out, 0), largest, seen.astype(how.dtype))
      total = _sum(total, part)
    return total

  return how.each(kind, added, total, queries, keys)


def _sum(one: Softmax, other: Softmax) -> Softmax:
  """Returns the softmax over the keys of both."""
  top = jnp.maximum(one.largest_BKGT, other.largest_BKGT)
  shrink = [jnp.exp(x.largest_BKGT - top) for x in (one, other)]
  sums = one.sums_BKGTU * shrink[0][..., None] + other.sums_BKGTU * shrink[1][..., None]
  return Softmax(sums, top, one.weight_BKGT * shrink[0] + other.weight_BKGT * shrink[1])


def add_gradients(
  how: SplashBlocks,
  totals: tuple[jax.Array, jax.Array, jax.Array],
  given: Saved,
  queries: Queries,
  keys: Keys,
  kind: jax.Array | None,
  *,
  every: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns sums of gradients, those of the pairs of these queries and keys added.

  Args:
    how: the static part.
    totals: of the queries (B K G T H), keys (B K S H) and values (B K S U), in float32.
    given: of `attention_blocks.saved`, with the averaged values.
    queries: as in `add_keys`.
    keys: likewise.
    kind: likewise.
    every: likewise.
  """

  def added(window: int | None, totals, given: Saved, queries: Queries, keys: Keys):
    d_q, d_k, d_v = totals
    for kernel, columns, slots_T in how.parts(window, queries, keys, every):
      q, k, v, segments = _arrays(queries, keys, columns)
      out, d_out = (_by_heads(x) for x in (given.out_BKGTU, given.d_out_BKGTU))
      normalizer = given.normalizer_BKGT.reshape(q.shape[:3])
      more = kernel.backward(q, k, v, segments, out, normalizer, d_out, slots_T)
      d_q = d_q + more[0].reshape(d_q.shape).astype(how.dtype)
      d_k, d_v = (
        x.at[:, :, columns].add(new.astype(how.dtype))
        for x, new in zip((d_k, d_v), more[1:], strict=True)
      )
    return d_q, d_k, d_v

  return how.each(kind, added, totals, given, queries, keys)


def _arrays(queries: Queries, keys: Keys, columns: slice) -> tuple:
  """Returns queries, keys, values and documents as the kernel takes them."""
  segments = None
  if queries.segments_BT is not None:
    segments = queries.segments_BT, keys.segments_BS[:, columns]
  k_BKSH, v_BKSU = keys.k_BKSH[:, :, columns], keys.v_BKSU[:, :, columns]
  return _by_heads(queries.q_BKGTH), k_BKSH, v_BKSU, segments


def _by_heads(x_BKGTH: jax.Array) -> jax.Array:
  """Returns B N T H of B K G T H."""
  batch, keys, group, *rest = x_BKGTH.shape
  return x_BKGTH.reshape(batch, keys * group, *rest)
