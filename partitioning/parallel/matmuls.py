"""FSDP and tensor-parallel matmuls, and sequence parallelism around them.

Sources: arXiv:1909.08053 (column- and row-parallel matmuls),
arXiv:2304.11277 (parameters gathered where they are used), arXiv:2205.05198, section 4.2.2
(sequence parallelism).

- A weight that `fsdp` shards is all-gathered for its matmul; its gradient is reduce-scattered.
- A column-parallel weight is split along its output dims: each device computes its part of the
  output. A row-parallel one is split along the contracted dims: the partial sums are all-reduced.
- With sequence parallelism the residual's sequence is split over `tensor` between blocks, so that
  norms and residual are computed and stored once. Before a block's first matmuls the sequence is
  all-gathered, after its last one the partial sums are reduce-scattered along it.

Given only sharding constraints, XLA's partitioner inserts all-reduces of full activations and
gradients instead (seen on CPUs and TPUs). So these matmuls run in a `jax.shard_map`, where the two
collectives are each other's transpose. Where no weight is split or gathered, and the residual's
sequence is sharded as inside a block, a matmul is a plain constrained einsum.

Letters are those of the model's legend; the caller says which ones the residual has.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

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


def column_parallel(x: jax.Array, weights: Sequence[Weight], residual: Residual) -> list[jax.Array]:
  """Multiplies the residual, all-gathered along its sequence, by column-parallel weights.

  Args:
    x: the residual, between blocks.
    weights: with the residual's width among their dims; cast to the dtype of x.
    residual: the residual's letters.

  Returns:
    For each weight the contraction over the width, with the letters that `residual.activation`
    gives for the weight's.
  """
  sequence, width = sequence_axes(residual), split_over(residual.width)

  def matmuls(manual: bool, x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
    triples = zip(inside, outputs, kernels, strict=True)
    results = [jnp.einsum(f"{residual.inside},{ins}->{out}", x, k) for ins, out, k in triples]
    return [collectives.total(result, width) for result in results] if manual else results

  outputs = [residual.activation(weight.letters) for weight in weights]
  inside = [summed_last(weight.letters, residual.width) for weight in weights]
  return sharded(
    matmuls,
    [residual.between, *(weight.letters for weight in weights)],
    [residual.between, *inside],
    outputs,
    *(x, *(weight.effective_kernel() for weight in weights)),
    kernels=range(1, 1 + len(weights)),
    residual=residual,
    dtype=x.dtype,
  )


def row_parallel(x: jax.Array, weight: Weight, residual: Residual) -> jax.Array:
  """Multiplies by a row-parallel weight; the partial sums are reduced along the sequence.

  Args:
    x: batch and sequence, inside a block, and the weight's dims except the residual's width.
    weight: cast to the dtype of x.
    residual: the residual's letters.

  Returns:
    The residual's update, between blocks.
  """

  def matmul(manual: bool, x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
    out = jnp.einsum(f"{x_letters},{inside}->{residual.inside}", x, kernel)
    return [reduce_partial(out, axes, sequence) if manual else out]

  x_letters, summed = (
    residual.activation(weight.letters),
    weight.letters.replace(residual.width, ""),
  )
  inside = summed_last(weight.letters, summed)
  axes, sequence = split_over(summed), sequence_axes(residual)
  [out] = sharded(
    matmul,
    [x_letters, weight.letters],
    [x_letters, inside],
    [residual.between],
    *(x, weight.effective_kernel()),
    kernels=[1],
    residual=residual,
    dtype=x.dtype,
  )
  return out
