"""Attention over a sequence that mesh axes split: keys and values go round in a ring.

Source: arXiv:2310.01889; the order of the pieces: arXiv:2311.09431. Each device holds one early and
one late piece of the sequence: of 2c pieces over c devices, device i has i and 2c - 1 - i. Then of
the keys and values that come from another device it needs half, for half of its queries or for
all, and every device has as much to do in every round.

The backward pass sends keys and values round again, with their gradients beside them. What is kept
for it are a device's own queries, keys, values and results, and never the scores.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from partitioning.constraints import current_layout, together
from partitioning.dims import Axes, resolve, spec_entries

# Operations that an accelerator makes while it sends a byte: from 2,190 (TPU v5e: 197e12 / 90e9) to
# 5,100 (v6e), bfloat16 by both links of a torus axis or by NVLink; most are near this.
OPERATIONS_PER_BYTE = 2500

QUERIES, KEYS, SEGMENTS = "BTNH", "BTKH", "BT"


@dataclasses.dataclass(frozen=True)
class Scores:
  """How scores are made of queries and keys.

  Attributes:
    scale: what their products are multiplied by.
    dtype: of the scores, and of the softmax over them.
    cap: keeps them within (-cap, cap) by a tanh; 0 is off.
  """

  scale: float
  dtype: jnp.dtype
  cap: float = 0.0

  def __call__(self, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns the scores, B N T S, of q, B T N H, and k, B S N H."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=self.dtype)
    scores = scores * jnp.asarray(self.scale, self.dtype)
    return self.cap * jnp.tanh(scores / self.cap) if self.cap else scores

  def slope(self, scores: jax.Array) -> jax.Array | float:
    """Returns the derivative of the scores by the products."""
    slope = jnp.asarray(self.scale, scores.dtype)
    return slope * (1 - (scores / self.cap) ** 2) if self.cap else slope


def splitting() -> Axes:
  """Returns the axes larger than 1 that split the sequence within a block."""
  layout, sizes = current_layout("attention")
  if "T" not in layout.legend:
    return ()
  return tuple(axis for axis in layout.table[layout.legend["T"].name] if sizes[axis] > 1)


def axes() -> Axes:
  """Returns the axes along which keys and values are passed around a ring."""
  return splitting()


def parts() -> int:
  """Returns into how many parts the sequence is split."""
  _, sizes = current_layout("ring attention")
  return int(np.prod([sizes[axis] for axis in axes()], dtype=int))


def favoured(length: int, count: int, queries: int, keys: int) -> bool:
  """Tells whether a ring should take less time than gathering keys and values.

  Let V/W be the seconds of an all-gather of the keys and values and r those of the causal half of
  the scores, in units of V/W. Gathering is waited for, and multiplies the other half too: 1 + 2 r.
  The ring uses one direction of the links, behind the products: max(2, r). So the ring wins from
  r = 1/2 on, where a device's tokens times the query heads of a key/value head are as many as the
  operations that it makes per byte sent. It always needs less memory.

  Args:
    length: of the sequence.
    count: of the devices that split it.
    queries: heads.
    keys: heads.
  """
  divisible = length % (2 * count) == 0
  return divisible and length // count * (queries // keys) >= OPERATIONS_PER_BYTE


def chosen(kind: str, length: int, count: int, queries: int, keys: int) -> bool:
  """Tells whether keys and values go round, by `model.context_attention` and what `favoured` takes.

  Where they do not, they are gathered.
  """
  return kind == "ring" or (kind == "auto" and favoured(length, count, queries, keys))


def balanced(length: int, count: int) -> np.ndarray:
  """Returns int32 [length]: the slots in the order in which the devices hold them.

  Raises:
    ValueError: the length is no multiple of twice the count.
  """
  if length % (2 * count):
    raise ValueError(f"a sequence of {length} is not divisible into 2 x {count} pieces")
  pieces = np.arange(length, dtype=np.int32).reshape(2 * count, -1)
  order = [piece for i in range(count) for piece in (i, 2 * count - 1 - i)]
  return pieces[order].reshape(-1)


def ring_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segments_BT: jax.Array | None,
  window: jax.Array | int | None,
  *,
  scores: Scores,
) -> jax.Array:
  """Attends to the past and to itself.

  Args:
    q_BTNH: queries, in `balanced` order along T.
    k_BTKH: keys, likewise; each of the K heads serves N/K of the queries'.
    v_BTKH: values.
    segments_BT: the documents, in the same order; each query sees its own alone. None: all are one.
    window: each sees that many slots, its own the last of them; None: all of its past.
    scores: how scores are made.

  Returns:
    B T N H, constrained as the queries.
  """
  layout, sizes = current_layout("ring attention")
  named = (QUERIES, q_BTNH), (KEYS, k_BTKH), (SEGMENTS, q_BTNH[..., 0, 0])
  found = [resolve(letters, x.shape, layout.legend, layout.table, sizes) for letters, x in named]
  if layout.judging and any(one.failures for one in found):
    return q_BTNH  # there is no such region; where they were constrained, it was recorded why
  queries, keys, rows = (one.spec for one in found)
  same = _part(queries, 2, sizes) == _part(keys, 2, sizes)
  ring = _Ring(axes(), scores)
  # Who a device is, it reads from what it is given, and not from its index: what depends on
  # nothing that is given, JAX would hoist into a shard_map without arguments, which XLA refuses.
  slots_T = jnp.asarray(balanced(q_BTNH.shape[1], parts()))
  serving_N = jnp.arange(q_BTNH.shape[2], dtype=jnp.int32) // (q_BTNH.shape[2] // k_BTKH.shape[2])
  own = _Own(slots_T, None if same else serving_N, segments_BT, window)
  q_BTNH, own = together(q_BTNH, own)
  lie = PartitionSpec(queries[1]), PartitionSpec(queries[2]), rows, PartitionSpec()
  lie = _Own(*(None if fact is None else spec for fact, spec in zip(own, lie, strict=True)))

  def inside(q, k, v, own):
    return _attend(ring, q, k, v, own)

  # Without check_vma: a branch of `cond` that differs between devices confuses it.
  shards = jax.shard_map(
    inside, in_specs=(queries, keys, keys, lie), out_specs=queries, check_vma=False
  )
  return shards(q_BTNH, k_BTKH, v_BTKH, own)


def _part(spec: PartitionSpec, dim: int, sizes: dict[str, int]) -> Axes:
  return tuple(axis for axis in spec_entries(spec, dim + 1)[dim] if sizes[axis] > 1)


def _spread(x_BSKH: jax.Array, serving_N: jax.Array | None, queries: int) -> jax.Array:
  """Returns B S N H, for each of the device's query heads the head that serves it.

  Args:
    x_BSKH: the device's keys or values.
    serving_N: which serves which; None: each of the K as many, in their order.
    queries: N.
  """
  if serving_N is None:
    return jnp.repeat(x_BSKH, queries // x_BSKH.shape[2], axis=2)
  return jnp.take(x_BSKH, serving_N, axis=2)


def _collect(d_BSNH: jax.Array, serving_N: jax.Array | None, keys: int) -> jax.Array:
  """Returns B S K H, the transpose of `_spread`."""
  batch, slots, queries, head = d_BSNH.shape
  if serving_N is None:
    return d_BSNH.reshape(batch, slots, keys, queries // keys, head).sum(axis=3)
  zeros = jnp.zeros((batch, slots, keys, head), d_BSNH.dtype)
  return zeros.at[:, :, serving_N].add(d_BSNH)


_WHOLE = slice(None)


class _Own(NamedTuple):
  """What a device knows of the queries that it holds; segments, window, serving: see above."""

  slots_T: jax.Array
  serving_N: jax.Array | None
  segments_BT: jax.Array | None
  window: jax.Array | int | None


class _Held(NamedTuple):
  """What goes round: keys, values, and the documents that they belong to."""

  k_BSKH: jax.Array
  v_BSKH: jax.Array
  segments_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Ring:
  """What is known of the ring before there are arrays."""

  axes: Axes
  scores: Scores

  def slots(self, device: jax.Array, length: int) -> jax.Array:
    """Returns int32 [length]: the slots that a device of the ring holds."""
    count, piece = jax.lax.axis_size(self.axes), length // 2
    inside = jnp.arange(piece, dtype=jnp.int32)
    late = 2 * count - 1 - device
    return jnp.concatenate([device * piece + inside, late * piece + inside])

  def next(self, tree: Any) -> Any:
    """Returns what the device before this one has held."""
    count = jax.lax.axis_size(self.axes)
    pairs = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

  def rounds(self) -> jax.Array:
    """Returns the numbers of the rounds after the first, which needs nobody else's keys."""
    return jnp.arange(1, jax.lax.axis_size(self.axes), dtype=jnp.int32)

  def visit(self, own: _Own, number: jax.Array, add: Callable, total: Any) -> Any:
    """Adds to a total what a round brings: half of all pairs of queries and keys, on each device.

    Args:
      own: of this device.
      number: of the round, so that of the device whose keys are here.
      add: returns the new total of (total, which queries, which keys, int32 [T] the keys' slots).
      total: so far.
    """
    length, half = own.slots_T.shape[0], own.slots_T.shape[0] // 2
    here = own.slots_T[0] // half
    device = (here - number) % jax.lax.axis_size(self.axes)
    slots_T = self.slots(device, length)
    return jax.lax.cond(
      device < here,  # then all queries see its early keys, else the late ones see all
      lambda total: add(total, _WHOLE, slice(0, half), slots_T),
      lambda total: add(total, slice(half, None), _WHOLE, slots_T),
      total,
    )


def _own_pairs(length: int) -> Iterator[tuple[slice, slice]]:
  """Yields queries and keys of a device's own: its early queries see none of its late keys."""
  half = length // 2
  yield slice(0, half), slice(0, half)
  yield slice(half, None), _WHOLE


def _unseen(own: _Own, rows: slice, columns: slice, slots_S, segments_BS) -> jax.Array:
  """Returns bool, (B or 1) 1 T S: which of some keys each of some queries does not see."""
  q_slots, k_slots = own.slots_T[rows, None], slots_S[None, columns]
  seen = k_slots <= q_slots
  if own.window is not None:
    seen = seen & (q_slots - k_slots < own.window)
  seen = seen[None]
  if own.segments_BT is not None:
    seen = seen & (own.segments_BT[:, rows, None] == segments_BS[:, None, columns])
  return jnp.logical_not(seen)[:, None]


def _hide(scores: jax.Array, unseen: jax.Array) -> jax.Array:
  """Returns scores whose exponentials are 0 where a key is not seen.

  Added and not selected: what would be selected is a constant of the size of all scores, which JAX
  computes before a scan over layers, and hands in.
  """
  return scores + unseen.astype(scores.dtype) * float(jnp.finfo(scores.dtype).min)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, own: _Own):
  return _forward(ring, q, k, v, own)[0]


def _forward(ring: _Ring, q, k, v, own: _Own):
  """Returns the mixed values, and what the backward pass needs."""

  def add(held: _Held, total, rows, columns, slots_S):
    unseen = _unseen(own, rows, columns, slots_S, held.segments_BS)
    more = (_spread(x[:, columns], own.serving_N, q.shape[2]) for x in held[:2])
    cut = tuple(x[:, :, rows] for x in total)
    found = _mix(ring.scores, cut, q[:, rows], *more, unseen)
    return tuple(x.at[:, :, rows].set(new) for x, new in zip(total, found, strict=True))

  def round_of(carry, number):
    total, held = carry
    held = ring.next(held)
    return (ring.visit(own, number, functools.partial(add, held), total), held), None

  batch, length, queries, head = q.shape
  zeros = functools.partial(jnp.zeros, dtype=ring.scores.dtype)
  weight = zeros((batch, queries, length))
  lowest = jnp.full_like(weight, jnp.finfo(weight.dtype).min)
  total = zeros((*weight.shape, head)), lowest, weight
  held = _Held(k, v, own.segments_BT)
  for rows, columns in _own_pairs(length):
    total = add(held, total, rows, columns, own.slots_T)
  (total, _), _ = jax.lax.scan(round_of, (total, held), ring.rounds())
  mixed, largest, weight = total
  out = jnp.swapaxes(mixed / weight[..., None], 1, 2).astype(v.dtype)
  return out, (q, k, v, own, out, largest + jnp.log(weight))


def _mix(scores: Scores, total, q_BTNH, k_BSNH, v_BSNH, unseen):
  """Takes more keys into a running softmax: mixed values BNTH, largest score and weight BNT."""
  mixed, largest, weight = total
  found = _hide(scores(q_BTNH, k_BSNH), unseen)
  top = jnp.maximum(largest, found.max(axis=-1))
  # 0 for what is not seen, since each query sees itself, and that first.
  shares = jnp.exp(found - top[..., None])
  shrink = jnp.exp(largest - top)
  more = jnp.einsum("BNTS,BSNH->BNTH", shares.astype(v_BSNH.dtype), v_BSNH).astype(mixed.dtype)
  return mixed * shrink[..., None] + more, top, weight * shrink + shares.sum(axis=-1)


def _backward(ring: _Ring, kept, d_out):
  """Returns the gradients; keys and values go round again, their gradients with them."""
  q, k, v, own, out, logs = kept
  # What the softmax's gradient takes off: the sum over S of weights times their gradients.
  off = jnp.einsum("BTNH,BTNH->BNT", d_out.astype(logs.dtype), out.astype(logs.dtype))

  def gradients(held: _Held, rows, columns, slots_S):
    unseen = _unseen(own, rows, columns, slots_S, held.segments_BS)
    more = (_spread(x[:, columns], own.serving_N, q.shape[2]) for x in held[:2])
    past = logs[:, :, rows, None], off[:, :, rows, None]
    d_q, *d_held = _gradients(ring.scores, q[:, rows], *more, d_out[:, rows], *past, unseen)
    return d_q, *(_collect(d, own.serving_N, k.shape[2]) for d in d_held)

  def add(held: _Held, sums, rows, columns, slots_S):
    found = zip(
      sums, (rows, columns, columns), gradients(held, rows, columns, slots_S), strict=True
    )
    return tuple(total.at[:, place].add(more) for total, place, more in found)

  def round_of(carry, number):
    d_q, moving = carry
    held, d_held = ring.next(moving)
    d_q, *d_held = ring.visit(own, number, functools.partial(add, held), (d_q, *d_held))
    return (d_q, (held, d_held)), None

  held = _Held(k, v, own.segments_BT)
  sums = tuple(jnp.zeros(x.shape, logs.dtype) for x in (q, k, v))
  for rows, columns in _own_pairs(q.shape[1]):
    sums = add(held, sums, rows, columns, own.slots_T)
  d_q, *d_held = sums
  (d_q, (_, d_held)), _ = jax.lax.scan(round_of, (d_q, (held, d_held)), ring.rounds())
  d_k, d_v = ring.next(d_held)  # home
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def _gradients(scores: Scores, q_BTNH, k_BSNH, v_BSNH, d_BTNH, logs, off, unseen):
  """Returns what some queries and some keys give: the gradients of q, k and v."""
  wide = logs.dtype
  found = scores(q_BTNH, k_BSNH)
  weights = jnp.exp(_hide(found, unseen) - logs)
  d_weights = jnp.einsum("BTNH,BSNH->BNTS", d_BTNH, v_BSNH, preferred_element_type=wide)
  d_scores = (weights * (d_weights - off) * scores.slope(found)).astype(q_BTNH.dtype)
  weights = weights.astype(q_BTNH.dtype)
  d_q = jnp.einsum("BNTS,BSNH->BTNH", d_scores, k_BSNH, preferred_element_type=wide)
  d_k = jnp.einsum("BNTS,BTNH->BSNH", d_scores, q_BTNH, preferred_element_type=wide)
  d_v = jnp.einsum("BNTS,BTNH->BSNH", weights, d_BTNH, preferred_element_type=wide)
  return d_q, d_k, d_v


_attend.defvjp(_forward, _backward)
