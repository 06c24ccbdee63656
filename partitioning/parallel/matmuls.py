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
  Operand,
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

  def operands(self) -> list[Operand]:
    """Returns A and B, the dims that are contracted last."""
    inputs = self.letters_a.replace(self.rank, "")
    pairs = (self.letters_a, self.a, inputs), (self.letters_b, self.b, self.rank)
    return [Operand(one, x, summed_last(one, summed), kernel=True) for one, x, summed in pairs]


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
  outputs = [residual.activation(weight.letters) for weight in weights]
  inside = [summed_last(weight.letters, residual.width) for weight in weights]
  letters = residual.between, residual.inside
  products = _Products(weights, inside, letters, outputs, dropped, residual)
  in_8_bits = products.in_8_bits
  ring = _as_ring() and bool(sequence) and not width and products.can_be_parts

  def matmuls(manual: bool, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    # Updates are of the activation itself; without any, it is gathered in 8 bits.
    if in_8_bits and not products.updates:
      kernels, _, scalars = products.parted(operands)
      gathered = sequence if manual else ()
      results = in_8_bits(manual, x, kernels, scalars, gathered, ring=ring)
    elif manual and ring:
      results = _rings().gathered(products.of_tokens, sequence, x, *operands)
    else:
      if manual and sequence:
        x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
      results = products(manual, x, *operands)
    return [collectives.total(result, width) for result in results] if manual else results

  return sharded(
    matmuls,
    [Operand(residual.between, x), *products.operands],
    outputs,
    residual=residual,
    dtype=x.dtype,
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
  letters, summed = (
    residual.activation(weight.letters),
    weight.letters.replace(residual.width, ""),
  )
  axes, sequence = split_over(summed), sequence_axes(residual)
  inside = [summed_last(weight.letters, summed)]
  products = _Products([weight], inside, (letters,) * 2, [residual.inside], dropped, residual)
  ring = _as_ring() and bool(axes) and axes == sequence and products.can_be_parts

  def matmul(manual: bool, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    if manual and ring and products.in_8_bits:
      kernels, _, scalars = products.parted(operands)
      return products.in_8_bits(manual, x, kernels, scalars, scattered=sequence)
    if manual and ring:
      return [_rings().scattered(products.of_tokens, sequence, x, *operands)]
    [out] = products(manual, x, *operands)
    return [reduce_partial(out, axes, sequence) if manual else out]

  [out] = sharded(
    matmul,
    [Operand(letters, x), *products.operands],
    [residual.between],
    residual=residual,
    dtype=x.dtype,
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
    [Operand(residual.between, x)],
    [output],
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

  sequence, every = sequence_axes(residual), [*weights, down]
  outputs = [residual.activation(weight.letters) for weight in weights]
  # The width last, as XLA for TPUs has the gradients: it is the dim that `fsdp` splits, and of one
  # that is scattered along its lanes XLA makes an all-reduce.
  inside = [summed_last(weight.letters, residual.width) for weight in every]
  kernels = [_kernel(weight, letters) for weight, letters in zip(every, inside, strict=True)]
  [out] = sharded(
    matmuls,
    [Operand(residual.between, x), *kernels],
    [residual.between],
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


def _kernel(weight: Weight, inside: str, *, stored: bool = False) -> Operand:
  return Operand(weight.letters, weight.effective_kernel(), inside, kernel=True, stored=stored)


class _Products:
  """The products of an activation with some weights: plain, in 8 bits, with low-rank updates.

  Attributes:
    operands: the kernels; A and B of each update, then the mask of dropped inputs if there is one;
      the scalars of 8-bit products.
    updates: (number of the weight, its update), of those that have one.
    in_8_bits: the products in 8 bits; None: they are in the compute dtype.
    can_be_parts: whether parts of the sequence can be multiplied one by one.
  """

  def __init__(
    self,
    weights: Sequence[Weight],
    inside: Sequence[str],
    letters: tuple[str, str],
    outputs: Sequence[str],
    dropped: Dropped | None,
    residual: Residual,
  ):
    """Takes letters: of kernels as they are multiplied, of x as given and as multiplied, results.

    Args:
      weights: to multiply by.
      inside: the letters of the kernels as they are multiplied.
      letters: of the activation, as it is given and as it is multiplied.
      outputs: of the products, before they are reduced.
      dropped: inputs that the updates do not see.
      residual: the residual's letters.
    """
    self._inside, self._outputs, self._tokens = inside, outputs, residual.tokens
    self._x, eight_bit = letters[1], [weight.eight_bit() for weight in weights]
    self.in_8_bits, known = None, ()
    if eight_bit[0] is not None:
      from partitioning.parallel.eight_bit import Products  # where it is chosen

      self.in_8_bits = Products.of(eight_bit[0].dtype, letters[1], letters[0], outputs)
      known = [Operand("", one) for weight in eight_bit for one in weight.known]
    found = [weight.low_rank() for weight in weights]
    self.updates = [(number, one) for number, one in enumerate(found) if one is not None]
    self._dropped = dropped if self.updates else None
    stored = self.in_8_bits is not None
    kernels = [_kernel(w, order, stored=stored) for w, order in zip(weights, inside, strict=True)]
    more = [one for _, update in self.updates for one in update.operands()]
    self._inside_updates = [one.order for one in more]
    if self._dropped is not None:
      more.append(Operand(self._dropped.letters, self._dropped.keep))
    self.operands = [*kernels, *more, *known]
    self._cuts = len(kernels), len(kernels) + len(more)
    self.can_be_parts = self._dropped is None and not (self.in_8_bits and self.updates)

  def parted(self, operands: Sequence) -> tuple[Sequence, Sequence, Sequence]:
    """Returns the kernels, what updates take, and the scalars, of the operands."""
    first, second = self._cuts
    return operands[:first], operands[first:second], operands[second:]

  def __call__(self, manual: bool, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """Returns the products of all tokens; `manual`: in a region."""
    kernels, more, scalars = self.parted(operands)
    if self.in_8_bits is None:
      return list(self.of_tokens(x, *operands))
    return self._updated(self.in_8_bits(manual, x, kernels, scalars), x, more)

  def of_tokens(self, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the products in the compute dtype, of any part of the sequence."""
    kernels, more, _ = self.parted(operands)
    pairs = zip(self._inside, kernels, strict=True)
    results = [contracted(self._x, x, letters, kernel) for letters, kernel in pairs]
    return tuple(self._updated(results, x, more))

  def _updated(self, results: list, x: jax.Array, operands: Sequence) -> list[jax.Array]:
    """Returns the products with the updates added."""
    results = list(results)
    if self._dropped is not None:
      kept = (x.astype(wide_dtype(x.dtype)) / (1.0 - self._dropped.rate)).astype(x.dtype)
      x = jnp.where(operands[-1], kept, jnp.zeros_like(x))
    for order, (number, update) in enumerate(self.updates):
      hidden, output = self._tokens + update.rank, self._outputs[number]
      inside_a, inside_b = self._inside_updates[2 * order : 2 * order + 2]
      a, b = operands[2 * order : 2 * order + 2]
      low = jnp.einsum(f"{self._x},{inside_a}->{hidden}", x, a)
      results[number] = results[number] + jnp.einsum(f"{hidden},{inside_b}->{output}", low, b)
    return results
