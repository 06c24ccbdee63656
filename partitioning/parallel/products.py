"""FSDP and tensor-parallel matmuls, the embedding's lookup, and sequence parallelism around them.

Sources: arXiv:1909.08053 (column- and row-parallel matmuls, vocabulary-parallel embeddings),
arXiv:2304.11277 (parameters gathered where they are used), arXiv:2205.05198, section 4.2.2
(sequence parallelism).

- A weight that `fsdp` shards is all-gathered for its matmul; its gradient is reduce-scattered.
- A column-parallel weight is split along its output dims: each device computes its part of the
  output. A row-parallel one is split along the dims that are summed over: the partial sums are
  all-reduced.
- With sequence parallelism the residual's sequence is split over `tensor` between blocks, so that
  norms and residual are computed and stored once. Before a block's first matmuls the sequence is
  all-gathered, after its last one the partial sums are reduce-scattered along it.

Given constraints alone, XLA's partitioner writes all-reduces of whole activations and gradients
instead, on CPUs and, as seen, on TPUs. So these matmuls run in a `jax.shard_map`; the transpose of
each collective is the other one. Where no weight is split or gathered, and the residual's sequence
lies as it does inside a block, a matmul is a plain constrained einsum.

Letters are those of the model's legend; which of them the residual has, the caller says.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import automatic_layout, constrain, on_one_device, record
from partitioning.dims import Axes, Table, resolve, spec_entries
from partitioning.parallel import collectives
from partitioning.parallel.manual_region import manual_region

SEQUENCE_DIM = 1  # of activations (batch, sequence, ...)


class Weight(Protocol):
  """A parameter that activations are multiplied by, or that tokens are looked up in.

  Attributes:
    letters: of its dims.
  """

  letters: str

  def effective_kernel(self) -> jax.Array:
    """Returns the array to multiply by, in the dtype in which it is stored."""


@dataclasses.dataclass(frozen=True)
class Residual:
  """The letters of the residual stream, each of them (batch, sequence, width).

  Attributes:
    between: as it is sharded between blocks, such as BRD.
    inside: as it is sharded inside a block, such as BTD: the sequence has another letter, since
      sequence parallelism splits it between blocks alone.
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
    """Returns the letters of an activation of a weight's dims: tokens instead of the width."""
    return self.tokens + letters.replace(self.width, "")


def column_parallel(x: jax.Array, weights: Sequence[Weight], residual: Residual) -> list[jax.Array]:
  """Multiplies the residual, gathered over its sequence, by weights that are split by columns.

  Args:
    x: the residual, between blocks.
    weights: with the residual's width among their dims; cast to the dtype of x.
    residual: the residual's letters.

  Returns:
    For each weight the product over the width, constrained by `residual.activation` of its
    letters.
  """
  sequence, width = _sequence_axes(residual), _split_over(residual.width)

  def matmuls(manual: bool, x: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)
    triples = zip(inside, outputs, kernels, strict=True)
    results = [jnp.einsum(f"{residual.inside},{ins}->{out}", x, k) for ins, out, k in triples]
    return [total(result, width) for result in results] if manual else results

  outputs = [residual.activation(weight.letters) for weight in weights]
  inside = [_summed_last(weight.letters, residual.width) for weight in weights]
  return _sharded(
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
  """Multiplies by a weight that is split by rows; each device gets its part of the sequence.

  Args:
    x: batch and sequence, inside a block, and the dims of the weight but for the residual's width.
    weight: cast to the dtype of x.
    residual: the residual's letters.

  Returns:
    The residual's update, between blocks.
  """

  def matmul(manual: bool, x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
    out = jnp.einsum(f"{x_letters},{inside}->{residual.inside}", x, kernel)
    return [_reduce(out, axes, sequence) if manual else out]

  x_letters, summed = (
    residual.activation(weight.letters),
    weight.letters.replace(residual.width, ""),
  )
  inside = _summed_last(weight.letters, summed)
  axes, sequence = _split_over(summed), _sequence_axes(residual)
  [out] = _sharded(
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


def chunked_logits(
  x: jax.Array,
  weight: Weight,
  targets: jax.Array,
  reduce: Callable[[jax.Array, jax.Array, Axes], jax.Array],
  chunks: int,
  residual: Residual,
) -> jax.Array:
  """Computes the logits of one chunk of tokens at a time, and reduces them to a number per token.

  The weight is gathered once, and its gradient scattered once; the logits of one chunk are in
  memory at a time, and are computed again in the backward pass. A chunk takes every so many-th
  token, so that each device has a part of it as long as the others'.

  Args:
    x: the residual, between blocks.
    weight: of the residual's width and the vocabulary; cast to the dtype of x.
    targets: of the tokens; of the same length within a device as x, gathered.
    reduce: takes logits (batch, chunk, vocabulary), targets (batch, chunk) and the axes over which
      the vocabulary is split in the shards that it is given; returns (batch, chunk).
    chunks: number; divides the tokens of a device.
    residual: the residual's letters.

  Returns:
    (batch, sequence), inside a block.
  """
  kernel, inside = weight.effective_kernel(), _summed_last(weight.letters, residual.width)
  vocabulary, output = inside.replace(residual.width, ""), residual.activation(weight.letters)
  (rows, length), stored = targets.shape, kernel.dtype
  vocabulary_size = kernel.shape[weight.letters.index(vocabulary)]

  sequence, width = _sequence_axes(residual), _split_over(residual.width)
  classes, (layout, _) = _split_over(vocabulary), automatic_layout()

  def losses(manual: bool, x, kernel, targets) -> list[jax.Array]:
    if manual and sequence:
      x = collectives.all_gather(x, sequence, SEQUENCE_DIM)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(wide_kernel, x, targets) -> jax.Array:
      logits = jnp.einsum(f"{residual.inside},{inside}->{output}", x, wide_kernel.astype(x.dtype))
      if not manual:
        return reduce(constrain(logits, output), targets, ())
      record(output, (rows, length // chunks, vocabulary_size), layout)
      return reduce(total(logits, width), targets, classes)

    # Cast back in each chunk, so that the scan adds up the chunks' gradients in the wide dtype.
    wide_kernel = kernel.astype(stored)

    def one(_, inputs):
      return None, chunk(wide_kernel, *inputs)

    _, found = jax.lax.scan(one, None, (_strided(x, chunks), _strided(targets, chunks)))
    return [jnp.moveaxis(found, 0, 2).reshape(targets.shape)]

  [out] = _sharded(
    losses,
    [residual.between, weight.letters, residual.tokens],
    [residual.between, inside, residual.tokens],
    [residual.tokens],
    *(x, kernel, targets),
    kernels=[1],
    residual=residual,
    dtype=x.dtype,
  )
  return out


def _strided(x: jax.Array, count: int) -> jax.Array:
  """Returns the tokens r, r + count, ... of each row, for every r below count, in front."""
  rows, length, *rest = x.shape
  return jnp.moveaxis(x.reshape(rows, length // count, count, *rest), 2, 0)


def vocab_parallel_embedding(
  weight: Weight, tokens: jax.Array, residual: Residual, dtype: jnp.dtype
) -> jax.Array:
  """Returns the rows of a table that tokens name; see `table_rows` for the gradient.

  The table is gathered over fsdp before the lookup: a lookup in a table that is split along its
  width as well makes XLA copy the whole batch ("involuntary full rematerialization").

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
    if axes:  # each device adds the rows that it has
      rows = jnp.asarray(table.shape[0], tokens.dtype)
      tokens = tokens - jax.lax.axis_index(axes) * rows
    here = (tokens >= 0) & (tokens < table.shape[0])
    found = table_rows(table, jnp.where(here, tokens, jnp.zeros_like(tokens)), stored)
    own = jnp.where(here[:, :, None], found, jnp.zeros_like(found))
    return [_reduce(own, axes, sequence)]

  axes, sequence = _split_over(vocabulary), _sequence_axes(residual)
  letters = [weight.letters, residual.tokens]
  [out] = _sharded(
    look_up,
    letters,
    letters,
    [residual.between],
    *(table, tokens),
    kernels=[0],
    residual=residual,
    dtype=dtype,
  )
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_rows(table: jax.Array, ids: jax.Array, sum_dtype: jnp.dtype) -> jax.Array:
  """Returns the rows of a table that ids name; its gradient is summed in `sum_dtype`.

  The transpose of a lookup adds up the gradients of all tokens that name the same row. A sum in
  bfloat16 stops growing after some hundred terms of the same size: with text, the table's gradient
  was 14 % wrong at 4,096 tokens on a device. So only the finished sum is rounded.
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


def on_shards(
  function: Callable[..., jax.Array], given: Sequence[str], output: str, *arguments: jax.Array
) -> jax.Array:
  """Runs a function on each device's part of activations, which it needs no other part for.

  Args:
    function: takes shards; devices along mesh axes that split none of the arrays do the same work.
    given: the letters of the arrays.
    output: the letters of the result; only such that are given.
    *arguments: the arrays.
  """
  layout, _ = automatic_layout()
  extents = _extents(given, arguments)
  if on_one_device() or (layout.judging and not _fit([*given, output], extents, layout.table)):
    return function(*arguments)  # why they do not fit was recorded where they were constrained
  in_specs = tuple(_spec(letters, extents, layout.table) for letters in given)
  out_specs = _spec(output, extents, layout.table)
  return manual_region(function, in_specs, out_specs)(*arguments)


def _summed_last(letters: str, summed: str) -> str:
  """Returns the letters of a weight with those that are summed over at the end.

  So the matmul that computes the weight's gradient has its dims in this order, and is reduced over
  devices as it comes. In another order XLA folds the transposition into the matmul, and on CPUs
  has no fast kernel for that (jax 0.10.2: a step of fsdp8 took 8 % longer).
  """
  return "".join(x for x in letters if x not in summed) + summed


def _split_over(letters: str) -> Axes:
  """Returns the axes larger than 1 that split dims inside of a block."""
  layout, sizes = automatic_layout()
  axes = [axis for letter in letters for axis in layout.table[layout.legend[letter].name]]
  return tuple(axis for axis in axes if sizes[axis] > 1)


def _reduce(partial: jax.Array, axes: Axes, extra: Axes) -> jax.Array:
  """Sums over the axes that split summed dims; each device keeps its part of the sequence.

  Args:
    partial: sums, of batch, the sequence inside a block, and width.
    axes: of the summed dims.
    extra: those that split the residual's sequence between blocks alone.
  """
  if not extra:
    return total(partial, axes)
  if axes == extra:
    return collectives.reduce_scatter(partial, axes, SEQUENCE_DIM)
  whole = jax.lax.psum(partial, axes) if axes else partial
  length = whole.shape[SEQUENCE_DIM] // jax.lax.axis_size(extra)
  start = jax.lax.axis_index(extra) * length
  return jax.lax.dynamic_slice_in_dim(whole, start, length, SEQUENCE_DIM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def total(partial: jax.Array, axes: Axes) -> jax.Array:
  """Sums over axes a result that shard_map returns as it is, replicated over them.

  Its gradient is the whole one, the same on all devices. Without check_vma, the transpose of
  shard_map divides the gradient of a replicated result by the number of devices, and the transpose
  of psum, a psum, adds it up again: right, by a collective for nothing. So the gradient is
  multiplied instead. The division is `_shard_map_transpose` in jax 0.10.2 and 0.12.0; JEP 17111
  (docs.jax.dev/en/latest/jep/17111-shmap-transpose.html) explains it. A test tells should it go.
  """
  return jax.lax.psum(partial, axes) if axes else partial


def _total_forward(partial: jax.Array, axes: Axes) -> tuple[jax.Array, None]:
  return total(partial, axes), None


def _total_backward(axes: Axes, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (gradient * jnp.asarray(jax.lax.axis_size(axes), gradient.dtype) if axes else gradient,)


total.defvjp(_total_forward, _total_backward)


def _sharded(
  function: Callable[..., list[jax.Array]],
  given: Sequence[str],
  inside: Sequence[str],
  outputs: Sequence[str],
  *arguments: jax.Array,
  kernels: Sequence[int],
  residual: Residual,
  dtype: jnp.dtype,
) -> list[jax.Array]:
  """Runs a function of sharded arrays: in a shard_map, where a weight or the sequence is gathered.

  What the backward pass keeps are the arguments as they are given and sharded: neither a gathered
  sequence nor gathered, cast or transposed weights of every layer.

  Args:
    function: takes whether it runs in a shard_map, then shards, or whole arrays.
    given: the letters of the arrays.
    inside: the same letters of each, in the order in which the function takes them.
    outputs: the letters of its results.
    *arguments: the arrays.
    kernels: which of them are parameters.
    residual: the residual's letters.
    dtype: that the function takes parameters in.
  """
  layout, _ = automatic_layout()
  extents = _extents(given, arguments)
  between, within = residual.sequences  # the sequence is as long in a block as between blocks
  extents.setdefault(between, extents.get(within, 0))
  extents.setdefault(within, extents[between])
  used = [_spec(letters, extents, layout.table) for letters in inside]
  stored = list(used)
  for number in kernels:
    spec = _spec(inside[number], extents, {**layout.table, **layout.parameters})
    if _gathers(spec, used[number]) is not None:
      stored[number] = spec
  moves = [_gathers(before, after) for before, after in zip(stored, used, strict=True)]
  # Where a dim cannot be split there is no region to trace, and constraints record what is wrong.
  fits = _fit([*inside, *outputs], extents, layout.table) and _fit(
    [inside[number] for number in kernels], extents, {**layout.table, **layout.parameters}
  )

  def on_device(*shards: jax.Array) -> list[jax.Array]:
    return function(True, *map(_gather, shards, moves))

  def product(*arguments: jax.Array) -> list[jax.Array]:
    arguments = [
      jnp.transpose(x.astype(dtype) if number in kernels else x, [old.index(c) for c in new])
      for number, (x, old, new) in enumerate(zip(arguments, given, inside, strict=True))
    ]
    # Split weights too: XLA's partitioner would reduce the gradient that reaches x once for each
    # weight that x is multiplied by; here the sum of them is reduced (as seen on CPUs).
    split = any(_split_over(inside[number]) for number in kernels)
    manual = split or _sequence_axes(residual) or any(moves)
    if not manual or (layout.judging and not fits):
      arguments = [constrain(x, letters) for x, letters in zip(arguments, inside, strict=True)]
      results = function(False, *arguments)
    else:
      for x, letters in zip(arguments, inside, strict=True):
        record(letters, x.shape)
      outs = [_spec(letters, extents, layout.table) for letters in outputs]
      results = manual_region(on_device, tuple(stored), outs)(*arguments)
    return [constrain(x, letters) for x, letters in zip(results, outputs, strict=True)]

  # A new function each time: a traced one would be reused under another activation layout.
  return jax.checkpoint(product, prevent_cse=False)(*arguments)


def _sequence_axes(residual: Residual) -> tuple[str, ...]:
  """Returns the axes larger than 1 that split the residual's sequence and not that in a block."""
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
  """Returns how a table shards an array of these letters; what is wrong, `constrain` raises."""
  layout, sizes = automatic_layout()
  shape = tuple(extents.get(letter) or layout.legend[letter].size for letter in letters)
  return resolve(letters, shape, layout.legend, table, sizes).spec


def _fit(every: Sequence[str], extents: Mapping[str, int], table: Table) -> bool:
  """Tells whether a table can shard arrays of these letters."""
  layout, sizes = automatic_layout()
  shapes = ([extents.get(x) or layout.legend[x].size for x in letters] for letters in every)
  return not any(
    resolve(letters, shape, layout.legend, table, sizes).failures
    for letters, shape in zip(every, shapes, strict=True)
  )


def _gathers(before: PartitionSpec, after: PartitionSpec) -> tuple[tuple[int, Axes], ...] | None:
  """Returns (dim, axes) of each all-gather from one spec to another; None where it takes more.

  Of a dim that two axes split, the inner one can be gathered: the outer one's parts stay in one
  piece.
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


def _gather(shard: jax.Array, moves: Sequence[tuple[int, Axes]]) -> jax.Array:
  """All-gathers a shard; the transpose is a reduce-scatter of the gradient."""
  for dim, axes in moves:
    shard = collectives.all_gather(shard, axes, dim)
  return shard
