"""Collectives for `jax.shard_map` with correct results on every backend.

Between processes, CPUs communicate by gloo. Its reduce-scatter copies a device's result over memory
that it may still be sending: values at the end of the first device's chunk are sometimes wrong,
without an error, more often for larger chunks (jax#40830). It also times out after 30 s, whatever
the configured timeouts (jax#40831). So on gloo each device sends its parts to their owners by an
all-to-all, and the owners sum them: the same number of bytes.

On TPUs the SparseCores' reduce-scatter takes only arrays that they can cut into small equal parts.
XLA makes an all-reduce of any other, twice the bytes and beside no matmul; see `_padding`. It also
does where a device's part of the scattered dim is less than a row of a tile; see `_narrow`; and of
a reduce-scatter over several slices; see `_padded_scatter`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Experimental: no public name tells XLA how an array lies in memory (jax 0.10.2 to 0.12.0).
from jax.experimental.layout import Layout, with_layout_constraint

from partitioning.constraints import slices_of
from partitioning.rules import Axes

_LANES = 128  # numbers in a row of a TPU's tile
# The largest part that SparseCores scatter at once, in tiles of all shards. Of 64 shards 23 tiles
# each were scattered and 29 were not, of 512 shards 3 and not 5 (v5p), of 256 on v6e 3 and not 5
# (libtpu 0.0.42.1; tests/planning/test_aot.py).
_TILES = 1024
_LARGE = 2**20  # numbers of an array whose layout matters; a scatter of less takes microseconds


def all_gather(shard: jax.Array, axes: Axes, dim: int) -> jax.Array:
  """Joins the shards of all devices along the axes; the transpose is `reduce_scatter`."""
  shape = [*shard.shape]
  shape[dim] *= jax.lax.axis_size(axes)
  # Integers have no gradient.
  if _special(shape, dim, axes) and jnp.issubdtype(shard.dtype, jnp.inexact):
    return _gather(shard, axes, dim)
  return jax.lax.all_gather(shard, axes, axis=dim, tiled=True)


def reduce_scatter(partial: jax.Array, axes: Axes, dim: int) -> jax.Array:
  """Sums over the devices, each of which keeps one shard; the transpose is `all_gather`.

  Args:
    partial: a device's partial sum, of the full shape.
    axes: of the mesh; the number of their devices divides the dim.
    dim: the dim that the result is split along.
  """
  if _special(partial.shape, dim, axes):
    return _scatter(partial, axes, dim)
  return jax.lax.psum_scatter(partial, axes, scatter_dimension=dim, tiled=True)


Moves = tuple[tuple[int, Axes], ...]  # (dim, axes) of all-gathers, one after the other


def gather(shard: jax.Array, moves: Moves) -> jax.Array:
  """Joins the shards of all devices along several dims; the transpose is `scatter`."""
  for dim, axes in moves:
    shard = all_gather(shard, axes, dim)
  return shard


def scatter(partial: jax.Array, moves: Moves) -> jax.Array:
  """Sums over the devices, each of which keeps the shard that `gather` would join."""
  for dim, axes in reversed(moves):
    partial = reduce_scatter(partial, axes, dim)
  return partial


def _special(shape: Sequence[int], dim: int, axes: Axes) -> bool:
  """Returns whether some backend does not scatter an array of this shape as asked."""
  shards, slices = jax.lax.axis_size(axes), _slices(axes)
  on_tpus = _padding(shape, dim, shards) is not None or _narrow(shape, dim, shards) or slices > 1
  return jax.distributed.is_initialized() or on_tpus


def _slices(axes: Axes) -> int:
  """Returns how many slices an axis spans; 1 of several axes, which are reduced in one step."""
  return slices_of(axes) if len(axes) == 1 else 1


def _narrow(shape: Sequence[int], dim: int, shards: int) -> bool:
  """Returns whether a shard of the last dim is less than a row of a tile, of a large array.

  XLA for TPUs lays an array out as its matmul has it, often with the last dim along the rows of
  tiles, and scatters none whose shards would be parts of rows: of an MLP's kernel of 14,336 x 4,096
  on 256 devices it made an all-reduce (libtpu 0.0.42.1). With the scattered dim along no row it
  scatters.
  """
  large = math.prod(shape) >= _LARGE
  return large and 1 < len(shape) == dim + 1 and shape[dim] < shards * _LANES


def _padding(shape: Sequence[int], dim: int, shards: int) -> tuple[int, int] | None:
  """Returns (dim, numbers) of zeros with which a TPU scatters an array; None if it needs none.

  The array lies in tiles along its last dim besides the scattered one, and is cut into equal parts
  along it: the tiles of a part have to contain every prime factor of their number. It is padded to
  an even number: of 243 tiles, to which the MLP of Llama 3 70B was padded, v6e made an all-reduce
  over 256 devices, of 256 tiles it makes none (libtpu 0.0.42.1).

  Args:
    shape: of the array.
    dim: the scattered one.
    shards: their number.
  """
  others = [other for other in range(len(shape)) if other != dim]
  if not others:
    return None
  tiles = given = -(-shape[others[-1]] // _LANES)
  while _largest_factor(tiles) > max(3, _TILES // shards) or (tiles != given and tiles % 2):
    tiles += 1
  return None if tiles == given else (others[-1], tiles * _LANES - shape[others[-1]])


@functools.cache
def _largest_factor(number: int) -> int:
  """Returns the largest prime factor of a number."""
  largest, factor = 1, 2
  while number > 1:
    while number % factor == 0:
      largest, number = factor, number // factor
    factor += 1
  return largest


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(shard: jax.Array, axes: Axes, dim: int) -> jax.Array:
  return jax.lax.all_gather(shard, axes, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(partial: jax.Array, axes: Axes, dim: int) -> jax.Array:
  def with_gloo(x: jax.Array) -> jax.Array:
    count, shape = jax.lax.axis_size(axes), x.shape
    x = jax.lax.all_to_all(x, axes, dim, dim, tiled=True)
    return x.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]).sum(dim)

  def otherwise(x: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

  between_cpus = with_gloo if jax.distributed.is_initialized() else otherwise
  on_tpu = functools.partial(_padded_scatter, axes=axes, dim=dim)
  return jax.lax.platform_dependent(partial, cpu=between_cpus, tpu=on_tpu, default=otherwise)


def _padded_scatter(partial: jax.Array, axes: Axes, dim: int) -> jax.Array:
  """Sums and scatters an array of a shape, and in a layout, that TPUs scatter.

  Over an axis of several slices in two steps: within each slice, then what is left between them.
  XLA makes an all-reduce within the slices of it, in a layout that its own copy may pad to eight
  times the bytes (of an MLP's kernel of Llama 3 405B on 2 x 256 devices 13.5 GiB, libtpu 0.0.42.1).
  """
  slices = _slices(axes)
  shape, shards = partial.shape, jax.lax.axis_size(axes) // slices
  if slices > 1:  # a device's parts of all slices together, as the first step leaves them
    split = (slices, shards, shape[dim] // slices // shards)
    parts = partial.reshape(*shape[:dim], *split, *shape[dim + 1 :])
    partial = parts.swapaxes(dim, dim + 1).reshape(shape)
  along, more = _padding(shape, dim, shards) or (0, 0)
  if more:
    partial = jnp.pad(partial, [(0, more if d == along else 0) for d in range(partial.ndim)])
  if _narrow(shape, dim, shards):
    others = (d for d in range(partial.ndim) if d != dim)
    partial = with_layout_constraint(partial, Layout(major_to_minor=(dim, *others)))
  places = np.arange(slices * shards).reshape(slices, shards)
  found = partial
  for groups in (places, places.T) if slices > 1 else (None,):
    groups = None if groups is None else groups.tolist()
    found = jax.lax.psum_scatter(
      found, axes, scatter_dimension=dim, tiled=True, axis_index_groups=groups
    )
  return jax.lax.slice_in_dim(found, 0, shape[along], axis=along) if more else found


def _gather_forward(shard: jax.Array, axes: Axes, dim: int) -> tuple[jax.Array, None]:
  return _gather(shard, axes, dim), None


def _gather_backward(axes: Axes, dim: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (_scatter(gradient, axes, dim),)


def _scatter_forward(partial: jax.Array, axes: Axes, dim: int) -> tuple[jax.Array, None]:
  return _scatter(partial, axes, dim), None


def _scatter_backward(axes: Axes, dim: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (_gather(gradient, axes, dim),)


_gather.defvjp(_gather_forward, _gather_backward)
_scatter.defvjp(_scatter_forward, _scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def total(partial: jax.Array, axes: Axes) -> jax.Array:
  """All-reduces a result that shard_map returns replicated over these axes.

  Its gradient is the full one, the same on all devices. Without check_vma, the transpose of
  shard_map divides the gradient of a replicated result by the number of devices, and the transpose
  of psum, a psum, sums it again: correct, but a needless collective. So the gradient is multiplied
  instead. The division is in `_shard_map_transpose` in jax 0.10.2 and 0.12.0; JEP 17111
  (docs.jax.dev/en/latest/jep/17111-shmap-transpose.html) explains it. A test fails if it goes.
  """
  return jax.lax.psum(partial, axes) if axes else partial


def _total_forward(partial: jax.Array, axes: Axes) -> tuple[jax.Array, None]:
  return total(partial, axes), None


def _total_backward(axes: Axes, _: None, gradient: jax.Array) -> tuple[jax.Array]:
  return (gradient * jnp.asarray(jax.lax.axis_size(axes), gradient.dtype) if axes else gradient,)


total.defvjp(_total_forward, _total_backward)


def in_turn(tree: Any, done: Sequence[jax.Array]) -> Any:
  """Returns floating-point arrays unchanged; on CPUs they depend on those of `done`.

  Two collectives of one kind in a manual region have the same channel, and XLA for CPUs orders
  those of one computation only: one inside a conditional may run at once with one outside of it,
  and then devices meet for different ones (aborts by "Unexpected number of participants", jax
  0.10.2). It drops optimization barriers, so zero times a number of each of `done` is added.

  Args:
    tree: of arrays, the arguments of later collectives.
    done: results of earlier ones, without NaN and infinity; otherwise the tree becomes NaN.
  """
  if not done:
    return tree

  def on_cpu(tree: Any, firsts: list[jax.Array]) -> Any:
    return jax.tree.map(lambda x: x + sum(0 * first.astype(x.dtype) for first in firsts), tree)

  firsts = [x[(0,) * x.ndim] for x in done]
  return jax.lax.platform_dependent(tree, firsts, cpu=on_cpu, default=lambda tree, _: tree)
