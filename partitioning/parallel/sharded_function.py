"""Runs a function of sharded arrays, in a `jax.shard_map` if a weight or the sequence is gathered.

Defines weights and the residual for the matmuls of this package, the specs of their arguments, and
the collectives around a function. Letters are those of the model's legend.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from partitioning.constraints import (
  automatic_layout,
  constrain,
  on_cpus,
  on_one_device,
  record,
)
from partitioning.parallel import collectives
from partitioning.parallel.collectives import Moves
from partitioning.parallel.manual_region import manual_region
from partitioning.rules import Axes, Table, resolve, spec_entries

SEQUENCE_DIM = 1  # of activations (batch, sequence, ...)
GATHERED = "gathered_kernel"  # under this name policies of `jax.checkpoint` may save it


class Weight(Protocol):
  """A parameter that activations are multiplied by, or that tokens are looked up in.

  Attributes:
    letters: of its dims.
  """

  letters: str

  def effective_kernel(self) -> jax.Array:
    """Returns the array to multiply by, as it is stored: one that is quantized has `astype`."""

  def low_rank(self) -> Any:
    """Returns `matmuls.LowRank`, what is added to the products; None: nothing is."""

  def eight_bit(self) -> Any:
    """Returns `matmuls.EightBit`; None: the products are in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class Residual:
  """The letters of the residual stream, each of them (batch, sequence, width).

  Attributes:
    between: its letters between blocks, such as BRD.
    inside: its letters inside a block, such as BTD: the sequence has another letter, since sequence
      parallelism splits it only between blocks.
  """

  between: str
  inside: str

  @property
  def tokens(self) -> str:
    """Returns the letters of batch and sequence inside a block."""
    return self.inside[:-1]

  @property
  def width(self) -> str:
    """Returns the letter of the width."""
    return self.inside[-1]

  @property
  def sequences(self) -> tuple[str, str]:
    """Returns the letters of the sequence between blocks and inside."""
    return self.between[SEQUENCE_DIM], self.inside[SEQUENCE_DIM]

  def activation(self, letters: str) -> str:
    """Returns the letters of an activation: a weight's, with the tokens in place of the width."""
    return self.tokens + letters.replace(self.width, "")


@dataclasses.dataclass(frozen=True)
class Stored:
  """A parameter as a device stores it, before it is gathered.

  Attributes:
    shard: the device's part.
    moves: its all-gathers.
    axes: of each dim, those that split it.
    gradient_dtype: in which its gradient is reduced.
  """

  shard: jax.Array
  moves: Moves
  axes: tuple[Axes, ...]
  gradient_dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Operand:
  """An argument of a function of sharded arrays.

  Attributes:
    letters: of its dims; "" of a scalar.
    array: the argument; of a kernel also what `astype` makes an array of this shape.
    inside: the same letters, in the order in which the function takes the dims; "": in theirs.
    kernel: whether it is a parameter, which is cast and gathered for the function.
    stored: whether the function takes it as `Stored`, and gathers it.
  """

  letters: str
  array: jax.Array
  inside: str = ""
  kernel: bool = False
  stored: bool = False

  @property
  def order(self) -> str:
    """Returns the letters in the order in which the function takes the dims."""
    return self.inside or self.letters


def on_shards(
  function: Callable[..., jax.Array],
  letters: Sequence[str],
  output: str,
  *arguments: jax.Array | None,
) -> jax.Array:
  """Runs a function on each device's shards of activations, without communication.

  Args:
    function: takes shards; along mesh axes that split none of the arrays, devices repeat the work.
    letters: of the arrays.
    output: the letters of the result, each among the others.
    *arguments: the arrays; the function is given None for one that is None.
  """
  present = [place for place, x in enumerate(arguments) if x is not None]
  given, arrays = ([all_[place] for place in present] for all_ in (letters, arguments))

  def on_device(*shards: jax.Array) -> jax.Array:
    found = dict(zip(present, shards, strict=True))
    return function(*(found.get(place) for place in range(len(arguments))))

  layout, _ = automatic_layout()
  extents = _extents(given, arrays)
  if on_one_device() or (layout.checking and not _fit([*given, output], extents, layout.table)):
    return function(*arguments)  # `constrain` has recorded why they cannot be sharded
  in_specs = tuple(_spec(one, extents, layout.table) for one in given)
  out_specs = _spec(output, extents, layout.table)
  return manual_region(on_device, in_specs, out_specs)(*arrays)


def summed_last(letters: str, summed: str) -> str:
  """Returns the letters of a weight, the contracted ones last.

  The matmul of the weight's gradient then has its output dims in this order, and the result is
  reduced over devices without a transpose. In another order XLA folds the transpose into the
  matmul, for which it has no fast kernel on CPUs (jax 0.10.2: a step of fsdp8 took 8 % longer).
  """
  return "".join(x for x in letters if x not in summed) + summed


def contracted(x_letters: str, x: jax.Array, letters: str, kernel: jax.Array) -> jax.Array:
  """Returns the contraction of an activation's last dims with a weight's.

  On CPUs batch and sequence are merged into one dim, and the others likewise, where the merged
  dims are not sharded. For the gradient of a weight, which contracts batch and sequence, XLA for
  CPUs (jax 0.10.2) else writes transposed copies of both factors and has no fast kernel for their
  matmul: a step of a decoder of width 256 on one core took a quarter more of the processor.

  Args:
    x_letters: of x: batch, sequence, and the contracted dims.
    x: the activation.
    letters: of the weight: its other dims, then the contracted ones in the order of x, as
      `summed_last` has them.
    kernel: the weight.

  Returns:
    Batch, sequence, and the weight's other dims.
  """
  tokens, summed = x_letters[: SEQUENCE_DIM + 1], x_letters[SEQUENCE_DIM + 1 :]
  others = letters.removesuffix(summed)
  merged = (tokens, summed, others)
  if not on_cpus() or any(split_over(dims[1:]) for dims in merged):
    return jnp.einsum(f"{x_letters},{letters}->{tokens}{others}", x, kernel)
  width = math.prod(x.shape[len(tokens) :])
  x_2, kernel_2 = x.reshape(-1, width), kernel.reshape(-1, width)
  in_rings = automatic_layout()[0].collective_matmul  # which take a transpose of their own
  result = x_2 @ kernel_2.T if in_rings else _multiplied(x_2, kernel_2)
  return result.reshape(*x.shape[: len(tokens)], *kernel.shape[: len(others)])


@jax.custom_vjp
def _multiplied(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns x [tokens, inputs] times a kernel [outputs, inputs].

  The kernel's gradient has the smaller of its dims first, and is transposed afterwards: for the
  matmul of the other order, which XLA else makes of both, CPUs take 1.5 to 1.9 times as long.
  """
  return x @ kernel.T


def _multiplied_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
  return x @ kernel.T, (x, kernel)


def _multiplied_backward(saved: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, kernel = saved
  factors = (gradient, x) if len(kernel) <= kernel.shape[1] else (x, gradient)
  product = jax.lax.dot_general(*factors, (((0,), (0,)), ((), ())))
  product = jax.lax.optimization_barrier(product)
  return gradient @ kernel, product if factors[1] is x else product.T


_multiplied.defvjp(_multiplied_forward, _multiplied_backward)


def split_over(letters: str) -> Axes:
  """Returns the axes larger than 1 that split these dims inside a block."""
  layout, sizes = automatic_layout()
  axes = [axis for letter in letters for axis in layout.table[layout.legend[letter].name]]
  return tuple(axis for axis in axes if sizes[axis] > 1)


def splits(letter: str, size: int) -> Axes:
  """Returns the axes larger than 1 that split a dim of this size; () where it is replicated."""
  return spec_entries(_spec(letter, {letter: size}, automatic_layout()[0].table), 1)[0]


def reduce_partial(partial: jax.Array, axes: Axes, extra: Axes) -> jax.Array:
  """Reduces partial sums over the axes of contracted dims; devices keep their part of the sequence.

  Args:
    partial: partial sums, of batch, the sequence inside a block, and width.
    axes: of the contracted dims.
    extra: those that split the residual's sequence only between blocks.
  """
  if not extra:
    return collectives.total(partial, axes)
  if axes == extra:
    return collectives.reduce_scatter(partial, axes, SEQUENCE_DIM)
  whole = jax.lax.psum(partial, axes) if axes else partial
  length = whole.shape[SEQUENCE_DIM] // jax.lax.axis_size(extra)
  start = jax.lax.axis_index(extra) * length
  return jax.lax.dynamic_slice_in_dim(whole, start, length, SEQUENCE_DIM)


def sharded(
  function: Callable[..., list[jax.Array]],
  operands: Sequence[Operand],
  outputs: Sequence[str],
  *,
  residual: Residual,
  dtype: jnp.dtype,
  by_hand: bool = False,
  recompute: bool = True,
) -> list[jax.Array]:
  """Runs a function of sharded arrays: in a shard_map, where a weight or the sequence is gathered.

  Only the sharded arguments are saved for the backward pass: neither the gathered sequence, nor
  gathered, cast or transposed weights of each layer.

  Args:
    function: takes whether it runs in a shard_map, then shards or global arrays.
    operands: what it takes them of.
    outputs: the letters of its results.
    residual: the residual's letters.
    dtype: to which parameters are cast for the function.
    by_hand: in a shard_map in any case.
    recompute: False saves what the function saves: of the last one, whose backward pass is next.
  """
  layout, sizes = automatic_layout()
  inside = [one.order for one in operands]
  extents = _extents([one.letters for one in operands], [one.array for one in operands])
  between, within = residual.sequences  # the sequence is as long in a block as between blocks
  extents.setdefault(between, extents.get(within, 0))
  extents.setdefault(within, extents[between])
  kernels = [letters for letters, one in zip(inside, operands, strict=True) if one.kernel]
  parameters = {**layout.table, **layout.parameters}
  used = [_spec(letters, extents, layout.table) for letters in inside]
  stored = list(used)
  for number, one in enumerate(operands):
    spec = _spec(one.order, extents, parameters)
    if one.kernel and _gathers(spec, used[number]) is not None:
      stored[number] = spec
  moves = [_gathers(before, after) for before, after in zip(stored, used, strict=True)]
  # If a dim cannot be split there is no region to trace, and `constrain` records the failure.
  fits = _fit([*inside, *outputs], extents, layout.table) and _fit(kernels, extents, parameters)

  # Kernels enter a region in a wider dtype if their gradients are to leave it in one.
  wide = layout.gradient_dtype or dtype
  wider = jnp.finfo(wide).bits > jnp.finfo(dtype).bits

  def taken(one: Operand, shard: jax.Array, spec: PartitionSpec, moves: Moves) -> Any:
    if one.stored:
      entries = spec_entries(spec, shard.ndim)
      axes = tuple(tuple(axis for axis in entry if sizes[axis] > 1) for entry in entries)
      return Stored(shard, moves, axes, shard.dtype)
    x = _taken(shard, moves, dtype) if wider and one.kernel else collectives.gather(shard, moves)
    return checkpoint_name(x, GATHERED) if one.kernel and moves else x

  def on_device(*shards: jax.Array) -> list[jax.Array]:
    return function(True, *map(taken, operands, shards, stored, moves))

  def everywhere(*arrays: jax.Array) -> list[jax.Array]:
    arrays = [
      constrain(x, letters) if letters else x for x, letters in zip(arrays, inside, strict=True)
    ]
    given = (
      Stored(x, (), ((),) * x.ndim, x.dtype) if one.stored else x
      for one, x in zip(operands, arrays, strict=True)
    )
    return function(False, *given)

  def product(*arrays: jax.Array) -> list[jax.Array]:
    # Also for split weights: XLA's partitioner would all-reduce the gradient of x once per weight;
    # here their sum is reduced once (as seen on CPUs). And to reduce in a wider dtype: it reduces
    # what a matmul returns.
    manual = by_hand or any(map(split_over, kernels)) or sequence_axes(residual) or any(moves)
    manual = manual or (wider and not on_one_device() and math.prod(sizes.values()) > 1)
    manual = manual and not (layout.checking and not fits)
    cast = wide if wider and manual else dtype
    arrays = [
      jnp.transpose(x.astype(cast) if one.kernel else x, [one.letters.index(c) for c in one.order])
      for one, x in zip(operands, arrays, strict=True)
    ]
    if not manual:
      results = everywhere(*arrays)
    else:
      for x, letters in zip(arrays, inside, strict=True):
        if letters:
          record(letters, x.shape)
      outs = [_spec(letters, extents, layout.table) for letters in outputs]
      results = manual_region(on_device, tuple(stored), outs)(*arrays)
    return [constrain(x, letters) for x, letters in zip(results, outputs, strict=True)]

  arrays = [one.array for one in operands]
  if not recompute:
    return product(*arrays)
  # A new function each time: JAX would reuse a traced one under another activation layout.
  kept = jax.checkpoint_policies.save_only_these_names(GATHERED)
  policy = None if layout.reshard_after_forward else kept
  return jax.checkpoint(product, prevent_cse=False, policy=policy)(*arrays)


def sequence_axes(residual: Residual) -> tuple[str, ...]:
  """Returns the axes larger than 1 that split the sequence between blocks but not inside."""
  layout, sizes = automatic_layout()
  between, within = (layout.table[layout.legend[letter].name] for letter in residual.sequences)
  return tuple(axis for axis in between if axis not in within and sizes[axis] > 1)


def _extents(letters: Sequence[str], arguments: Sequence[jax.Array]) -> dict[str, int]:
  """Returns letter -> size."""
  extents: dict[str, int] = {}
  for one, x in zip(letters, arguments, strict=True):
    extents.update(zip(one, x.shape, strict=True))
  return extents


def _spec(letters: str, extents: Mapping[str, int], table: Table) -> PartitionSpec:
  """Returns the spec of an array by a table; failures are left to `constrain`."""
  layout, sizes = automatic_layout()
  shape = tuple(extents.get(letter) or layout.legend[letter].size for letter in letters)
  return resolve(letters, shape, layout.legend, table, sizes).spec


def _fit(every: Sequence[str], extents: Mapping[str, int], table: Table) -> bool:
  """Returns whether a table can shard arrays of these letters."""
  layout, sizes = automatic_layout()
  shapes = ([extents.get(x) or layout.legend[x].size for x in letters] for letters in every)
  return not any(
    resolve(letters, shape, layout.legend, table, sizes).failures
    for letters, shape in zip(every, shapes, strict=True)
  )


def _gathers(before: PartitionSpec, after: PartitionSpec) -> Moves | None:
  """Returns (dim, axes) of the all-gathers from one spec to another; None if they are not enough.

  Of a dim that two axes split, the inner one can be gathered: the shards of the outer one stay
  contiguous.
  """
  moves = []
  rank = max(len(before), len(after))
  specs = zip(spec_entries(before, rank), spec_entries(after, rank), strict=True)
  for dim, (old, new) in enumerate(specs):
    if old[: len(new)] != new:
      return None
    if len(old) > len(new):
      moves.append((dim, old[len(new) :]))
  return tuple(moves)


def gathered(stored: Stored, dtype: jnp.dtype, *, constant: bool) -> jax.Array:
  """Returns a parameter, cast and all-gathered; `constant`: without a gradient."""
  shard = jax.lax.stop_gradient(stored.shard) if constant else stored.shard
  return _taken(shard, stored.moves, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def with_gradient_of(whole: jax.Array, shard: jax.Array, moves: Moves) -> jax.Array:
  """Returns a part of a gathered parameter; its gradient is reduce-scattered to the same shard's.

  Args:
    whole: rows of the parameter, as `gathered` returns it without a gradient.
    shard: the same rows of the device's part.
    moves: of the gather.
  """
  del shard
  return whole


def _whole_forward(whole: jax.Array, shard: jax.Array, moves) -> tuple[jax.Array, jax.Array]:
  return whole, jnp.zeros((0,), shard.dtype)


def _whole_backward(moves, like: jax.Array, gradient: jax.Array) -> tuple[None, jax.Array]:
  return None, collectives.scatter(gradient.astype(like.dtype), moves)


with_gradient_of.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _taken(shard: jax.Array, moves: Moves, dtype: jnp.dtype) -> jax.Array:
  """Returns a parameter cast and all-gathered; its gradient is reduced in the parameter's dtype."""
  return collectives.gather(shard.astype(dtype), moves)


def _taken_forward(shard: jax.Array, moves, dtype) -> tuple[jax.Array, jax.Array]:
  return _taken(shard, moves, dtype), jnp.zeros((0,), shard.dtype)


def _taken_backward(moves, dtype, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  del dtype
  return (collectives.scatter(gradient.astype(like.dtype), moves),)


_taken.defvjp(_taken_forward, _taken_backward)
