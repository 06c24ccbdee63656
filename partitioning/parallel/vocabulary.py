"""Vocabulary-parallel embedding lookups and chunked logits. Source: arXiv:1909.08053, section 3.

Letters are those of the model's legend; the caller says which ones the residual has.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.constraints import automatic_layout, batch_part, constrain, record
from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives
from partitioning.parallel.sharded_function import (
  SEQUENCE_DIM,
  Operand,
  Residual,
  Stored,
  Weight,
  contracted,
  gathered,
  reduce_partial,
  sequence_axes,
  sharded,
  split_over,
  summed_last,
  with_gradient_of,
)


def chunked_logits(
  x: jax.Array,
  weight: Weight,
  targets: jax.Array,
  reduction: Any,
  chunks: int,
  residual: Residual,
) -> list[jax.Array]:
  """Computes the logits of one chunk of the vocabulary at a time, reduced to numbers per token.

  The weight is gathered once. Only one chunk's logits are in memory at a time; the backward pass
  recomputes them. A chunk has all of a device's tokens, so that its part of the weight's gradient
  is complete: it is reduce-scattered while the next chunk is computed, and nothing as large as the
  weight is summed over chunks. What is summed, in float32 or wider, is the gradient of x.

  Args:
    x: the residual, between blocks.
    weight: of the residual's width and the vocabulary; cast to the dtype of x.
    targets: of the tokens; within a device as long as x after its all-gather.
    reduction: of the logits, a chunk at a time: `models.losses.TokenNumbers`.
    chunks: their number; divides the part of the vocabulary that a device has.
    residual: the residual's letters.

  Returns:
    `reduction.results` arrays (batch, sequence), inside a block.
  """
  kernel, inside = weight.effective_kernel(), summed_last(weight.letters, residual.width)
  vocabulary, output = inside.replace(residual.width, ""), residual.activation(weight.letters)
  shape = (*targets.shape, kernel.shape[weight.letters.index(vocabulary)])
  wide = wide_dtype(x.dtype)

  sequence, width = sequence_axes(residual), split_over(residual.width)
  classes, (layout, _) = split_over(vocabulary), automatic_layout()

  def numbers(manual: bool, x, stored: Stored, targets) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
    own_rows = all(dim != 0 for dim, _ in stored.moves)  # a chunk's rows are on all devices
    kernel = gathered(stored, x.dtype, constant=own_rows)
    part = kernel.shape[0] // chunks
    own = jax.lax.axis_index(classes) * kernel.shape[0] if manual and classes else 0

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(found, wide_x, kernel, shard, number):
      if own_rows:
        kernel = with_gradient_of(kernel, shard, stored.moves)
      logits = contracted(residual.inside, wide_x.astype(x.dtype), inside, kernel)
      logits = collectives.total(logits, width) if manual else logits
      return reduction.add(found, logits, targets, own + number * part)

    record(output, shape, layout)  # of all chunks: `constrain` takes no part of a dim
    start = reduction.start(targets, wide)
    if not manual:
      start = jax.tree.map(lambda one: constrain(one, residual.tokens), start)
    # Cast back in each chunk, so that the scan adds up the gradients of x in the wide dtype.
    wide_x = x.astype(wide)
    found, _ = jax.lax.scan(
      lambda found, inputs: (chunk(found, wide_x, *inputs), None),
      start,
      (
        kernel.reshape(chunks, part, -1),
        stored.shard.reshape(chunks, part, -1) if own_rows else None,
        jnp.arange(chunks, dtype=targets.dtype),
      ),
    )
    return list(reduction.finish(found, targets, classes if manual else ()))

  return sharded(
    numbers,
    [
      Operand(residual.between, x),
      Operand(weight.letters, kernel, inside, kernel=True, stored=True),
      Operand(residual.tokens, targets),
    ],
    [residual.tokens] * reduction.results,
    residual=residual,
    dtype=x.dtype,
    recompute=False,  # of all chunks, besides that of each
  )


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

  def look_up(manual: bool, table: jax.Array, tokens: jax.Array) -> list[jax.Array]:
    if not manual:
      return [table_rows(table, tokens, stored)]
    if axes:  # each device contributes the rows that it has
      rows = jnp.asarray(table.shape[0], tokens.dtype)
      tokens = tokens - jax.lax.axis_index(axes) * rows
    here = (tokens >= 0) & (tokens < table.shape[0])
    found = table_rows(table, jnp.where(here, tokens, jnp.zeros_like(tokens)), stored)
    own = jnp.where(here[:, :, None], found, jnp.zeros_like(found))
    return [reduce_partial(own, axes, sequence)]

  axes, sequence = split_over(vocabulary), sequence_axes(residual)
  # Where data is manual and context is not, XLA's partitioner would gather the gradients of all
  # tokens along it for the table's gradient, instead of reducing that (as seen on CPUs).
  by_hand = batch_part() is not None and bool(split_over(residual.tokens))
  [out] = sharded(
    look_up,
    [Operand(weight.letters, table, kernel=True), Operand(residual.tokens, tokens)],
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
