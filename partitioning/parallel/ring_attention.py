"""Ring attention (context parallelism): keys and values are passed around a ring of devices.

Source: arXiv:2310.01889; the zigzag order: arXiv:2311.09431. The sequence is cut into 2c pieces
over c devices; device i has the pieces i and 2c - 1 - i, an early and a late one. Under a causal
mask a device then uses half of each block of keys and values that it receives (all of them for half
of its queries, or half of them for all), so the work is balanced in every ring step.

The backward pass is implemented here too: keys and values are passed around again, with their
gradients. Only a device's queries, keys, values and outputs are saved for it, never the scores.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from partitioning.constraints import automatic_layout, current_layout, manual_axes, tie_to
from partitioning.dims import Axes, resolve, spec_entries
from partitioning.parallel.manual_region import manual_region

# FLOPs that an accelerator computes in the time that it sends a byte: 2,190 (TPU v5e,
# 197e12 / 90e9) to 5,100 (v6e), in bfloat16, over both links of a torus axis or NVLink.
OPERATIONS_PER_BYTE = 2500


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

  def __call__(self, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns the scores, B N T S, of q, B T N H, and k, B S N H."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=self.dtype)
    scores = scores * jnp.asarray(self.scale, self.dtype)
    return self.cap * jnp.tanh(scores / self.cap) if self.cap else scores

  def slope(self, scores: jax.Array) -> jax.Array | float:
    """Returns the derivative of the capped scores by the uncapped ones."""
    slope = jnp.asarray(self.scale, scores.dtype)
    return slope * (1 - (scores / self.cap) ** 2) if self.cap else slope


def sequence_axes(letter: str) -> Axes:
  """Returns the axes larger than 1 that split the sequence (this letter) inside a block."""
  layout, sizes = current_layout("attention")
  return tuple(axis for axis in layout.table[layout.legend[letter].name] if sizes[axis] > 1)


def ring_size(letter: str) -> int:
  """Returns the number of devices in the ring, 1 where the sequence is not split."""
  _, sizes = current_layout("ring attention")
  return int(np.prod([sizes[axis] for axis in sequence_axes(letter)], dtype=int))


def prefer_ring(length: int, count: int, queries: int, keys: int) -> bool:
  """Returns whether a ring should be faster than all-gathering keys and values.

  In units of the time of an all-gather of keys and values, let r be the time to compute the causal
  half of the scores. The all-gather does not overlap with compute, which includes the masked half:
  1 + 2 r. The ring uses one direction of the links and overlaps: max(2, r). So the ring wins from
  r = 1/2 on: where a device's tokens times the query heads per key/value head reach the FLOPs that
  it computes per byte sent. It always needs less memory.

  Args:
    length: of the sequence.
    count: of the devices that split it.
    queries: number of query heads.
    keys: number of key/value heads.
  """
  divisible = length % (2 * count) == 0
  return divisible and length // count * (queries // keys) >= OPERATIONS_PER_BYTE


def use_ring(kind: str, length: int, count: int, queries: int, keys: int) -> bool:
  """Returns whether attention runs as a ring; else keys and values are all-gathered.

  Args:
    kind: `model.context_attention`: ring, gather, or auto, which follows `prefer_ring`.
    length: as in `prefer_ring`.
    count: likewise.
    queries: likewise.
    keys: likewise.
  """
  return kind == "ring" or (kind == "auto" and prefer_ring(length, count, queries, keys))


def zigzag_order(length: int, count: int) -> np.ndarray:
  """Returns int32 [length]: a sequence's slots in zigzag order, device by device.

  Raises:
    ValueError: the length is not a multiple of twice the count.
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
  letters: tuple[str, str],
  name: str = "",
) -> jax.Array:
  """Causal self-attention over a sequence that mesh axes split.

  Args:
    q_BTNH: queries, in `zigzag_order` along T.
    k_BTKH: keys, likewise; each of the K heads serves N/K query heads.
    v_BTKH: values.
    segments_BT: document of each token, in the same order; a query attends only to its own. None:
      one document.
    window: number of slots that a query attends to, its own being the last; None: its full past.
    scores: how scores are computed.
    letters: the legend's letters of the queries, and of the keys and values.
    name: of the output and the softmax's normalizer, for the policy of a surrounding
      `jax.checkpoint`; "": none.

  Returns:
    B T N H, sharded as the queries.
  """
  layout, sizes = automatic_layout("ring attention")
  of_queries, of_keys = letters
  around = sequence_axes(of_queries[1])
  assert not manual_axes() & {*around}, around
  named = (of_queries, q_BTNH), (of_keys, k_BTKH), (of_queries[:2], q_BTNH[..., 0, 0])
  found = [resolve(one, x.shape, layout.legend, layout.table, sizes) for one, x in named]
  if layout.checking and any(one.failures for one in found):
    return q_BTNH  # the dims cannot be sharded so, which `constrain` has recorded
  queries, keys, rows = (one.spec for one in found)
  same = _split(queries, 2, sizes) == _split(keys, 2, sizes)
  ring = _Ring(around, scores, name)
  # A device derives its place in the ring from its slots, not from its axis index: JAX would hoist
  # what depends on no argument into a shard_map without arguments, which XLA rejects.
  slots_T = jnp.asarray(zigzag_order(q_BTNH.shape[1], ring_size(of_queries[1])))
  serving_N = jnp.arange(q_BTNH.shape[2], dtype=jnp.int32) // (q_BTNH.shape[2] // k_BTKH.shape[2])
  facts = _QueryFacts(slots_T, None if same else serving_N, segments_BT, window)
  q_BTNH, facts = tie_to(q_BTNH, facts)
  specs = PartitionSpec(queries[1]), PartitionSpec(queries[2]), rows, PartitionSpec()
  specs = (None if fact is None else spec for fact, spec in zip(facts, specs, strict=True))

  def inside(q, k, v, facts):
    return _attend(ring, q, k, v, facts)

  in_specs = (queries, keys, keys, _QueryFacts(*specs))
  return manual_region(inside, in_specs, queries)(q_BTNH, k_BTKH, v_BTKH, facts)


def _split(spec: PartitionSpec, dim: int, sizes: dict[str, int]) -> Axes:
  return tuple(axis for axis in spec_entries(spec, dim + 1)[dim] if sizes[axis] > 1)


def repeat_kv(x_BSKH: jax.Array, serving_N: jax.Array | None, queries: int) -> jax.Array:
  """Returns B S N H: for each of the device's query heads its key/value head.

  Args:
    x_BSKH: the device's keys or values.
    serving_N: key/value head of each query head; None: N/K consecutive query heads share one.
    queries: N.
  """
  if serving_N is None:
    return jnp.repeat(x_BSKH, queries // x_BSKH.shape[2], axis=2)
  return jnp.take(x_BSKH, serving_N, axis=2)


def sum_kv_grads(d_BSNH: jax.Array, serving_N: jax.Array | None, keys: int) -> jax.Array:
  """Returns B S K H, the transpose of `repeat_kv`."""
  batch, slots, queries, head = d_BSNH.shape
  if serving_N is None:
    return d_BSNH.reshape(batch, slots, keys, queries // keys, head).sum(axis=3)
  zeros = jnp.zeros((batch, slots, keys, head), d_BSNH.dtype)
  return zeros.at[:, :, serving_N].add(d_BSNH)


_WHOLE = slice(None)


class _QueryFacts(NamedTuple):
  """A device's queries: inputs of the mask and of `repeat_kv`; see `ring_attention`."""

  slots_T: jax.Array
  serving_N: jax.Array | None
  segments_BT: jax.Array | None
  window: jax.Array | int | None


class _KVBlock(NamedTuple):
  """What is passed around the ring: keys, values, and the documents that they belong to."""

  k_BSKH: jax.Array
  v_BSKH: jax.Array
  segments_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The static description of a ring: its mesh axes, the scores, the name of its output."""

  axes: Axes
  scores: Scores
  name: str = ""

  def named(self, x: jax.Array) -> jax.Array:
    """Returns x under the ring's name, if it has one."""
    return checkpoint_name(x, self.name) if self.name else x

  def slots(self, device: jax.Array, length: int) -> jax.Array:
    """Returns int32 [length]: the slots that a device of the ring holds."""
    count, piece = jax.lax.axis_size(self.axes), length // 2
    inside = jnp.arange(piece, dtype=jnp.int32)
    late = 2 * count - 1 - device
    return jnp.concatenate([device * piece + inside, late * piece + inside])

  def next(self, tree: Any) -> Any:
    """Passes arrays around the ring by one: returns those of the previous device."""
    count = jax.lax.axis_size(self.axes)
    pairs = [(i, (i + 1) % count) for i in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

  def steps(self) -> jax.Array:
    """Returns the numbers of the ring's steps; step 0, of a device's own keys, sends nothing."""
    return jnp.arange(1, jax.lax.axis_size(self.axes), dtype=jnp.int32)

  def ring_step(self, facts: _QueryFacts, number: jax.Array, add: Callable, total: Any) -> Any:
    """Processes the received block: on each device, half of all pairs of queries and keys.

    Args:
      facts: of this device's queries.
      number: of the step, which is how many places before this device the block's owner is.
      add: returns the new total, given (total, query slice, key slice, int32 slots of the keys).
      total: the sums so far.
    """
    length, half = facts.slots_T.shape[0], facts.slots_T.shape[0] // 2
    here = facts.slots_T[0] // half
    device = (here - number) % jax.lax.axis_size(self.axes)
    slots_T = self.slots(device, length)
    return jax.lax.cond(
      device < here,  # then all queries see its early keys, else the late ones see all
      lambda total: add(total, _WHOLE, slice(0, half), slots_T),
      lambda total: add(total, slice(half, None), _WHOLE, slots_T),
      total,
    )


def _local_pairs(length: int) -> Iterator[tuple[slice, slice]]:
  """Yields the query and key slices of step 0: early queries do not attend to late keys."""
  half = length // 2
  yield slice(0, half), slice(0, half)
  yield slice(half, None), _WHOLE


def _masked(facts: _QueryFacts, rows: slice, columns: slice, slots_S, segments_BS) -> jax.Array:
  """Returns bool, (B or 1) 1 T S: True where a key is masked for a query."""
  q_slots, k_slots = facts.slots_T[rows, None], slots_S[None, columns]
  seen = k_slots <= q_slots
  if facts.window is not None:
    seen = seen & (q_slots - k_slots < facts.window)
  seen = seen[None]
  if facts.segments_BT is not None:
    seen = seen & (facts.segments_BT[:, rows, None] == segments_BS[:, None, columns])
  return jnp.logical_not(seen)[:, None]


def _add_mask_bias(scores: jax.Array, masked: jax.Array) -> jax.Array:
  """Returns scores whose exponentials are 0 where a key is masked.

  Added, not selected by `where`: JAX would hoist the alternative, a constant of the size of all
  scores, out of a scan over layers.
  """
  return scores + masked.astype(scores.dtype) * float(jnp.finfo(scores.dtype).min)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, facts: _QueryFacts):
  return _forward(ring, q, k, v, facts)[0]


def _forward(ring: _Ring, q, k, v, facts: _QueryFacts):
  """Returns the attention output, and what the backward pass needs."""

  def add(block: _KVBlock, total, rows, columns, slots_S):
    masked = _masked(facts, rows, columns, slots_S, block.segments_BS)
    more = (repeat_kv(x[:, columns], facts.serving_N, q.shape[2]) for x in block[:2])
    cut = tuple(x[:, :, rows] for x in total)
    found = _update_softmax(ring.scores, cut, q[:, rows], *more, masked)
    return tuple(x.at[:, :, rows].set(new) for x, new in zip(total, found, strict=True))

  def step(carry, number):
    total, block = carry
    block = ring.next(block)
    return (ring.ring_step(facts, number, functools.partial(add, block), total), block), None

  batch, length, queries, head = q.shape
  zeros = functools.partial(jnp.zeros, dtype=ring.scores.dtype)
  weight = zeros((batch, queries, length))
  lowest = jnp.full_like(weight, jnp.finfo(weight.dtype).min)
  total = zeros((*weight.shape, head)), lowest, weight
  block = _KVBlock(k, v, facts.segments_BT)
  for rows, columns in _local_pairs(length):
    total = add(block, total, rows, columns, facts.slots_T)
  (total, _), _ = jax.lax.scan(step, (total, block), ring.steps())
  sums, largest, weight = total
  out = ring.named(jnp.swapaxes(sums / weight[..., None], 1, 2).astype(v.dtype))
  return out, (q, k, v, facts, out, ring.named(largest + jnp.log(weight)))


def _update_softmax(scores: Scores, total, q_BTNH, k_BSNH, v_BSNH, masked):
  """Adds keys to an online softmax: weighted values BNTH, maximum and sum of weights BNT."""
  sums, largest, weight = total
  found = _add_mask_bias(scores(q_BTNH, k_BSNH), masked)
  top = jnp.maximum(largest, found.max(axis=-1))
  # 0 where a key is masked: the maximum is finite by then, since step 0 has each query's own key.
  shares = jnp.exp(found - top[..., None])
  shrink = jnp.exp(largest - top)
  more = jnp.einsum("BNTS,BSNH->BNTH", shares.astype(v_BSNH.dtype), v_BSNH).astype(sums.dtype)
  return sums * shrink[..., None] + more, top, weight * shrink + shares.sum(axis=-1)


def _backward(ring: _Ring, saved, d_out):
  """Returns the gradients; keys and values are passed around again, with their gradients."""
  q, k, v, facts, out, logs = saved
  # Subtracted in the softmax's gradient: the sum over S of weights times their gradients.
  off = jnp.einsum("BTNH,BTNH->BNT", d_out.astype(logs.dtype), out.astype(logs.dtype))

  def gradients(block: _KVBlock, rows, columns, slots_S):
    masked = _masked(facts, rows, columns, slots_S, block.segments_BS)
    more = (repeat_kv(x[:, columns], facts.serving_N, q.shape[2]) for x in block[:2])
    past = logs[:, :, rows, None], off[:, :, rows, None]
    d_q, *d_block = _gradients(ring.scores, q[:, rows], *more, d_out[:, rows], *past, masked)
    return d_q, *(sum_kv_grads(d, facts.serving_N, k.shape[2]) for d in d_block)

  def add(block: _KVBlock, sums, rows, columns, slots_S):
    found = zip(
      sums, (rows, columns, columns), gradients(block, rows, columns, slots_S), strict=True
    )
    return tuple(total.at[:, place].add(more) for total, place, more in found)

  def step(carry, number):
    d_q, moving = carry
    block, d_block = ring.next(moving)
    d_q, *d_block = ring.ring_step(facts, number, functools.partial(add, block), (d_q, *d_block))
    return (d_q, (block, d_block)), None

  block = _KVBlock(k, v, facts.segments_BT)
  sums = tuple(jnp.zeros(x.shape, logs.dtype) for x in (q, k, v))
  for rows, columns in _local_pairs(q.shape[1]):
    sums = add(block, sums, rows, columns, facts.slots_T)
  d_q, *d_block = sums
  (d_q, (_, d_block)), _ = jax.lax.scan(step, (d_q, (block, d_block)), ring.steps())
  d_k, d_v = ring.next(d_block)  # back to their owner
  return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


def _gradients(scores: Scores, q_BTNH, k_BSNH, v_BSNH, d_BTNH, logs, off, masked):
  """Returns the gradients of q, k and v from the pairs of some queries and some keys."""
  wide = logs.dtype
  found = scores(q_BTNH, k_BSNH)
  weights = jnp.exp(_add_mask_bias(found, masked) - logs)
  d_weights = jnp.einsum("BTNH,BSNH->BNTS", d_BTNH, v_BSNH, preferred_element_type=wide)
  d_scores = (weights * (d_weights - off) * scores.slope(found)).astype(q_BTNH.dtype)
  weights = weights.astype(q_BTNH.dtype)
  d_q = jnp.einsum("BNTS,BSNH->BTNH", d_scores, k_BSNH, preferred_element_type=wide)
  d_k = jnp.einsum("BNTS,BTNH->BSNH", d_scores, q_BTNH, preferred_element_type=wide)
  d_v = jnp.einsum("BNTS,BTNH->BSNH", weights, d_BTNH, preferred_element_type=wide)
  return d_q, d_k, d_v


_attend.defvjp(_forward, _backward)
