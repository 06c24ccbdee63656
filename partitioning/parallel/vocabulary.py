"""Vocabulary-parallel embedding lookups and chunked logits. Source: arXiv:1909.08053, section 3.

Letters are those of the model's legend; the caller says which ones the residual has.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from partitioning.constraints import automatic_layout, batch_part, constrain, record
from partitioning.dims import Axes
from partitioning.parallel import collectives
from partitioning.parallel.sharded_function import (
  SEQUENCE_DIM,
  Residual,
  Weight,
  reduce_partial,
  sequence_axes,
  sharded,
  split_over,
  summed_last,
)


def chunked_logits(
  x: jax.Array,
  weight: Weight,
  targets: jax.Array,
  reduce: Callable[[jax.Array, jax.Array, Axes], tuple[jax.Array, ...]],
  chunks: int,
  residual: Residual,
  results: int = 1,
) -> list[jax.Array]:
  """Computes the logits of one chunk of tokens at a time, and reduces them to numbers per token.

  The weight is gathered once, and its gradient is reduce-scattered once. Only one chunk's logits
  are in memory at a time; the backward pass recomputes them. Chunks are strided (every
  `chunks`-th token), so that all devices have equal parts of each.

  Args:
    x: the residual, between blocks.
    weight: of the residual's width and the vocabulary; cast to the dtype of x.
    targets: of the tokens; within a device as long as x after its all-gather.
    reduce: takes logits (batch, chunk, vocabulary), targets (batch, chunk) and the axes that split
      the vocabulary of these logits; returns `results` arrays (batch, chunk).
    chunks: their number; divides the tokens of a device.
    residual: the residual's letters.
    results: how many numbers per token.

  Returns:
    `results` arrays (batch, sequence), inside a block.
  """
  kernel, inside = weight.effective_kernel(), summed_last(weight.letters, residual.width)
  vocabulary, output = inside.replace(residual.width, ""), residual.activation(weight.letters)
  (rows, length), stored = targets.shape, kernel.dtype
  vocabulary_size = kernel.shape[weight.letters.index(vocabulary)]

  sequence, width = sequence_axes(residual), split_over(residual.width)
  classes, (layout, _) = split_over(vocabulary), automatic_layout()

  def losses(manual: bool, x, kernel, targets) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(wide_kernel, x, targets) -> tuple[jax.Array, ...]:
      logits = jnp.einsum(f"{residual.inside},{inside}->{output}", x, wide_kernel.astype(x.dtype))
      if not manual:
        return reduce(constrain(logits, output), targets, ())
      record(output, (rows, length // chunks, vocabulary_size), layout)
      return reduce(collectives.total(logits, width), targets, classes)

    # Cast back in each chunk, so that the scan adds up the chunks' gradients in the wide dtype.
    wide_kernel = kernel.astype(stored)

    def one(_, inputs):
      return None, chunk(wide_kernel, *inputs)

    _, found = jax.lax.scan(one, None, (_strided(x, chunks), _strided(targets, chunks)))
    return [jnp.moveaxis(one, 0, 2).reshape(targets.shape) for one in found]

  return sharded(
    losses,
    [residual.between, weight.letters, residual.tokens],
    [residual.between, inside, residual.tokens],
    [residual.tokens] * results,
    *(x, kernel, targets),
    kernels=[1],
    residual=residual,
    dtype=x.dtype,
  )


def _strided(x: jax.Array, count: int) -> jax.Array:
  """Returns the tokens r, r + count, ... of each row, with r < count as the first dim."""
  rows, length, *rest = x.shape
  return jnp.moveaxis(x.reshape(rows, length // count, count, *rest), 2, 0)


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
  letters = [weight.letters, residual.tokens]
  [out] = sharded(
    look_up,
    letters,
    letters,
    [residual.between],
    *(table, tokens),
    kernels=[0],
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
