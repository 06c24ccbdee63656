"""Logits of one chunk of the vocabulary at a time, reduced to numbers of each token."""

import dataclasses
from collections.abc import Sequence
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
  contracted,
  gathered,
  sequence_axes,
  sharded,
  split_over,
  summed_last,
  with_gradient_of,
)


@dataclasses.dataclass(frozen=True)
class Head:
  """What the logits of a model are made of.

  Attributes:
    x: the residual, between blocks.
    kernel: of the residual's width and the vocabulary; cast to the dtype of x.
    letters: of the kernel.
    residual: the residual's letters.
  """

  x: jax.Array
  kernel: jax.Array
  letters: str
  residual: Residual


def chunked_logits(
  heads: Sequence[Head],
  targets: jax.Array,
  reduction: Any,
  chunks: int,
  more: Sequence[tuple[str, jax.Array]] = (),
) -> list[jax.Array]:
  """Computes the logits of one chunk of the vocabulary at a time, reduced to numbers per token.

  A kernel is gathered once. Only one chunk's logits are in memory at a time; the backward pass
  recomputes them, if there are several chunks. A chunk has all of a device's tokens, so that its
  part of the weight's gradient is complete: it is reduce-scattered while the next chunk is
  computed, and nothing as large as the weight is summed over chunks. What is summed, in float32 or
  wider, is the gradient of x.

  Args:
    heads: of one model, or of several with one vocabulary, whose chunks are reduced together.
    targets: of the tokens; within a device as long as x after its all-gather.
    reduction: of the heads' logits, a chunk at a time: `models.losses.TokenNumbers`.
    chunks: their number; divides the part of the vocabulary that a device has.
    more: letters and array of what else the reduction takes of each token: it is then given a tuple
      of the targets and of these.

  Returns:
    `reduction.results` arrays (batch, sequence), inside a block.
  """
  x, residual, letters = heads[0].x, heads[0].residual, heads[0].letters
  vocabulary, output = letters.replace(residual.width, ""), residual.activation(letters)
  shape = (*targets.shape, heads[0].kernel.shape[letters.index(vocabulary)])
  wide, sequence = wide_dtype(x.dtype), sequence_axes(residual)
  insides = [summed_last(one.letters, one.residual.width) for one in heads]
  widths = [split_over(one.residual.width) for one in heads]
  classes, (layout, _) = split_over(vocabulary), automatic_layout()

  def numbers(manual: bool, *arrays: Any) -> list[jax.Array]:
    operands, (targets, *others) = arrays[: 2 * len(heads)], arrays[2 * len(heads) :]
    xs, stored = operands[::2], operands[1::2]
    of_tokens = (targets, *others) if others else targets
    if manual and sequence:
      xs = [collectives.all_gather(x, sequence, SEQUENCE_DIM) for x in xs]
    # Whether a chunk's rows of a kernel are on all devices.
    own_rows = [all(dim != 0 for dim, _ in one.moves) for one in stored]
    kernels = [
      gathered(one, x.dtype, constant=own) for x, one, own in zip(xs, stored, own_rows, strict=True)
    ]
    part = kernels[0].shape[0] // chunks
    own = jax.lax.axis_index(classes) * kernels[0].shape[0] if manual and classes else 0

    def chunk(found, wide_xs, kernels, shards, number):
      logits = []
      for place, (kernel, shard) in enumerate(zip(kernels, shards, strict=True)):
        if own_rows[place]:
          kernel = with_gradient_of(kernel, shard, stored[place].moves)
        x = wide_xs[place].astype(xs[place].dtype)
        one = contracted(heads[place].residual.inside, x, insides[place], kernel)
        logits.append(collectives.total(one, widths[place]) if manual else one)
      return reduction.add(found, logits, of_tokens, own + number * part)

    record(output, shape, layout)  # of all chunks: `constrain` takes no part of a dim
    start = reduction.start(of_tokens, wide)
    if not manual:
      start = jax.tree.map(lambda one: constrain(one, residual.tokens), start)
    # Cast back in each chunk, so that the scan adds up the gradients of x in the wide dtype.
    wide_xs = [x.astype(wide) for x in xs]
    of_chunks = (
      [kernel.reshape(chunks, part, -1) for kernel in kernels],
      [
        one.shard.reshape(chunks, part, -1) if own else None
        for one, own in zip(stored, own_rows, strict=True)
      ],
      jnp.arange(chunks, dtype=targets.dtype),
    )
    if chunks == 1:  # whose logits are saved
      found = chunk(start, wide_xs, *jax.tree.map(lambda x: x[0], of_chunks))
    else:
      again = jax.checkpoint(chunk, prevent_cse=False)
      found, _ = jax.lax.scan(
        lambda found, inputs: (again(found, wide_xs, *inputs), None), start, of_chunks
      )
    return list(reduction.finish(found, of_tokens, classes if manual else ()))

  operands = []
  for one, inside in zip(heads, insides, strict=True):
    operands.append(Operand(one.residual.between, one.x))
    operands.append(Operand(one.letters, one.kernel, inside, kernel=True, stored=True))
  return sharded(
    numbers,
    [*operands, Operand(residual.tokens, targets), *(Operand(*one) for one in more)],
    [residual.tokens] * reduction.results,
    residual=residual,
    dtype=x.dtype,
    recompute=False,  # of all chunks, besides that of each
  )
