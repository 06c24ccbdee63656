"""JAX's splash attention on one device, a flash-attention kernel in Pallas for TPUs.

It never materializes all scores: blocks of queries iterate over blocks of keys with an online
softmax (arXiv:2205.14135), and fully masked blocks are skipped. On other platforms the kernel is
interpreted, which is slow and serves for tests.

Names carry their dims: N query heads share K key/value heads, N/K consecutive ones each. Heads of
values have the size U, those of queries and keys H.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from partitioning.dtypes import scaled
from partitioning.parallel.attention_blocks import (
  Facts,
  Keys,
  Queries,
  Saved,
  Softmax,
  Totals,
  by_kind,
  sink_gradient,
)

LANES = 128  # lengths are multiples

CAUSAL, EVERY, SLOTS = "causal", "every", "slots"
Segments = tuple[jax.Array, jax.Array]  # documents of queries, B T, and of keys, B S


@dataclasses.dataclass(frozen=True)
class Kernel:
  """The static part of a call.

  Attributes:
    cap: soft cap of the scores; 0 is off.
    window: slots that a query attends to, its own the last; None: its full past.
    mask: `causal`: query t is in slot t, and so is key t. `every`: each query sees all keys.
      `slots`: key s is in slot s, and the slots of the queries are an argument.
    block: most tokens of a block of queries, and of keys.
  """

  cap: float
  window: int | None
  mask: str
  block: int

  def forward(
    self,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    segments: Segments | None = None,
    sinks_BN: jax.Array | None = None,
    slots_T: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the averaged values B N T U, and the logarithm of the normalizer, B N T in float32.

    Args:
      q_BNTH: queries, scaled.
      k_BKSH: keys.
      v_BKSU: values.
      segments: a query attends only to its own document; None: one document.
      sinks_BN: a score per head that has no value, float32; None: none.
      slots_T: int32, of the queries, for the mask `slots`. What a query without any key gets is no
        number, with a normalizer whose logarithm is below -1e30.
    """

    def row(kernel, q, k, v, segments, sinks):
      out, (normalizer,) = kernel(q, k, v, _documents(segments), sinks)
      return out, normalizer

    return self._run(row, slots_T, q_BNTH, k_BKSH, v_BKSU, segments, sinks_BN)

  def backward(
    self,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSU: jax.Array,
    segments: Segments | None,
    out_BNTU: jax.Array,
    normalizer_BNT: jax.Array,
    d_out_BNTU: jax.Array,
    slots_T: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the queries, keys and values.

    Args:
      q_BNTH: as in `forward`.
      k_BKSH: likewise.
      v_BKSU: likewise.
      segments: likewise.
      out_BNTU: the averaged values over all keys, these and others.
      normalizer_BNT: the logarithm of its normalizer.
      d_out_BNTU: its gradient.
      slots_T: as in `forward`.
    """
    # Private: differentiating the kernel would save its arguments and results once for each kind of
    # layers, since each has a kernel of its own. The same function in jax 0.10 and 0.12.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    def row(kernel, q, k, v, segments, out, normalizer, d_out):
      infos = kernel.dq_mask_info, kernel.dkv_mask_info
      kept = (q, k, v, _documents(segments), None, out, normalizer, *infos)
      static = {"save_residuals": False, "residual_checkpoint_name": None}
      names = ("mask_value", "is_mqa", "block_sizes", "mask_function", "attn_logits_soft_cap")
      static |= {name: kernel.kwargs[name] for name in (*names, "interpret")}
      found = splash_attention_kernel._splash_attention_bwd(**static, res=kept, do=d_out)
      return found[3:6]

    given = (q_BNTH, k_BKSH, v_BKSU, segments, out_BNTU, normalizer_BNT, d_out_BNTU)
    return self._run(row, slots_T, *given)

  def _run(self, function: Callable, slots_T: jax.Array | None, *given: Any) -> Any:
    """Returns function(kernel, *given) for each row."""
    (_, heads, length, _), slots = given[0].shape, given[1].shape[2]

    def on_platform(slots_T: jax.Array | None, *given: Any, interpret: bool) -> Any:
      kernel = self._made(heads, length, slots, interpret)
      if self.mask == SLOTS:
        kernel = self._of_slots(kernel, slots_T, slots)
      return jax.vmap(functools.partial(function, kernel))(*given)

    tpu, default = (functools.partial(on_platform, interpret=one) for one in (False, True))
    return jax.lax.platform_dependent(slots_T, *given, tpu=tpu, default=default)

  def _made(self, heads: int, length: int, slots: int, interpret: bool) -> Any:
    pallas, shape = _pallas(), (length, slots)
    if self.mask != CAUSAL:
      mask = pallas.FullMask(shape)
    elif self.window is not None and self.window < slots:
      mask = pallas.LocalMask(shape, (self.window - 1, 0), 0)
    else:
      mask = pallas.CausalMask(shape)
    rows, columns = (_block(size, self.block) for size in shape)
    of_keys = ["block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute"]
    return pallas.make_splash_mha(
      pallas.MultiHeadMask([mask] * heads),
      block_sizes=pallas.BlockSizes(
        **dict.fromkeys(["block_q", "block_q_dkv", "block_q_dq"], rows),
        **dict.fromkeys([*of_keys, "block_kv_dq"], columns),
      ),
      head_shards=1,
      q_seq_shards=1,
      save_residuals=True,
      attn_logits_soft_cap=self.cap or None,
      interpret=interpret,
    )

  def _of_slots(self, kernel: Any, slots_T: jax.Array, slots: int) -> Any:
    """Returns a kernel that masks by the slots of the queries, and skips what they do not see."""
    rows, columns = (_block(size, self.block) for size in (slots_T.size, slots))
    blocks_RQ = slots_T.reshape(-1, rows)
    first_R1, last_R1 = blocks_RQ.min(axis=1)[:, None], blocks_RQ.max(axis=1)[:, None]
    start_1C = jnp.arange(slots // columns, dtype=jnp.int32)[None] * columns
    seen_RC = start_1C <= last_R1
    if self.window is not None:
      seen_RC &= start_1C + columns - 1 > first_R1 - self.window
    block_mask = seen_RC.astype(jnp.int32)[None]

    def info(axis: int) -> Any:
      # A block that is not seen is not fetched: its place has the number of the one before it.
      numbers = jax.lax.broadcasted_iota(jnp.int32, block_mask.shape, axis)
      following = jax.lax.cummax(jnp.where(block_mask > 0, numbers, 0), axis)
      tables = {"data_next": following, "block_mask": block_mask, "q_sequence": slots_T}
      return kernel.fwd_mask_info._replace(**tables)

    infos = info(2), info(2), info(1)  # the last is of the gradients of keys: queries in turn
    return type(kernel)(*infos, **{**kernel.kwargs, "mask_function": _Seen(self.window)})


@dataclasses.dataclass(frozen=True)
class _Seen:
  """The mask, computed from slots."""

  window: int | None

  def __call__(self, of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
    seen = of_keys <= of_queries
    return seen if self.window is None else seen & (of_keys > of_queries - self.window)


def _block(length: int, most: int) -> int:
  """Returns the tokens of a block: the largest multiple of the lanes that divides the length."""
  return max(x for x in range(LANES, max(most, LANES) + 1, LANES) if length % x == 0)


def _pallas() -> ModuleType:
  # Experimental: JAX has no public attention kernel for TPUs (jax.nn.dot_product_attention is XLA's
  # there). Imported here: it takes a third of a second.
  from jax.experimental.pallas.ops.tpu import splash_attention as pallas

  return pallas


def _documents(segments: Segments | None) -> Any:
  """Returns a row's documents as the kernel takes them."""
  return None if segments is None else _pallas().SegmentIds(*segments)


# ------------------------------ attention by the kernel ------------------------------
# What `attention_blocks.Blocks` does.

_NO_KEY = -1e30  # the logarithm of a normalizer below which no key was seen


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
  """The static part of an attention, with the methods of `attention_blocks.Blocks`.

  Attributes:
    scale: of the scores.
    cap: soft cap of the scaled scores; 0 is off.
    windows: the sliding windows of the kinds of layers; None: the full past.
    block: most tokens of a block of queries, and of keys.
    complete: query t of a row is in slot t.
  """

  scale: float
  cap: float
  windows: tuple[int | None, ...]
  block: int
  complete: bool = False
  dtype: ClassVar[jnp.dtype] = jnp.float32  # of the softmax and of sums of gradients

  def prepared(self, q_BTNH: jax.Array) -> jax.Array:
    """Returns queries as the methods take them: scaled."""
    return scaled(q_BTNH, self.scale)

  # ------------------------------ complete rows of keys ------------------------------

  def attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, facts: Facts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the averaged values B T N U, and the logarithm of the normalizer B N T."""
    wide_BN = None if sinks is None else jnp.tile(sinks.astype(jnp.float32)[None], (len(q), 1))
    given = (*map(_padded, (q, k, v)), _segments(facts), wide_BN, self._slots(facts))
    out_BNTU, normalizer_BNT = self._of_rows(facts.kind, Kernel.forward, *given)
    return _by_tokens(out_BNTU, q.shape[1]), normalizer_BNT[..., : q.shape[1]]

  def gradients(self, q, k, v, sinks, facts: Facts, out, normalizer, d_out) -> tuple:
    """Returns the gradients of the first four arguments of `attend`, of which `out` is a result."""
    length, arrays = q.shape[1], tuple(map(_padded, (q, k, v)))
    padded_BNT = jnp.pad(normalizer, ((0, 0), (0, 0), (0, -length % LANES)))
    given = (*arrays, _segments(facts), _padded(out), padded_BNT, _padded(d_out))
    found = self._of_rows(facts.kind, Kernel.backward, *given, self._slots(facts))
    d_sinks = None
    if sinks is not None:
      wide = normalizer.dtype
      products_BTN = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1)
      d_sinks = sink_gradient(sinks, normalizer, jnp.swapaxes(products_BTN, 1, 2))
    d_q, *d_kv = found
    return _by_tokens(d_q, length), *(_by_tokens(x, k.shape[1]) for x in d_kv), d_sinks

  def _of_rows(self, kind: jax.Array | None, function: Callable, *given: Any) -> Any:
    """Returns function(kernel, *given) with the kernel of a layer's kind."""
    mask = CAUSAL if self.complete else SLOTS

    def of_window(window: int | None, *given: Any) -> Any:
      return function(Kernel(self.cap, window, mask, self.block), *given)

    return by_kind(self.windows, kind, of_window, *given)

  def _slots(self, facts: Facts) -> jax.Array | None:
    """Returns the slots of the queries, those of padding the last one; None of complete rows."""
    if self.complete:
      return None
    return jnp.pad(facts.slots, (0, -facts.slots.size % LANES), mode="edge")

  # ------------------------------ steps of a ring ------------------------------
  # Queries and keys are pieces of consecutive slots, as `ring_attention` passes them around. Each
  # call of the kernel is an online softmax over its keys, which is added to the one so far.

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
    self, total: Softmax, queries: Queries, keys: Keys, kind: jax.Array | None, *, every: bool
  ) -> Softmax:
    """Returns the softmax with more keys; arguments as of `Blocks.add_keys`, `kind` of `attend`."""
    shape_BKGT = queries.q_BKGTH.shape[:-1]

    def added(window: int | None, total: Softmax, queries: Queries, keys: Keys) -> Softmax:
      for kernel, columns, slots_T in self.parts(window, queries, keys, every):
        given = _arrays(queries, keys, columns)
        out_BNTU, normalizer_BNT = kernel.forward(*given, slots_T=slots_T)
        largest = normalizer_BNT.reshape(shape_BKGT)
        out = out_BNTU.reshape(*shape_BKGT, -1).astype(self.dtype)
        seen = largest > _NO_KEY
        part = Softmax(jnp.where(seen[..., None], out, 0), largest, seen.astype(self.dtype))
        total = _sum(total, part)
      return total

    return by_kind(self.windows, kind, added, total, queries, keys)

  def add_gradients(
    self,
    totals: Totals,
    given: Saved,
    queries: Queries,
    keys: Keys,
    kind: jax.Array | None,
    *,
    every: bool,
  ) -> Totals:
    """Returns sums of gradients with more; arguments as of `Blocks.add_gradients`."""

    def added(window: int | None, totals, given: Saved, queries: Queries, keys: Keys):
      d_q, d_k, d_v = totals
      for kernel, columns, slots_T in self.parts(window, queries, keys, every):
        q, k, v, segments = _arrays(queries, keys, columns)
        out, d_out = (_by_heads(x) for x in (given.out_BKGTU, given.d_out_BKGTU))
        normalizer = given.normalizer_BKGT.reshape(q.shape[:3])
        more = kernel.backward(q, k, v, segments, out, normalizer, d_out, slots_T)
        d_q = d_q + more[0].reshape(d_q.shape).astype(self.dtype)
        d_k, d_v = (
          x.at[:, :, columns].add(new.astype(self.dtype))
          for x, new in zip((d_k, d_v), more[1:], strict=True)
        )
      return d_q, d_k, d_v

    return by_kind(self.windows, kind, added, totals, given, queries, keys)


def _sum(one: Softmax, other: Softmax) -> Softmax:
  """Returns the softmax over the keys of both."""
  top = jnp.maximum(one.largest_BKGT, other.largest_BKGT)
  shrink = [jnp.exp(x.largest_BKGT - top) for x in (one, other)]
  sums = one.sums_BKGTU * shrink[0][..., None] + other.sums_BKGTU * shrink[1][..., None]
  return Softmax(sums, top, one.weight_BKGT * shrink[0] + other.weight_BKGT * shrink[1])


def _segments(facts: Facts) -> Segments | None:
  """Returns the documents of queries and keys, those of padding the last one."""
  if facts.segments_BT is None:
    return None
  pairs = facts.segments_BT, facts.segments_BS
  return tuple(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), mode="edge") for x in pairs)


def _padded(x_BTNH: jax.Array) -> jax.Array:
  """Returns B N T H, T padded with zeros: later slots, which no query sees."""
  padded = jnp.pad(x_BTNH, ((0, 0), (0, -x_BTNH.shape[1] % LANES), (0, 0), (0, 0)))
  return jnp.moveaxis(padded, 2, 1)


def _by_tokens(x_BNTH: jax.Array, length: int) -> jax.Array:
  """Returns B T N H, the first T: the inverse of `_padded`."""
  return jnp.moveaxis(x_BNTH[:, :, :length], 1, 2)


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
