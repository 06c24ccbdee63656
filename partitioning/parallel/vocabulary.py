"""Vocabulary-parallel embedding lookups. Source: arXiv:1909.08053, section 3.

Letters are those of the model's legend; the caller says which ones the residual has.
"""

import functools

import jax
import jax.numpy as jnp

from partitioning.constraints import automatic_layout, batch_part
from partitioning.parallel import collectives
from partitioning.parallel.collectives import Moves
from partitioning.parallel.sharded_function import (
  Operand,
  Residual,
  Stored,
  Weight,
  gathered,
  reduce_partial,
  sequence_axes,
  sharded,
  split_over,
)
from partitioning.rules import axes_size

# The largest sums of a table's gradient that are in memory at a time, in float32: those of all rows
# of Llama 3 405B take 7.8 GiB.
_MOST_SUMS = 2**31


def vocab_parallel_embedding(
  weight: Weight, tokens: jax.Array, residual: Residual, dtype: jnp.dtype
) -> jax.Array:
  """Looks up the embeddings of tokens; see `table_rows` for the gradient.

  The table is all-gathered over fsdp first: a lookup in a table that is also split along its width
  makes XLA copy the full batch ("involuntary full rematerialization").

  Args:
    weight: the table, (vocabulary, width).
    tokens: ids below the vocabulary's size, (batch, sequence) inside a block.
    residual: the residual's letters.
    dtype: of the result, to which the table is cast before it is gathered.

  Returns:
    The residual, between blocks.
  """
  table = weight.effective_kernel()
  vocabulary, stored = weight.letters.replace(residual.width, ""), table.dtype
  axes, sequence = split_over(vocabulary), sequence_axes(residual)
  count = table.shape[0] // axes_size(axes, automatic_layout()[1])  # rows of a device
  parts = _parts(count, table.shape[1] * stored.itemsize)

  def rows(table: jax.Array | Stored, ids: jax.Array) -> jax.Array:
    if parts == 1:
      return table_rows(table, ids, stored)
    # Each device has all rows of a part before the gather: its columns of them.
    by_parts = bool(table.moves) and all(dim != 0 for dim, _ in table.moves)
    whole = gathered(table, dtype, constant=by_parts)
    if by_parts:
      return table_rows_by_parts(whole, table.shard, ids, table.moves, stored, parts)
    return table_rows(whole, ids, stored)

  def look_up(manual: bool, table: jax.Array | Stored, tokens: jax.Array) -> list[jax.Array]:
    if not manual:
      return [rows(table, tokens)]
    if axes:  # each device contributes the rows that it has
      tokens = tokens - jax.lax.axis_index(axes) * jnp.asarray(count, tokens.dtype)
    here = (tokens >= 0) & (tokens < count)
    found = rows(table, jnp.where(here, tokens, jnp.zeros_like(tokens)))
    own = jnp.where(here[:, :, None], found, jnp.zeros_like(found))
    return [reduce_partial(own, axes, sequence)]

  # Where data is manual and context is not, XLA's partitioner would gather the gradients of all
  # tokens along it for the table's gradient, instead of reducing that (as seen on CPUs).
  by_hand = batch_part() is not None and bool(split_over(residual.tokens))
  [out] = sharded(
    look_up,
    [
      Operand(weight.letters, table, kernel=True, stored=parts > 1),
      Operand(residual.tokens, tokens),
    ],
    [residual.between],
    residual=residual,
    dtype=dtype,
    by_hand=by_hand,
  )
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_rows(table: jax.Array, ids: jax.Array, sum_dtype: jnp.dtype) -> jax.Array:
  """Looks up rows of a table by id; the table's gradient is summed in `sum_dtype`.

  The transpose of a lookup sums the gradients of all tokens with the same id. A bfloat16 sum stops
  growing after some hundred terms of equal size: on text, the table's gradient was off by 14 % with
  4,096 tokens on a device. So only the final sum is rounded.
  """
  del sum_dtype
  return table[ids]


def _rows_forward(
  table: jax.Array, ids: jax.Array, sum_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  # An array of no elements carries the table's shape and dtype to the backward pass.
  return table[ids], (ids, jnp.zeros((*table.shape, 0), table.dtype))


def _rows_backward(
  sum_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
  ids, like = saved
  table = jax.ShapeDtypeStruct(like.shape[:-1], sum_dtype)
  [summed] = jax.linear_transpose(lambda table: table[ids], table)(gradient.astype(sum_dtype))
  return summed.astype(like.dtype), None


table_rows.defvjp(_rows_forward, _rows_backward)


def _parts(rows: int, row_bytes: int) -> int:
  """Returns the fewest equal parts of a table's rows whose sums take at most `_MOST_SUMS`."""
  return next(
    n for n in range(1, rows + 1) if rows % n == 0 and rows // n * row_bytes <= _MOST_SUMS
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def table_rows_by_parts(
  whole: jax.Array,
  shard: jax.Array,
  ids: jax.Array,
  moves: Moves,
  sum_dtype: jnp.dtype,
  parts: int,
) -> jax.Array:
  """Looks up rows as `table_rows`; the gradient is summed and scattered a part at a time.

  Args:
    whole: the gathered table, as `gathered` returns it without a gradient.
    shard: the device's columns of it, which have the gradient.
    ids: of rows.
    moves: of the gather, along columns.
    sum_dtype: in which gradients are summed.
    parts: a divisor of the rows.
  """
  del shard, moves, sum_dtype, parts
  return whole[ids]


def _parts_forward(
  whole: jax.Array, shard: jax.Array, ids: jax.Array, moves: Moves, sum_dtype, parts: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  del moves, sum_dtype, parts
  return whole[ids], (ids, jnp.zeros((*whole.shape, 0), shard.dtype))


def _parts_backward(
  moves: Moves, sum_dtype: jnp.dtype, parts: int, saved: tuple, gradient: jax.Array
) -> tuple[None, jax.Array, None]:
  ids, like = saved
  rows, width, _ = like.shape
  count = rows // parts
  table = jax.ShapeDtypeStruct((count, width), sum_dtype)

  def of_part(number: jax.Array) -> jax.Array:
    own = ids - number * count
    own = jnp.where(own < 0, count, own)  # beyond the part: dropped
    taken = jax.linear_transpose(lambda x: x.at[own].get(mode="fill", fill_value=0), table)
    [summed] = taken(gradient.astype(sum_dtype))
    return collectives.scatter(summed.astype(like.dtype), moves)

  found = jax.lax.map(of_part, jnp.arange(parts, dtype=ids.dtype))
  return None, found.reshape(rows, -1), None


table_rows_by_parts.defvjp(_parts_forward, _parts_backward)
