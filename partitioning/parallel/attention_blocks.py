"""Blockwise attention on one device: blocks of queries meet blocks of keys in an online softmax.

Only the scores of one pair of blocks are in memory, and those of pairs that the mask excludes are
not computed. The gradients compute the scores again, block by block, from the softmax's normalizer.
Sources: arXiv:2112.05682 (memory linear in the length), arXiv:2205.14135 (the gradients).

Names carry their dims: a group G of query heads shares each of the K key/value heads, so N = K G.
Heads of values have the size U, those of queries and keys H.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def by_kind(
  windows: Sequence[int | None], kind: jax.Array | None, function: Callable, *given: Any
) -> Any:
  """Returns function(window, *given) with the window of a layer's kind; of None, the first."""
  ways = [functools.partial(function, window) for window in windows]
  return ways[0](*given) if kind is None else jax.lax.switch(kind, ways, *given)


# ------------------------------ pairs of blocks ------------------------------

_BEYOND = np.iinfo(np.int32).max  # slot of keys that pad a block: no query sees them


@dataclasses.dataclass(frozen=True)
class Scores:
  """How scores are computed from queries and keys.

  Attributes:
    scale: factor of their dot products.
    dtype: of the scores, and of the softmax over them.
    cap: soft cap: a tanh keeps them within (-cap, cap); 0 is off.
  """

  scale: float
  dtype: jnp.dtype
  cap: float = 0.0

  def __call__(self, q_BKGTH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
    """Returns the scores, B K G T S."""
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=self.dtype)
    scores = scores * jnp.asarray(self.scale, self.dtype)
    return self.cap * jnp.tanh(scores / self.cap) if self.cap else scores

  def slope(self, scores: jax.Array) -> jax.Array | float:
    """Returns the derivative of the capped scores by the uncapped ones."""
    slope = jnp.asarray(self.scale, scores.dtype)
    return slope * (1 - (scores / self.cap) ** 2) if self.cap else slope


class Queries(NamedTuple):
  """Queries, and what decides which keys they attend to.

  Attributes:
    q_BKGTH: queries.
    slots_BT: int32; B may be 1.
    segments_BT: the document of each; None: one document.
  """

  q_BKGTH: jax.Array
  slots_BT: jax.Array
  segments_BT: jax.Array | None


class Keys(NamedTuple):
  """Keys and values, and what decides which queries attend to them.

  Attributes:
    k_BKSH: keys.
    v_BKSU: values.
    slots_S: int32.
    segments_BS: the document of each; None: one document.
  """

  k_BKSH: jax.Array
  v_BKSU: jax.Array
  slots_S: jax.Array
  segments_BS: jax.Array | None


class Facts(NamedTuple):
  """What decides which keys a query attends to, of queries over the keys of complete rows.

  Attributes:
    slots: of the queries, T or B T; None: query t is in slot t.
    segments_BT: the document of each query; None: one document.
    segments_BS: likewise of the keys.
    kind: which of the windows; None: the first.
  """

  slots: jax.Array | None
  segments_BT: jax.Array | None
  segments_BS: jax.Array | None
  kind: jax.Array | None


def _even(length: int, most: int) -> tuple[int, int]:
  """Returns (number, tokens) of the blocks of a length: of equal sizes, the last one padded."""
  count = -(-length // most)
  return count, -(-length // count)


class Cut:
  """Cuts queries and keys into blocks."""

  def __init__(self, blocks: "Blocks", queries: Queries, keys: Keys, window: Any):
    """Pads both to full blocks: queries with copies of the last slot, keys with unseen slots."""
    self._blocks, self._window = blocks, window
    length, slots = queries.q_BKGTH.shape[3], keys.k_BKSH.shape[2]
    evenly = _even(length, blocks.queries), _even(slots, blocks.keys)
    self._counts, self._sizes = zip(*evenly, strict=True)
    self._rows = self._counts[0] * self._sizes[0] - length
    self._columns = self._counts[1] * self._sizes[1] - slots
    edge, beyond = {"mode": "edge"}, {"constant_values": _BEYOND}
    self._queries = Queries(
      self.padded_rows(queries.q_BKGTH),
      _padded(queries.slots_BT, 1, self._rows, **edge),
      _padded(queries.segments_BT, 1, self._rows, **edge),
    )
    self._keys = Keys(
      self.padded_columns(keys.k_BKSH),
      self.padded_columns(keys.v_BKSU),
      _padded(keys.slots_S, 0, self._columns, **beyond),
      _padded(keys.segments_BS, 1, self._columns, **edge),
    )

  def padded_rows(self, x_BKGT: jax.Array, mode: str = "edge") -> jax.Array:
    """Returns an array of the queries, T its fourth dim, padded with copies of the last."""
    return _padded(x_BKGT, 3, self._rows, mode=mode)

  def padded_columns(self, x_BKS: jax.Array) -> jax.Array:
    """Returns an array of the keys, S its third dim, padded with zeros."""
    return _padded(x_BKS, 2, self._columns)

  def rows(self, x: jax.Array, block: jax.Array, axis: int = 3) -> jax.Array:
    """Returns a block of an array of the queries."""
    size = self._sizes[0]
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)

  def put_rows(self, x: jax.Array, new: jax.Array, block: jax.Array) -> jax.Array:
    """Returns an array of the queries with a block replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, block * self._sizes[0], 3)

  def columns(self, x: jax.Array, block: jax.Array, axis: int = 2) -> jax.Array:
    """Returns a block of an array of the keys."""
    size = self._sizes[1]
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)

  def put_columns(self, x: jax.Array, new: jax.Array, block: jax.Array) -> jax.Array:
    """Returns an array of the keys with a block replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, block * self._sizes[1], 2)

  def pair(self, pair: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns a pair's queries, keys and values, and a bias of the scores that masks them."""
    q, (k, v) = self.rows(self._queries.q_BKGTH, pair[0]), self._keys[:2]
    k, v = self.columns(k, pair[1]), self.columns(v, pair[1])
    return q, k, v, self._mask_bias(pair)

  def _facts(self, pair: jax.Array) -> tuple:
    """Returns a pair's slots (B T, S) and documents."""
    queries, keys = self._queries, self._keys
    segments = None
    if queries.segments_BT is not None:
      segments = (
        self.rows(queries.segments_BT, pair[0], 1),
        self.columns(keys.segments_BS, pair[1], 1),
      )
    return self.rows(queries.slots_BT, pair[0], 1), self.columns(keys.slots_S, pair[1], 0), segments

  def _mask_bias(self, pair: jax.Array) -> jax.Array:
    """Returns (B or 1) 1 1 T S: after adding it, exponentials of masked scores are 0.

    Added, not selected by `where`: JAX would hoist the alternative, a constant of the size of the
    scores, out of a scan over layers.
    """
    slots_BT, slots_S, segments = self._facts(pair)
    slots_BT1, slots_11S = slots_BT[:, :, None], slots_S[None, None]
    seen = slots_11S <= slots_BT1
    if self._window is not None:
      seen = seen & (slots_BT1 - slots_11S < self._window)
    if segments is not None:
      seen = seen & (segments[0][:, :, None] == segments[1][:, None, :])
    dtype = self._blocks.scores.dtype
    bias = jnp.logical_not(seen).astype(dtype) * float(jnp.finfo(dtype).min)
    return bias[:, None, None]

  def unless_masked(self, pair: jax.Array, function: Callable, given: Any) -> Any:
    """Returns function(given), or what is given where no query of the pair sees a key of it."""
    fixed = self._window is None or isinstance(self._window, int)
    if self._blocks.complete and fixed and self._queries.segments_BT is None:
      return function(given)  # `pairs` has left out the others
    slots_BT, slots_S, segments = self._facts(pair)
    masked = slots_S.min() > slots_BT.max()
    if self._window is not None:
      last = jnp.max(jnp.where(slots_S == _BEYOND, -1, slots_S))
      masked = masked | (slots_BT.min() - last >= self._window)
    if segments is not None:
      (low, high), (first, last) = ((x.min(axis=1), x.max(axis=1)) for x in segments)
      masked = masked | jnp.all((last < low) | (first > high))
    return jax.lax.cond(masked, lambda given: given, function, given)

  def pairs(self) -> np.ndarray:
    """Returns int32 [pairs, 2]: blocks of queries and keys, those of a block of queries in turn."""
    rows, columns = (np.arange(count, dtype=np.int32) for count in self._counts)
    every = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    if not self._blocks.complete:
      return every
    first, start = every[:, 0] * self._sizes[0], every[:, 1] * self._sizes[1]
    seen = start <= first + self._sizes[0] - 1
    if isinstance(self._window, int):
      seen &= first - (start + self._sizes[1] - 1) < self._window
    return every[seen]


def _padded(x: jax.Array | None, axis: int, more: int, **given: Any) -> jax.Array | None:
  if x is None or not more:
    return x
  return jnp.pad(x, [(0, more if dim == axis else 0) for dim in range(x.ndim)], **given)


# ------------------------------ the online softmax over blocks ------------------------------


class Softmax(NamedTuple):
  """An online softmax over the keys so far.

  Attributes:
    sums_BKGTU: values, weighted by the exponentials of the scores minus `largest`.
    largest_BKGT: the largest score.
    weight_BKGT: the sum of those exponentials.
  """

  sums_BKGTU: jax.Array
  largest_BKGT: jax.Array
  weight_BKGT: jax.Array

  def finished(self) -> tuple[jax.Array, jax.Array]:
    """Returns the averaged values B K G T U, and the logarithm of the normalizer B K G T."""
    normalizer_BKGT = self.largest_BKGT + jnp.log(self.weight_BKGT)
    return self.sums_BKGTU / self.weight_BKGT[..., None], normalizer_BKGT


def empty_softmax(
  shape_BKGTU: tuple[int, ...], dtype: jnp.dtype, sinks_N: jax.Array | None = None
) -> Softmax:
  """Returns the softmax over no keys.

  Args:
    shape_BKGTU: of the averaged values.
    dtype: of the softmax.
    sinks_N: a learned score for each head that takes part in the softmax and has no value
      (arXiv:2309.17453); None: none.
  """
  zeros_BKGT = jnp.zeros(shape_BKGTU[:-1], dtype)
  sums = jnp.zeros(shape_BKGTU, dtype)
  if sinks_N is None:
    return Softmax(sums, zeros_BKGT + jnp.finfo(dtype).min, zeros_BKGT)
  sinks_KG = sinks_N.reshape(shape_BKGTU[1:3])
  largest_BKGT = zeros_BKGT + sinks_KG.astype(dtype)[None, :, :, None]
  return Softmax(sums, largest_BKGT, zeros_BKGT + 1)


def by_heads(x_BTNH: jax.Array, keys: int) -> jax.Array:
  """Returns B K G T H of B T N H, whose N/K consecutive heads share a key/value head."""
  batch, length, heads, size = x_BTNH.shape
  return jnp.moveaxis(x_BTNH.reshape(batch, length, keys, heads // keys, size), 1, 3)


def by_tokens(x_BKGTH: jax.Array) -> jax.Array:
  """Returns B T N H, the inverse of `by_heads`."""
  batch, keys, group, length, size = x_BKGTH.shape
  return jnp.moveaxis(x_BKGTH, 3, 1).reshape(batch, length, keys * group, size)


class Saved(NamedTuple):
  """What the gradients take of the forward pass, and of what follows it.

  Attributes:
    d_out_BKGTU: the gradient of the averaged values.
    normalizer_BKGT: the logarithm of the softmax's normalizer over all keys.
    products_BKGT: the averaged values times their gradient, summed over U.
    out_BKGTU: the averaged values, for `splash_kernel`.
  """

  d_out_BKGTU: jax.Array
  normalizer_BKGT: jax.Array
  products_BKGT: jax.Array
  out_BKGTU: jax.Array | None = None


def saved(out_BKGTU: jax.Array, d_out_BKGTU: jax.Array, normalizer_BKGT: jax.Array) -> Saved:
  """Returns what `add_gradients` takes, of the output, its gradient and the normalizer."""
  wide = normalizer_BKGT.dtype
  products = jnp.sum(d_out_BKGTU.astype(wide) * out_BKGTU.astype(wide), axis=-1)
  return Saved(d_out_BKGTU, normalizer_BKGT, products)


def sink_gradient(
  sinks_N: jax.Array | None, normalizer: jax.Array, products: jax.Array
) -> jax.Array | None:
  """Returns the gradient of sinks: each token's weight of them averages a value of zero.

  Args:
    sinks_N: the sinks; None: there are none.
    normalizer: as in `Saved`, of heads in groups or not.
    products: likewise.
  """
  if sinks_N is None:
    return None
  sinks = sinks_N.reshape(normalizer.shape[1:-1]).astype(normalizer.dtype)
  weights = jnp.exp(sinks[None, ..., None] - normalizer)
  d_sinks = -jnp.sum(weights * products, axis=(0, normalizer.ndim - 1))
  return d_sinks.reshape(sinks_N.shape).astype(sinks_N.dtype)


# ------------------------------ attention in blocks ------------------------------

Totals = tuple[jax.Array, jax.Array, jax.Array]  # of gradients: B K G T H, B K S H and B K S U


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The static part of an attention: scores, block sizes, and which pairs can see each other.

  Attributes:
    scores: how they are computed.
    queries: most tokens of a block of queries.
    keys: likewise of keys.
    complete: query t and key t are in slot t; pairs that the mask excludes are left out. Else,
      and between documents, pairs are skipped by the slots that they turn out to have.
    windows: the sliding windows of the kinds of layers; None: the full past.
  """

  scores: Scores
  queries: int
  keys: int
  complete: bool = False
  windows: tuple[int | None, ...] = (None,)

  @property
  def dtype(self) -> jnp.dtype:
    """Returns that of the softmax."""
    return self.scores.dtype

  def prepared(self, q_BTNH: jax.Array) -> jax.Array:
    """Returns queries as the methods take them: unchanged."""
    return q_BTNH

  def attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, facts: Facts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the averaged values B T N U, and the logarithm of the normalizer B K G T.

    Args:
      q: queries, B T N H.
      k: keys, B S K H.
      v: values, B S K U.
      sinks: of the N heads; None: none.
      facts: of them.
    """

    def softmax(window: int | None, queries: Queries, keys: Keys) -> Softmax:
      shape = (*queries.q_BKGTH.shape[:-1], v.shape[-1])
      return self.add_keys(empty_softmax(shape, self.dtype, sinks), queries, keys, window)

    found = by_kind(self.windows, facts.kind, softmax, *_pairs(q, k, v, facts))
    out_BKGTU, normalizer_BKGT = found.finished()
    return by_tokens(out_BKGTU).astype(v.dtype), normalizer_BKGT

  def gradients(self, q, k, v, sinks, facts: Facts, out, normalizer, d_out) -> tuple:
    """Returns the gradients of the first four arguments of `attend`, of which `out` is a result."""
    queries, keys = _pairs(q, k, v, facts)
    given = saved(*(by_heads(x, k.shape[2]) for x in (out, d_out)), normalizer)

    def of_window(window: int | None, given: Saved, queries: Queries, keys: Keys) -> Totals:
      arrays = queries.q_BKGTH, keys.k_BKSH, keys.v_BKSU
      zeros = tuple(jnp.zeros(x.shape, self.dtype) for x in arrays)
      return self.add_gradients(zeros, given, queries, keys, window)

    d_q, d_k, d_v = by_kind(self.windows, facts.kind, of_window, given, queries, keys)
    d_sinks = sink_gradient(sinks, normalizer, given.products_BKGT)
    d_k, d_v = jnp.swapaxes(d_k, 1, 2), jnp.swapaxes(d_v, 1, 2)
    return by_tokens(d_q), d_k, d_v, d_sinks

  def add_keys(
    self,
    total: Softmax,
    queries: Queries,
    keys: Keys,
    window: jax.Array | int | None = None,
    *,
    every: bool = False,
  ) -> Softmax:
    """Returns the softmax with more keys.

    Args:
      total: the softmax so far.
      queries: those that it is of.
      keys: more keys.
      window: number of slots that a query attends to, its own being the last; None: its full past.
      every: whether each query is after all keys; the slots say so too.
    """
    del every
    cut = Cut(self, queries, keys, window)

    def step(total: Softmax, pair: jax.Array) -> tuple[Softmax, None]:
      def more(softmax: Softmax) -> Softmax:
        return _add_block(self.scores, softmax, *cut.pair(pair))

      softmax = jax.tree.map(lambda x: cut.rows(x, pair[0]), total)
      softmax = cut.unless_masked(pair, more, softmax)
      return jax.tree.map(lambda x, new: cut.put_rows(x, new, pair[0]), total, softmax), None

    return jax.tree.map(
      lambda x: x[:, :, :, : queries.q_BKGTH.shape[3]],
      _each(step, Softmax(*map(cut.padded_rows, total)), cut.pairs()),
    )

  def add_gradients(
    self,
    totals: Totals,
    given: Saved,
    queries: Queries,
    keys: Keys,
    window: jax.Array | int | None = None,
    *,
    every: bool = False,
  ) -> Totals:
    """Returns sums of gradients, in the softmax's dtype, with those of these queries and keys.

    Args:
      totals: the sums so far.
      given: of `saved`.
      queries: as in `add_keys`.
      keys: likewise.
      window: likewise.
      every: likewise.
    """
    del every
    cut = Cut(self, queries, keys, window)
    # Of padding the gradient is zero.
    padded = Saved(
      cut.padded_rows(given.d_out_BKGTU, mode="constant"),
      cut.padded_rows(given.normalizer_BKGT),
      cut.padded_rows(given.products_BKGT, mode="constant"),
    )

    def step(totals: Totals, pair: jax.Array) -> tuple[Totals, None]:
      def more(parts: Totals) -> Totals:
        rows = jax.tree.map(lambda x: cut.rows(x, pair[0]), padded)
        found = _block_gradients(self.scores, rows, *cut.pair(pair))
        return tuple(x + new for x, new in zip(parts, found, strict=True))

      d_q, d_k, d_v = totals
      parts = cut.rows(d_q, pair[0]), cut.columns(d_k, pair[1]), cut.columns(d_v, pair[1])
      parts = cut.unless_masked(pair, more, parts)
      d_k, d_v = (
        cut.put_columns(x, new, pair[1]) for x, new in zip((d_k, d_v), parts[1:], strict=True)
      )
      return (cut.put_rows(d_q, parts[0], pair[0]), d_k, d_v), None

    d_q, d_k, d_v = totals
    start = cut.padded_rows(d_q), cut.padded_columns(d_k), cut.padded_columns(d_v)
    found = _each(step, start, cut.pairs())
    length, slots = queries.q_BKGTH.shape[3], keys.k_BKSH.shape[2]
    return found[0][:, :, :, :length], found[1][:, :, :slots], found[2][:, :, :slots]


def _pairs(q: jax.Array, k: jax.Array, v: jax.Array, facts: Facts) -> tuple[Queries, Keys]:
  """Returns arguments of `Blocks.attend` as those of `Blocks.add_keys`."""
  slots = facts.slots
  slots = jnp.arange(q.shape[1], dtype=jnp.int32) if slots is None else slots
  slots_BT = slots if slots.ndim == 2 else slots[None]
  slots_S = jnp.arange(k.shape[1], dtype=slots_BT.dtype)
  queries = Queries(by_heads(q, k.shape[2]), slots_BT, facts.segments_BT)
  return queries, Keys(*(jnp.swapaxes(x, 1, 2) for x in (k, v)), slots_S, facts.segments_BS)


def _each(step: Callable, total: Any, pairs: np.ndarray) -> Any:
  """Returns the total after the steps of all pairs."""
  if len(pairs) == 1:
    return step(total, jnp.asarray(pairs[0]))[0]
  return jax.lax.scan(step, total, jnp.asarray(pairs))[0]


def _add_block(scores: Scores, softmax: Softmax, q, k, v, bias) -> Softmax:
  """Returns an online softmax with a block of keys added."""
  found = scores(q, k) + bias
  top = jnp.maximum(softmax.largest_BKGT, found.max(axis=-1))
  # A query all of whose keys so far are masked has weights of 1 for them, which the first key that
  # it sees shrinks to 0. It sees its own.
  shares = jnp.exp(found - top[..., None])
  shrink = jnp.exp(softmax.largest_BKGT - top)
  more = jnp.einsum(
    "BKGTS,BKSU->BKGTU", shares.astype(v.dtype), v, preferred_element_type=scores.dtype
  )
  sums = softmax.sums_BKGTU * shrink[..., None] + more
  return Softmax(sums, top, softmax.weight_BKGT * shrink + shares.sum(axis=-1))


def _block_gradients(scores: Scores, given: Saved, q, k, v, bias) -> tuple:
  """Returns the gradients of q, k and v from one pair of blocks."""
  wide = scores.dtype
  found = scores(q, k)
  weights = jnp.exp(found + bias - given.normalizer_BKGT[..., None])
  d_weights = jnp.einsum("BKGTU,BKSU->BKGTS", given.d_out_BKGTU, v, preferred_element_type=wide)
  d_scores = weights * (d_weights - given.products_BKGT[..., None]) * scores.slope(found)
  d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
  d_q = jnp.einsum("BKGTS,BKSH->BKGTH", d_scores, k, preferred_element_type=wide)
  d_k = jnp.einsum("BKGTS,BKGTH->BKSH", d_scores, q, preferred_element_type=wide)
  d_v = jnp.einsum("BKGTS,BKGTU->BKSU", weights, given.d_out_BKGTU, preferred_element_type=wide)
  return d_q, d_k, d_v
