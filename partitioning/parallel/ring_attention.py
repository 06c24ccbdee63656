"""Ring attention (context parallelism): keys and values are passed around a ring of devices.

Source: arXiv:2310.01889; the zigzag order: arXiv:2311.09431. The sequence is cut into 2c pieces
over c devices; device i has the pieces i and 2c - 1 - i, an early and a late one. Under a causal
mask a device then uses half of each block of keys and values that it receives (all of them for half
of its queries, or half of them for all), so the work is balanced in every ring step.

The backward pass is implemented here too: keys and values are passed around again, with their
gradients. Only a device's queries, keys, values and outputs are saved for it, never the scores. In
each ring step, only those of a pair of blocks are in memory (`attention_blocks`).
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

from partitioning import constraints
from partitioning.constraints import (
  automatic_layout,
  axes_splitting,
  manual_axes,
  tie_to,
)
from partitioning.parallel import attention_blocks, collectives
from partitioning.parallel.attention_blocks import Blocks, Keys, Queries
from partitioning.parallel.manual_region import manual_region
from partitioning.parallel.splash_kernel import SplashBlocks
from partitioning.parallel.split_sequence import devices_along
from partitioning.rules import Axes, partition_spec, resolve, spec_entries


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


def in_order(x_BT: jax.Array, order_T: np.ndarray, letters: str) -> jax.Array:
  """Returns `x_BT[:, order_T]`, sharded as the activation table says.

  By hand: in a region that is manual over some axes XLA's partitioner aborts the process where it
  gathers along a dim that an automatic axis splits (spmd_partitioner_util.cc:497, jax 0.10.2).

  Args:
    x_BT: numbers of the tokens of complete rows, or arrays of them.
    order_T: a permutation, such as `zigzag_order`.
    letters: of the result.
  """
  layout, sizes = automatic_layout("ring attention")
  found = resolve(letters, x_BT.shape, layout.legend, layout.table, sizes)
  if found.failures:
    return constraints.constrain(x_BT[:, order_T], letters)  # which records or raises them
  [_, axes, *_] = spec_entries(found.spec, x_BT.ndim)
  split = PartitionSpec(axes)

  def inside(x: jax.Array, order: jax.Array) -> jax.Array:
    return collectives.all_gather(x, axes, 1)[:, order]

  ordered = manual_region(inside, (found.spec, split), found.spec)(x_BT, jnp.asarray(order_T))
  return constraints.constrain(ordered, letters)


def ring_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKU: jax.Array,
  segments_BT: jax.Array | None,
  window: jax.Array | int | None,
  *,
  blocks: Blocks | SplashBlocks,
  letters: tuple[str, str, str],
  sinks_N: jax.Array | None = None,
  name: str = "",
) -> jax.Array:
  """Causal self-attention over a sequence that mesh axes split.

  Args:
    q_BTNH: queries, in `zigzag_order` along T.
    k_BTKH: keys, likewise; each of the K heads serves N/K query heads.
    v_BTKU: values; their heads may have another size.
    segments_BT: document of each token, in the same order; a query attends only to its own. None:
      one document.
    window: number of slots that a query attends to, its own being the last; None: its full past.
      With `SplashBlocks` the kind of the layer; None: the first.
    blocks: how scores are computed, in blocks of how many tokens. With `SplashBlocks` a piece of
      the order is a multiple of 128 tokens.
    letters: the legend's letters of the queries, the keys and the values.
    sinks_N: a learned score per head that has no value (arXiv:2309.17453); None: none.
    name: of the output and the softmax's normalizer, for the policy of a surrounding
      `jax.checkpoint`; "": none.

  Returns:
    B T N U, sharded as the queries.
  """
  q_BTNH = blocks.prepared(q_BTNH)
  layout, sizes = automatic_layout("ring attention")
  of_queries, of_keys, of_values = letters
  around = axes_splitting(of_queries[1])
  assert not manual_axes() & {*around}, around
  named = (of_queries, q_BTNH), (of_keys, k_BTKH), (of_values, v_BTKU)
  named += ((of_queries[:2], q_BTNH[..., 0, 0]),)
  found = [resolve(one, x.shape, layout.legend, layout.table, sizes) for one, x in named]
  if layout.checking and any(one.failures for one in found):
    shape = (*q_BTNH.shape[:-1], v_BTKU.shape[-1])
    return jnp.zeros(shape, q_BTNH.dtype)  # `constrain` has recorded that it cannot be sharded so
  queries, keys, values, rows = (one.spec for one in found)
  out = partition_spec((*spec_entries(queries, 4)[:-1], spec_entries(values, 4)[-1]))
  same = spec_entries(queries, 4)[2] == spec_entries(keys, 4)[2]
  ring = _Ring(around, blocks, name)
  # A device derives its place in the ring from its slots, not from its axis index: JAX would hoist
  # what depends on no argument into a shard_map without arguments, which XLA rejects.
  slots_T = jnp.asarray(zigzag_order(q_BTNH.shape[1], devices_along(of_queries[1])))
  serving_N = jnp.arange(q_BTNH.shape[2], dtype=jnp.int32) // (q_BTNH.shape[2] // k_BTKH.shape[2])
  facts = _QueryFacts(slots_T, None if same else serving_N, segments_BT, window)
  q_BTNH, facts = tie_to(q_BTNH, facts)
  specs = PartitionSpec(queries[1]), PartitionSpec(queries[2]), rows, PartitionSpec()
  specs = (None if fact is None else spec for fact, spec in zip(facts, specs, strict=True))

  def inside(q, k, v, sinks, facts):
    return _attend(ring, q, k, v, sinks, facts)

  of_sinks = None if sinks_N is None else PartitionSpec(queries[2])
  in_specs = (queries, keys, values, of_sinks, _QueryFacts(*specs))
  return manual_region(inside, in_specs, out)(q_BTNH, k_BTKH, v_BTKU, sinks_N, facts)


def served(x_BSKH: jax.Array, serving_N: jax.Array | None) -> jax.Array:
  """Returns for each of the device's query heads its key/value head, if they are not in groups.

  Args:
    x_BSKH: the device's keys or values.
    serving_N: key/value head of each query head; None: N/K consecutive query heads share one.
  """
  return x_BSKH if serving_N is None else jnp.take(x_BSKH, serving_N, axis=2)


def sum_kv_grads(d_BSNH: jax.Array, serving_N: jax.Array | None, keys: int) -> jax.Array:
  """Returns B S K H, the transpose of `served`."""
  if serving_N is None:
    return d_BSNH
  batch, slots, _, head = d_BSNH.shape
  zeros = jnp.zeros((batch, slots, keys, head), d_BSNH.dtype)
  return zeros.at[:, :, serving_N].add(d_BSNH)


_WHOLE = slice(None)


class _QueryFacts(NamedTuple):
  """A device's queries: inputs of the mask and of `served`; see `ring_attention`."""

  slots_T: jax.Array
  serving_N: jax.Array | None
  segments_BT: jax.Array | None
  window: jax.Array | int | None


class _KVBlock(NamedTuple):
  """What is passed around the ring: keys, values, and the documents that they belong to."""

  k_BSKH: jax.Array
  v_BSKU: jax.Array
  segments_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The static description of a ring: its mesh axes, the blocks, the name of its output."""

  axes: Axes
  blocks: Blocks | SplashBlocks
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

  def steps(self, step: Callable, carry: Any) -> Any:
    """Returns what the steps between the first, of a device's own keys, and the last one carry."""
    numbers = jnp.arange(1, self.last, dtype=jnp.int32)
    if not numbers.size:
      return carry
    return jax.lax.scan(lambda carry, number: (step(carry, number), None), carry, numbers)[0]

  @property
  def last(self) -> int:
    """Returns the number of the last step."""
    return jax.lax.axis_size(self.axes) - 1

  def ring_step(self, facts: _QueryFacts, number: jax.Array, add: Callable, total: Any) -> Any:
    """Processes the received block: on each device, half of all pairs of queries and keys.

    Args:
      facts: of this device's queries.
      number: of the step, which is how many places before this device the block's owner is.
      add: returns the new total, given (total, query slice, key slice, int32 slots of the keys).
        Each query is after all of these keys.
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


def _local_pairs(ring: _Ring, length: int) -> Iterator[tuple[slice, slice]]:
  """Yields the query and key slices of step 0: early queries do not attend to late keys."""
  if isinstance(ring.blocks, SplashBlocks):  # its kernel skips them
    yield _WHOLE, _WHOLE
    return
  half = length // 2
  yield slice(0, half), slice(0, half)
  yield slice(half, None), _WHOLE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, sinks, facts: _QueryFacts):
  return _forward(ring, q, k, v, sinks, facts)[0]


def _forward(ring: _Ring, q, k, v, sinks, facts: _QueryFacts):
  """Returns the attention output, and what the backward pass needs."""
  heads = q.shape[2] if facts.serving_N is not None else k.shape[2]
  q_BKGTH = attention_blocks.by_heads(q, heads)

  def add(block: _KVBlock, total, rows, columns, slots_S, *, every=True):
    pairs = _pairs(q_BKGTH, facts, block, rows, columns, slots_S)
    part = jax.tree.map(lambda x: x[:, :, :, rows], total)
    part = ring.blocks.add_keys(part, *pairs, facts.window, every=every)
    return jax.tree.map(lambda x, new: x.at[:, :, :, rows].set(new), total, part)

  def step(carry, number):
    total, block = carry
    following = ring.next(block)  # while this one is processed
    return ring.ring_step(facts, number, functools.partial(add, block), total), following

  block = _KVBlock(k, v, facts.segments_BT)
  following = ring.next(block)
  shape = (*q_BKGTH.shape[:-1], v.shape[-1])
  total = attention_blocks.empty_softmax(shape, ring.blocks.dtype, sinks)
  for rows, columns in _local_pairs(ring, q.shape[1]):
    total = add(block, total, rows, columns, facts.slots_T, every=False)
  total, block = ring.steps(step, (total, following))
  total = ring.ring_step(facts, ring.last, functools.partial(add, block), total)
  out_BKGTU, normalizer_BKGT = total.finished()
  out = ring.named(attention_blocks.by_tokens(out_BKGTU).astype(v.dtype))
  return out, (q, k, v, sinks, facts, out, ring.named(normalizer_BKGT))


def _pairs(
  q_BKGTH: jax.Array, facts: _QueryFacts, block: _KVBlock, rows: slice, columns: slice, slots_S
) -> tuple[Queries, Keys]:
  """Returns some of the queries and some of the keys, as `attention_blocks` takes them."""
  segments_BT, segments_BS = facts.segments_BT, block.segments_BS
  if segments_BT is not None:
    segments_BT, segments_BS = segments_BT[:, rows], segments_BS[:, columns]
  queries = Queries(q_BKGTH[:, :, :, rows], facts.slots_T[None, rows], segments_BT)
  k_BKSH, v_BKSU = (
    jnp.swapaxes(served(x[:, columns], facts.serving_N), 1, 2) for x in (block.k_BSKH, block.v_BSKU)
  )
  return queries, Keys(k_BKSH, v_BKSU, slots_S[columns], segments_BS)


def _backward(ring: _Ring, saved, d_out):
  """Returns the gradients; keys and values are passed around again, with their gradients."""
  q, k, v, sinks, facts, out, normalizer_BKGT = saved
  heads = normalizer_BKGT.shape[1]
  q_BKGTH, *of_out = (attention_blocks.by_heads(x, heads) for x in (q, out, d_out))
  given = attention_blocks.saved(*of_out, normalizer_BKGT)
  if isinstance(ring.blocks, SplashBlocks):
    given = given._replace(out_BKGTU=of_out[0])

  def add(block: _KVBlock, sums, rows, columns, slots_S, *, every=True):
    pairs = _pairs(q_BKGTH, facts, block, rows, columns, slots_S)
    part = jax.tree.map(lambda x: x[:, :, :, rows], given)
    zeros = (jnp.zeros(x.shape, normalizer_BKGT.dtype) for x in pairs[1][:2])
    totals = sums[0][:, :, :, rows], *zeros
    d_q, *d_kv = ring.blocks.add_gradients(totals, part, *pairs, facts.window, every=every)
    d_kv = (sum_kv_grads(jnp.swapaxes(d, 1, 2), facts.serving_N, k.shape[2]) for d in d_kv)
    more = (x.at[:, columns].add(d) for x, d in zip(sums[1:], d_kv, strict=True))
    return sums[0].at[:, :, :, rows].set(d_q), *more

  def contribute(d_q, block: _KVBlock, d_block, number):
    # The block's gradients so far arrive while those of this device are computed.
    arrived = ring.next(d_block)
    zeros = (jnp.zeros(x.shape, x.dtype) for x in d_block)
    d_q, *found = ring.ring_step(facts, number, functools.partial(add, block), (d_q, *zeros))
    return d_q, [x + more for x, more in zip(arrived, found, strict=True)]

  def step(carry, number):
    d_q, block, d_block = carry
    following = ring.next(block)
    d_q, d_block = contribute(d_q, block, d_block, number)
    return d_q, following, d_block

  block = _KVBlock(k, v, facts.segments_BT)
  following = ring.next(block)
  sums = tuple(jnp.zeros(x.shape, normalizer_BKGT.dtype) for x in (q_BKGTH, k, v))
  for rows, columns in _local_pairs(ring, q.shape[1]):
    sums = add(block, sums, rows, columns, facts.slots_T, every=False)
  d_q, *d_block = sums
  d_q, block, d_block = ring.steps(step, (d_q, following, d_block))
  d_q, d_block = contribute(d_q, block, d_block, ring.last)
  d_k, d_v = ring.next(d_block)  # back to their owner
  d_q = attention_blocks.by_tokens(d_q).astype(q.dtype)
  d_sinks = attention_blocks.sink_gradient(sinks, normalizer_BKGT, given.products_BKGT)
  return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None


_attend.defvjp(_forward, _backward)
