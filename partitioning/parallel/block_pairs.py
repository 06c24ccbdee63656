"""Pairs of a block of queries and a block of keys: their arrays, masks, and which are needed.

Names carry their dims: a group G of query heads shares each of the K key/value heads, so N = K G.
Heads of values have the size U, those of queries and keys H.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The static part of an attention: scores, block sizes, and which pairs can see each other.

  Attributes:
    scores: how they are computed.
    queries: most tokens of a block of queries.
    keys: likewise of keys.
    complete: query t and key t are in slot t; pairs that the mask excludes are left out. Else,
      and between documents, pairs are skipped by the slots that they turn out to have.
  """

  scores: Scores
  queries: int
  keys: int
  complete: bool = False

  @property
  def dtype(self) -> jnp.dtype:
    """Returns that of the softmax."""
    return self.scores.dtype


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


def _even(length: int, most: int) -> tuple[int, int]:
  """Returns (number, tokens) of the blocks of a length: of equal sizes, the last one padded."""
  count = -(-length // most)
  return count, -(-length // count)


class Cut:
  """Cuts queries and keys into blocks."""

  def __init__(self, blocks: Blocks, queries: Queries, keys: Keys, window: Any):
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
