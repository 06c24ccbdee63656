"""Sequence-parallel regions: between the blocks the residual's sequence is split over `tensor`.

Source: arXiv:2205.05198, section 4.2.2. The norms and the residual are kept and computed once, not
`tensor` times: before a block's first products the sequence is gathered, after its last one the
partial sums are scattered over the sequence. XLA's partitioner, given constraints alone, writes an
all-reduce of the whole and a local slice on CPUs and, as seen, on TPUs. So the products that touch
the border are written by hand with `jax.shard_map`; their transposes are the other collective.

Each function is a plain constrained product where no kernel is split and the table gives the
residual (letter R) no axis that the sequence inside of a block (letter T) does not have.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import constrain, current_layout, on_one_device, record
from partitioning.dims import Axes, Table, resolve, spec_entries
from partitioning.parallel import collectives

RESIDUAL, WHOLE = "R", "T"
SEQUENCE_DIM = 1  # of arrays B, R or T, ...


def gathered_products(
  x: jax.Array, kernels: Sequence[jax.Array], equations: Sequence[tuple[str, str]]
) -> list[jax.Array]:
  """Multiplies the residual, gathered over its sequence, by kernels that are split by columns.

  Args:
    x: B R D.
    kernels: cast to the dtype of x.
    equations: for each kernel (its letters, the letters of the product with R as T).

  Returns:
    For each kernel the product over D, as the letters say, constrained by them.
  """

  def products(by_hand: bool, x_BTD: jax.Array, *kernels: jax.Array) -> list[jax.Array]:
    if by_hand and (axes := _extra_axes()):
      x_BTD = collectives.all_gather(x_BTD, axes, SEQUENCE_DIM)
    pairs = zip(turned, equations, kernels, strict=True)
    results = [jnp.einsum(f"BTD,{letters}->{out}", x_BTD, k) for letters, (_, out), k in pairs]
    return [total(result, _split_over("D")) for result in results] if by_hand else results

  turned = [_turned(letters, "D") for letters, _ in equations]
  stored = ["BRD", *(letters for letters, _ in equations)]
  numbers = range(1, len(stored))
  outside = [out for _, out in equations]
  return _product(
    products, stored, ["BRD", *turned], outside, x, *kernels, kernels=numbers, dtype=x.dtype
  )


def product_in_chunks(
  x: jax.Array,
  kernel: jax.Array,
  letters: str,
  targets: jax.Array,
  finish: Callable[[jax.Array, jax.Array, Axes], jax.Array],
  chunks: int,
) -> jax.Array:
  """Multiplies the residual by a kernel, and reduces each token's results before the next ones.

  The kernel is gathered once, and its gradient scattered once; the product of one chunk is there
  at a time, and is computed again in the backward pass. A chunk takes every so many-th token, so
  that each device has a part of it as long as the others'.

  Args:
    x: B R D.
    kernel: as `letters` say, of D and another one; cast to the dtype of x.
    letters: of the kernel.
    targets: B T; of the same length within a device as x, gathered.
    finish: takes products B t V, targets B t and the axes over which V is split by hand; returns
      B t.
    chunks: number; divides the tokens of a device.

  Returns:
    B T.
  """
  turned, stored = _turned(letters, "D"), kernel.dtype
  [last] = turned.replace("D", "")
  rows, length = targets.shape
  logits_shape = rows, length // chunks, kernel.shape[letters.index(last)]

  def product(by_hand: bool, x_BTD, kernel, targets_BT) -> list[jax.Array]:
    if by_hand and (axes := _extra_axes()):
      x_BTD = collectives.all_gather(x_BTD, axes, SEQUENCE_DIM)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(wide_kernel, x_BtD, targets_Bt) -> jax.Array:
      kernel = wide_kernel.astype(x_BtD.dtype)
      logits_BtV = jnp.einsum(f"BTD,{turned}->BT{last}", x_BtD, kernel)
      if not by_hand:
        return finish(constrain(logits_BtV, f"BT{last}"), targets_Bt, ())
      record(f"BT{last}", logits_shape)
      return finish(total(logits_BtV, _split_over("D")), targets_Bt, _split_over(last))

    # Cast back in each chunk, so that the scan adds up the chunks' gradients in the wide dtype.
    wide_kernel = kernel.astype(stored)

    def one(_, inputs):
      return None, chunk(wide_kernel, *inputs)

    _, losses_nBt = jax.lax.scan(one, None, (_strided(x_BTD, chunks), _strided(targets_BT, chunks)))
    return [jnp.moveaxis(losses_nBt, 0, 2).reshape(targets_BT.shape)]

  given, inside = ["BRD", letters, "BT"], ["BRD", turned, "BT"]
  [out_BT] = _product(
    product, given, inside, ["BT"], x, kernel, targets, kernels=[1], dtype=x.dtype
  )
  return out_BT


def _strided(x_BT: jax.Array, count: int) -> jax.Array:
  """Returns the tokens r, r + count, ... of each row, for every r below count, in front."""
  rows, length, *rest = x_BT.shape
  return jnp.moveaxis(x_BT.reshape(rows, length // count, count, *rest), 2, 0)


def scattered_product(x: jax.Array, kernel: jax.Array, letters: str, x_letters: str) -> jax.Array:
  """Multiplies by a kernel that is split by rows; each device gets its part of the sequence.

  Args:
    x: as `x_letters` say, with T.
    kernel: as `letters` say, the last of them D; cast to the dtype of x.
    letters: of the kernel.
    x_letters: of x; those it shares with the kernel are summed over.

  Returns:
    B R D.
  """

  def product(by_hand: bool, x: jax.Array, kernel: jax.Array) -> list[jax.Array]:
    out_BTD = jnp.einsum(f"{x_letters},{turned}->BTD", x, kernel)
    return [_reduce(out_BTD, letters[:-1]) if by_hand else out_BTD]

  turned = _turned(letters, letters[:-1])
  [out_BRD] = _product(
    product,
    [x_letters, letters],
    [x_letters, turned],
    ["BRD"],
    x,
    kernel,
    kernels=[1],
    dtype=x.dtype,
  )
  return out_BRD


def scattered_lookup(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns the rows of the table that tokens name, B R D; see `rows_of` for the gradient.

  The table is gathered over fsdp before the lookup: a lookup in a table that is split over D as
  well makes XLA copy the whole batch ("involuntary full rematerialization").

  Args:
    table_VD: in the dtype in which it is stored.
    tokens_BT: ids below V.
    dtype: of the result, to which the table is cast before it is gathered.
  """
  stored = table_VD.dtype

  def look_up(by_hand: bool, table_VD: jax.Array, tokens_BT: jax.Array) -> list[jax.Array]:
    if not by_hand:
      return [rows_of(table_VD, tokens_BT, stored)]
    if axes := _split_over("V"):  # each device adds the rows that it has
      rows = jnp.asarray(table_VD.shape[0], tokens_BT.dtype)
      tokens_BT = tokens_BT - jax.lax.axis_index(axes) * rows
    here_BT = (tokens_BT >= 0) & (tokens_BT < table_VD.shape[0])
    ids_BT = jnp.where(here_BT, tokens_BT, jnp.zeros_like(tokens_BT))
    found_BTD = rows_of(table_VD, ids_BT, stored)
    return [_reduce(jnp.where(here_BT[:, :, None], found_BTD, jnp.zeros_like(found_BTD)), "V")]

  letters = ["VD", "BT"]
  [out_BRD] = _product(
    look_up, letters, letters, ["BRD"], table_VD, tokens_BT, kernels=[0], dtype=dtype
  )
  return out_BRD


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_of(table: jax.Array, ids: jax.Array, sum_dtype: jnp.dtype) -> jax.Array:
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
  sum_dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
  ids, like = kept
  table = jax.ShapeDtypeStruct(like.shape[:-1], sum_dtype)
  [total] = jax.linear_transpose(lambda table: table[ids], table)(gradient.astype(sum_dtype))
  return total.astype(like.dtype), None


rows_of.defvjp(_rows_forward, _rows_backward)


def on_shards(
  function: Callable[..., jax.Array], given: Sequence[str], outside: str, *arguments: jax.Array
) -> jax.Array:
  """Runs a function on each device's part of activations, which it needs no other part for.

  Args:
    function: takes shards; of what the mesh axes that split nothing here hold, all the same.
    given: the letters of the arrays.
    outside: the letters of the result; only such that are given.
    *arguments: the arrays.
  """
  layout, _ = current_layout()
  extents = _extents(given, arguments)
  if on_one_device() or (
    layout.judging and not _fit([*given, outside], extents, layout.table)
  ):  # Why they do not fit was recorded where they were constrained.
    return function(*arguments)
  ins = tuple(_spec(letters, extents, layout.table) for letters in given)
  out = _spec(outside, extents, layout.table)
  return jax.shard_map(function, in_specs=ins, out_specs=out, check_vma=False)(*arguments)


def _turned(letters: str, summed: str) -> str:
  """Returns the letters of a kernel with those that are summed over at the end.

  So the product that is the kernel's gradient has its dims in this order, and is reduced over
  devices as it comes. In another order XLA folds the transposition into the product, and on CPUs
  has no fast kernel for that (jax 0.10.2: a step of fsdp8 took 8 % longer).
  """
  return "".join(x for x in letters if x not in summed) + summed


def _split_over(letters: str) -> Axes:
  """Returns the axes larger than 1 that split dims inside of a block."""
  layout, sizes = current_layout()
  axes = [axis for letter in letters for axis in layout.table[layout.legend[letter].name]]
  return tuple(axis for axis in axes if sizes[axis] > 1)


def _reduce(partial_BTD: jax.Array, summed: str) -> jax.Array:
  """Sums what the devices have of split dims; each keeps its part of the residual's sequence."""
  axes, extra = _split_over(summed), _extra_axes()
  if not extra:
    return total(partial_BTD, axes)
  if axes == extra:
    return collectives.reduce_scatter(partial_BTD, axes, SEQUENCE_DIM)
  whole_BTD = jax.lax.psum(partial_BTD, axes) if axes else partial_BTD
  length = whole_BTD.shape[SEQUENCE_DIM] // jax.lax.axis_size(extra)
  start = jax.lax.axis_index(extra) * length
  return jax.lax.dynamic_slice_in_dim(whole_BTD, start, length, SEQUENCE_DIM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def total(partial: jax.Array, axes: Axes) -> jax.Array:
  """Sums over axes a result that shard_map returns as it is, whole on each device of them.

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


def _product(
  function: Callable[..., list[jax.Array]],
  given: Sequence[str],
  inside: Sequence[str],
  outside: Sequence[str],
  *arguments: jax.Array,
  kernels: Sequence[int],
  dtype: jnp.dtype,
) -> list[jax.Array]:
  """Runs a function of laid-out arrays: by hand, where a kernel or the sequence is gathered.

  What the backward pass keeps are the arguments as they are given and lie: neither a gathered
  sequence nor gathered, cast or turned kernels of every layer.

  Args:
    function: takes whether it runs by hand, then shards, or whole arrays.
    given: the letters of the arrays.
    inside: the same letters of each, in the order in which the function takes them.
    outside: the letters of its results.
    *arguments: the arrays.
    kernels: which of them are parameters.
    dtype: that the function takes parameters in.
  """
  layout, _ = current_layout()
  extents = _extents(given, arguments)
  lies = [_spec(letters, extents, layout.table) for letters in inside]
  stored = list(lies)
  for number in kernels:
    spec = _spec(inside[number], extents, {**layout.table, **layout.parameters})
    if _gathers(spec, lies[number]) is not None:
      stored[number] = spec
  moves = [_gathers(before, after) for before, after in zip(stored, lies, strict=True)]
  # Where a dim cannot be split there is no region to trace, and constraints record what is wrong.
  fits = _fit([*inside, *outside], extents, layout.table) and _fit(
    [inside[number] for number in kernels], extents, {**layout.table, **layout.parameters}
  )

  def by_hand(*shards: jax.Array) -> list[jax.Array]:
    return function(True, *map(_gather, shards, moves))

  def product(*arguments: jax.Array) -> list[jax.Array]:
    arguments = [
      jnp.transpose(x.astype(dtype) if number in kernels else x, [old.index(c) for c in new])
      for number, (x, old, new) in enumerate(zip(arguments, given, inside, strict=True))
    ]
    # Split kernels too: XLA's partitioner would reduce the gradient that reaches x once for each
    # kernel that x is multiplied by; here the sum of them is reduced (as seen on CPUs).
    split = any(_split_over(inside[number]) for number in kernels)
    manual = split or _extra_axes() or any(moves)
    if not manual or (layout.judging and not fits):
      arguments = [constrain(x, letters) for x, letters in zip(arguments, inside, strict=True)]
      results = function(False, *arguments)
    else:
      # All axes are manual, also those that only carry rows along (data): XLA's partitioner
      # copies the whole batch to every device before a hand-written all-gather or reduce-scatter
      # over some of the axes (as seen on CPUs, jax 0.10.2). Without check_vma: a kernel that is
      # whole on all devices has a product that is too, which the check cannot see behind an
      # all-gather. The parity tests see what it would.
      for x, letters in zip(arguments, inside, strict=True):
        record(letters, x.shape)
      outs = [_spec(letters, extents, layout.table) for letters in outside]
      shard = jax.shard_map(by_hand, in_specs=tuple(stored), out_specs=outs, check_vma=False)
      results = shard(*arguments)
    return [constrain(x, letters) for x, letters in zip(results, outside, strict=True)]

  # A new function each time: a traced one would be reused under another activation layout.
  return jax.checkpoint(product, prevent_cse=False)(*arguments)


def _extra_axes() -> tuple[str, ...]:
  """Returns the axes larger than 1 that split the residual's sequence and not that in a block."""
  layout, sizes = current_layout()
  if RESIDUAL not in layout.legend:
    return ()
  residual, whole = (layout.table[layout.legend[letter].name] for letter in (RESIDUAL, WHOLE))
  return tuple(axis for axis in residual if axis not in whole and sizes[axis] > 1)


def _extents(inside: Sequence[str], arguments: Sequence[jax.Array]) -> dict[str, int]:
  """Returns letter -> size; the sequence is as long in a block as between blocks."""
  extents: dict[str, int] = {}
  for letters, x in zip(inside, arguments, strict=True):
    extents.update(zip(letters, x.shape, strict=True))
  extents.setdefault(RESIDUAL, extents.get(WHOLE, 0))
  extents.setdefault(WHOLE, extents[RESIDUAL])
  return extents


def _spec(letters: str, extents: Mapping[str, int], table: Table) -> PartitionSpec:
  """Returns how an array of these letters lies by a table; what is wrong, `constrain` raises."""
  layout, sizes = current_layout()
  shape = tuple(extents.get(letter) or layout.legend[letter].size for letter in letters)
  return resolve(letters, shape, layout.legend, table, sizes).spec


def _fit(every: Sequence[str], extents: Mapping[str, int], table: Table) -> bool:
  """Tells whether a table can shard arrays of these letters."""
  layout, sizes = current_layout()
  return not any(
    resolve(
      letters,
      [extents.get(x) or layout.legend[x].size for x in letters],
      layout.legend,
      table,
      sizes,
    ).failures
    for letters in every
  )


def _gathers(before: PartitionSpec, after: PartitionSpec) -> tuple[tuple[int, Axes], ...] | None:
  """Returns (dim, axes) of each all-gather from one spec to another; None where it takes more.

  Of a dim that two axes split, the inner one can be gathered: what the outer one holds stays in
  one piece.
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
