"""Logits of one chunk of the vocabulary at a time, reduced to numbers of each token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.constraints import automatic_layout, constrain, record
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
