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

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from partitioning.constraints import automatic_layout
from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives
from partitioning.parallel.sharded_function import (
  SEQUENCE_DIM,
  Residual,
  Weight,
  contracted,
  reduce_partial,
  sequence_axes,
  sharded,
  split_over,
  splits,
  summed_last,
)


@dataclasses.dataclass(frozen=True)
class LowRank:
  """A low-rank update A B of a weight, which `weight.low_rank()` returns where there is one.

  Attributes:
    letters_a: of A: the weight's contracted dims, and the rank.
    letters_b: of B: the rank, and the weight's other dims.
    a: A, sharded as parameters are.
    b: B, likewise.
  """

  letters_a: str
  letters_b: str
  a: jax.Array
  b: jax.Array

  @property
  def rank(self) -> str:
    """Returns the letter of the rank."""
    return self.letters_b[0]


@dataclasses.dataclass(frozen=True)
class EightBit:
  """How to multiply by a weight in 8 bits, which `weight.eight_bit()` returns where it is so.

  Attributes:
    dtype: int8 or float8.
    known: delayed scaling (float8): the largest magnitudes of earlier steps, scalars: of inputs,
      kernel and gradients, 0 where none is known yet. Their cotangents are the magnitudes of this
      step. (): current scaling, by the arrays' own.
  """

  dtype: str
  known: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dropped:
  """Inputs that low-rank updates do not see.

  Attributes:
    keep: booleans, False where an input counts as 0; the others are scaled up.
    letters: of `keep`, inside a block.
    rate: the share that counts as 0.
  """

  keep: jax.Array
  letters: str
  rate: float


def column_parallel(
  x: jax.Array, weights: Sequence[Weight], residual: Residual, dropped: Dropped | None = None
) -> list[jax.Array]:
  """Multiplies the residual, all-gathered along its sequence, by column-parallel weights.

  With the low-rank update of a weight W, where it has one, the result is x W + (x A) B. Like W, B
  is split over its output dims; every device computes x A, and the gradient of A is summed over
  the devices as that of any replicated parameter.

  Args:
    x: the residual, between blocks.
    weights: with the residual's width among their dims; cast to the dtype of x.
    residual: the residual's letters.
    dropped: inputs that the updates do not see.

  Returns:
    For each weight the contraction over the width, with the letters that `residual.activation`
    gives for the weight's.
  """
  sequence, width = sequence_axes(residual), split_over(residual.width)

  def plain(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
    pairs = zip(inside, kernels, strict=True)
    return tuple(contracted(residual.inside, x, letters, kernel) for letters, kernel in pairs)

  def updated(x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    results = plain(x, *operands[: len(weights)])
    return tuple(updates.added(results, residual.inside, outputs, x, operands[len(weights) :]))

  def matmuls(manual: bool, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    kernels, more = operands[: len(weights)], operands[len(weights) :]
    more, scalars = more[: len(updates.operands)], more[len(updates.operands) :]
    # Updates are of the activation itself; without any, it is gathered in 8 bits.
    if in_8_bits and not updates.kernels:
      gathered = sequence if manual else ()
      results = in_8_bits(manual, x, kernels, scalars, gathered, ring=bool(ring))
    elif manual and ring:
      results = _rings().gathered(updated, sequence, x, *operands)
    else:
      if manual and sequence:
        x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
      results = in_8_bits(manual, x, kernels, scalars) if in_8_bits else plain(x, *kernels)
      results = updates.added(results, residual.inside, outputs, x, more)
    return [collectives.total(result, width) for result in results] if manual else results

  outputs = [residual.activation(weight.letters) for weight in weights]
  inside = [summed_last(weight.letters, residual.width) for weight in weights]
  updates = _Updates(weights, dropped, residual)
  in_8_bits, known = _eight_bit(weights, residual.inside, residual.between, outputs)
  ring = _as_ring() and sequence and not (width or updates.dropout)
  ring = ring and not (in_8_bits and updates.kernels)
  no_dims = [""] * len(known)
  return sharded(
    matmuls,
    [residual.between, *(weight.letters for weight in weights), *updates.letters, *no_dims],
    [residual.between, *inside, *updates.inside, *no_dims],
    outputs,
    *(x, *(weight.effective_kernel() for weight in weights), *updates.operands, *known),
    kernels=range(1, 1 + len(weights) + updates.kernels),
    residual=residual,
    dtype=x.dtype,
    stored_kernels=range(1, 1 + len(weights)) if in_8_bits else (),
  )


def row_parallel(
  x: jax.Array, weight: Weight, residual: Residual, dropped: Dropped | None = None
) -> jax.Array:
  """Multiplies by a row-parallel weight; the partial sums are reduced along the sequence.

  With the low-rank update of a weight W, where it has one, the result is x W + (x A) B. Like W, A
  is split over its input dims; the partial sums (x A) B are added before the reduction.

  Args:
    x: batch and sequence, inside a block, and the weight's dims except the residual's width.
    weight: cast to the dtype of x.
    residual: the residual's letters.
    dropped: inputs that the update does not see.

  Returns:
    The residual's update, between blocks.
  """

  def plain(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array]:
    return (contracted(x_letters, x, inside, kernel),)

  def updated(x: jax.Array, kernel: jax.Array, *operands: jax.Array) -> tuple[jax.Array]:
    [out] = updates.added(plain(x, kernel), x_letters, [residual.inside], x, operands)
    return (out,)

  def matmul(manual: bool, x: jax.Array, kernel, *operands) -> list[jax.Array]:
    operands, scalars = operands[: len(updates.operands)], operands[len(updates.operands) :]
    if manual and ring and in_8_bits:
      return in_8_bits(manual, x, [kernel], scalars, scattered=sequence)
    if manual and ring:
      return [_rings().scattered(updated, sequence, x, kernel, *operands)]
    [out] = in_8_bits(manual, x, [kernel], scalars) if in_8_bits else plain(x, kernel)
    [out] = updates.added([out], x_letters, [residual.inside], x, operands)
    return [reduce_partial(out, axes, sequence) if manual else out]

  x_letters, summed = (
    residual.activation(weight.letters),
    weight.letters.replace(residual.width, ""),
  )
  inside = summed_last(weight.letters, summed)
  axes, sequence = split_over(summed), sequence_axes(residual)
  updates = _Updates([weight], dropped, residual)
  in_8_bits, known = _eight_bit([weight], x_letters, x_letters, [residual.inside])
  ring = _as_ring() and axes and axes == sequence
  ring = ring and not (updates.dropout or (in_8_bits and updates.kernels))
  no_dims = [""] * len(known)
  [out] = sharded(
    matmul,
    [x_letters, weight.letters, *updates.letters, *no_dims],
    [x_letters, inside, *updates.inside, *no_dims],
    [residual.between],
    *(x, weight.effective_kernel(), *updates.operands, *known),
    kernels=range(1, 2 + updates.kernels),
    residual=residual,
    dtype=x.dtype,
    stored_kernels=[1] if in_8_bits else (),
  )
  return out


def for_each_head(x: jax.Array, heads: str, residual: Residual) -> jax.Array:
  """Repeats an activation, all-gathered along its sequence, for each head; these may be split.

  The transpose sums over the heads of all devices, and scatters along the sequence.

  Args:
    x: batch, sequence between blocks, and a width.
    heads: the letter of the dim.
    residual: the letters of x, between blocks and inside.

  Returns:
    Batch, sequence inside a block, heads, and the width.
  """
  sequence, size = sequence_axes(residual), automatic_layout()[0].legend[heads].size

  def repeated(manual: bool, x: jax.Array) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
    count = size // jax.lax.axis_size(axes) if manual and axes else size
    shape = (*x.shape[: SEQUENCE_DIM + 1], count, x.shape[-1])
    return [jnp.broadcast_to(jnp.expand_dims(x, SEQUENCE_DIM + 1), shape)]

  axes, output = splits(heads, size), residual.tokens + heads + residual.width
  [out] = sharded(
    repeated,
    [residual.between],
    [residual.between],
    [output],
    x,
    kernels=(),
    residual=residual,
    dtype=x.dtype,
    by_hand=bool(axes),
  )
  return out


def in_one_ring(weights: Sequence[Weight], down: Weight, residual: Residual) -> bool:
  """Returns whether `feedforward` takes these weights.

  Args:
    weights: column-parallel.
    down: row-parallel.
    residual: the residual's letters.
  """
  sequence, every = sequence_axes(residual), (*weights, down)
  plain = all(one.low_rank() is None and one.eight_bit() is None for one in every)
  summed = split_over(down.letters.replace(residual.width, ""))
  return bool(_as_ring() and sequence == summed and not split_over(residual.width) and plain)


def feedforward(
  x: jax.Array,
  weights: Sequence[Weight],
  function: Callable[..., jax.Array],
  down: Weight,
  residual: Residual,
) -> jax.Array:
  """Returns `row_parallel(function(*column_parallel(x, weights)), down)`, as one ring.

  No product is ever of all tokens: one part of the sequence goes through all of it while the next
  one is on its way.

  Args:
    x: the residual, between blocks.
    weights: column-parallel.
    function: of the products, number by number; without arrays that are traced outside of it.
    down: row-parallel.
    residual: the residual's letters.
  """

  def all_of(x: jax.Array, *kernels: jax.Array) -> jax.Array:
    products = [
      jnp.einsum(f"{residual.inside},{ins}->{out}", x, kernel)
      for ins, out, kernel in zip(inside[:-1], outputs, kernels[:-1], strict=True)
    ]
    return jnp.einsum(
      f"{outputs[0]},{inside[-1]}->{residual.inside}", function(*products), kernels[-1]
    )

  def matmuls(manual: bool, x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
    if manual:
      return [_rings().through(all_of, sequence, x, *kernels)]
    return [all_of(x, *kernels)]

  sequence = sequence_axes(residual)
  letters = [weight.letters for weight in (*weights, down)]
  outputs = [residual.activation(weight.letters) for weight in weights]
  # The width last, as XLA for TPUs has the gradients: it is the dim that `fsdp` splits, and of one
  # that is scattered along its lanes XLA makes an all-reduce.
  inside = [summed_last(weight.letters, residual.width) for weight in (*weights, down)]
  [out] = sharded(
    matmuls,
    [residual.between, *letters],
    [residual.between, *inside],
    [residual.between],
    *(x, *(weight.effective_kernel() for weight in (*weights, down))),
    kernels=range(1, 2 + len(weights)),
    residual=residual,
    dtype=x.dtype,
  )
  return out


def _as_ring() -> bool:
  """Returns whether gathers and scatters along the sequence are parts of the matmuls."""
  return automatic_layout()[0].collective_matmul


def _rings() -> ModuleType:
  from partitioning.parallel import collective_matmul  # where it is chosen

  return collective_matmul


def _eight_bit(
  weights: Sequence[Weight], x: str, stored_x: str, outputs: Sequence[str]
) -> tuple[Callable | None, list[jax.Array]]:
  """Returns the products in 8 bits, where the weights are multiplied so, and what is `known`."""
  found = [weight.eight_bit() for weight in weights]
  if found[0] is None:
    return None, []
  from partitioning.parallel.eight_bit import Products  # where it is chosen

  known = [one for weight in found for one in weight.known]
  return Products(found[0].dtype, x, stored_x, outputs), known


class _Updates:
  """The low-rank updates of some weights, as further operands of their matmuls.

  Attributes:
    operands: A and B of each update, then the mask of dropped inputs if there is one.
    letters: of the operands.
    inside: the same letters, in the order in which the matmuls take them.
    kernels: how many of the operands are parameters.
    dropout: whether there is a mask.
  """

  def __init__(self, weights: Sequence[Weight], dropped: Dropped | None, residual: Residual):
    found = [weight.low_rank() for weight in weights]
    self._of = [(number, update) for number, update in enumerate(found) if update is not None]
    self._dropped, self._tokens = dropped if self._of else None, residual.tokens
    updates = [update for _, update in self._of]
    self.operands = [x for update in updates for x in (update.a, update.b)]
    self.letters = [x for update in updates for x in (update.letters_a, update.letters_b)]
    self.inside = []
    for update in updates:
      self.inside.append(summed_last(update.letters_a, update.letters_a.replace(update.rank, "")))
      self.inside.append(summed_last(update.letters_b, update.rank))
    self.kernels, self.dropout = len(self.operands), self._dropped is not None
    if self.dropout:
      self.operands.append(self._dropped.keep)
      self.letters.append(self._dropped.letters)
      self.inside.append(self._dropped.letters)

  def added(
    self,
    results: Sequence[jax.Array],
    x_letters: str,
    outputs: Sequence[str],
    x: jax.Array,
    operands: Sequence[jax.Array],
  ) -> list[jax.Array]:
    """Returns the weights' results with the updates added; `operands` as they are inside."""
    results = list(results)
    if self.dropout:
      kept = (x.astype(wide_dtype(x.dtype)) / (1.0 - self._dropped.rate)).astype(x.dtype)
      x = jnp.where(operands[-1], kept, jnp.zeros_like(x))
    for order, (number, update) in enumerate(self._of):
      hidden, output = self._tokens + update.rank, outputs[number]
      inside_a, inside_b = self.inside[2 * order : 2 * order + 2]
      a, b = operands[2 * order : 2 * order + 2]
      low = jnp.einsum(f"{x_letters},{inside_a}->{hidden}", x, a)
      results[number] = results[number] + jnp.einsum(f"{hidden},{inside_b}->{output}", low, b)
    return results
