"""Matmuls of groups of rows, each group by a kernel of its own, with their gradients.

The rows are in order of their groups. Three ways, of which each device has a best one:

- `tiles`: a loop over tiles of rows, each of one group. Exact FLOPs on every platform.
- `ragged`: `jax.lax.ragged_dot`. On TPUs it is a grouped kernel; XLA for CPUs and GPUs multiplies
  all rows by all kernels (jax 0.10.2, 0.12.0). Its weight gradient is multiplied so on TPUs too
  with jax 0.10.2; there it is the `tgmm` of JAX's megablox (arXiv:2211.15841 for the method).

Rows past the last group belong to nobody. A kernel may leave anything in their results: they are
masked, both where rows enter a kernel and where they leave it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from partitioning.dtypes import wide_dtype

TILES, RAGGED = "tiles", "ragged"
WAYS = (TILES, RAGGED)
# jax versions whose compiler for TPUs has a grouped kernel for the weight gradient of ragged_dot.
_GROUPED_GRADIENT = (0, 12)
_MEGABLOX_TILES = (512, 512, 512)  # rows, inputs, outputs; fewer where a dim is smaller
_LANES = 128


@dataclasses.dataclass(frozen=True)
class Way:
  """How groups of rows are multiplied.

  Attributes:
    name: one of WAYS.
    tile: rows of a tile; each group starts at a multiple of it. 1 for `ragged`.
    interpret: run Pallas kernels by their interpreter, and on all platforms: for tests.
  """

  name: str
  tile: int = 1
  interpret: bool = False


def way(name: str, rows: int, groups: int, most: int) -> Way:
  """Returns how to multiply, with tiles that fit groups of about the mean size.

  Args:
    name: one of WAYS.
    rows: of all groups together.
    groups: their number.
    most: the largest tile, a power of two.
  """
  if name == RAGGED:
    return Way(RAGGED)
  tile = 8
  while tile < most and 2 * tile * groups <= rows:
    tile *= 2
  return Way(TILES, tile)


def padded_rows(rows: int, groups: int, how: Way) -> int:
  """Returns the rows of a buffer that has space for `rows` rows in groups of any sizes."""
  if how.tile == 1:
    return rows
  most = min(groups, rows)  # groups that are not empty, each with a tile that is not full
  return -(-rows // how.tile) * how.tile + most * how.tile


def starts(sizes_E: Int[Array, " E"], how: Way) -> Int[Array, " E+1"]:
  """Returns the first row of each group in the buffer, and the end of the last."""
  ends_E = _tiles_of(sizes_E, how.tile) * how.tile
  return jnp.concatenate([jnp.zeros((1,), jnp.int32), ends_E])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
  x_XA: Float[Array, "X A"],
  kernels_EAB: Float[Array, "E A B"],
  sizes_E: Int[Array, " E"],
  how: Way,
) -> Float[Array, "X B"]:
  """Returns each row times the kernel of its group; rows of no group give 0.

  Args:
    x_XA: rows; group g has those from `starts(sizes_E, how)[g]` on. Of rows that belong to no
      group, only those between two groups have to be finite.
    kernels_EAB: of the groups, in the dtype of the rows.
    sizes_E: int32, rows of each group.
    how: the way; it sets where groups start.
  """
  return _product(x_XA, kernels_EAB, sizes_E, how, transposed=False)


def _forward(x_XA, kernels_EAB, sizes_E, how: Way):
  return grouped_matmul(x_XA, kernels_EAB, sizes_E, how), (x_XA, kernels_EAB, sizes_E)


def _backward(how: Way, kept, dy_XB):
  x_XA, kernels_EAB, sizes_E = kept
  dx_XA = _product(dy_XB, kernels_EAB, sizes_E, how, transposed=True)
  return dx_XA, _weight_gradient(x_XA, dy_XB, sizes_E, how).astype(kernels_EAB.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _product(x_XA, kernels_EAB, sizes_E, how: Way, *, transposed: bool):
  """Returns the products of rows and kernels, or of rows and transposed kernels."""
  if how.name == TILES:
    return _tile_product(x_XA, kernels_EAB, sizes_E, how.tile, transposed=transposed)
  used_X1 = _used(x_XA.shape[0], sizes_E)
  kernels = jnp.swapaxes(kernels_EAB, 1, 2) if transposed else kernels_EAB
  y = jax.lax.ragged_dot(jnp.where(used_X1, x_XA, jnp.zeros_like(x_XA)), kernels, sizes_E)
  return jnp.where(used_X1, y, jnp.zeros_like(y))


def _used(rows: int, sizes_E):
  """Returns which rows belong to a group, where groups follow each other without gaps."""
  return (jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes_E, dtype=jnp.int32))[:, None]


def _tiles_of(sizes_E, tile: int):
  """Returns the tile after each group's last."""
  return jnp.cumsum((sizes_E + (tile - 1)) // tile, dtype=jnp.int32)


def _tile_product(x_XA, kernels_EAB, sizes_E, tile: int, *, transposed: bool):
  ends_E = _tiles_of(sizes_E, tile)
  contracted = (((1,), (1 if transposed else 0,)), ((), ()))
  outputs = kernels_EAB.shape[1 if transposed else 2]

  def multiply(number, y):
    group = jnp.searchsorted(ends_E, number, side="right")
    kernel = jax.lax.dynamic_index_in_dim(kernels_EAB, group, keepdims=False)
    rows = jax.lax.dynamic_slice_in_dim(x_XA, number * tile, tile)
    product = jax.lax.dot_general(rows, kernel, contracted)
    return jax.lax.dynamic_update_slice_in_dim(y, product, number * tile, 0)

  first = jnp.zeros((x_XA.shape[0], outputs), x_XA.dtype)
  return jax.lax.fori_loop(0, ends_E[-1], multiply, first)


def _weight_gradient(x_XA, dy_XB, sizes_E, how: Way):
  """Returns the gradient of the kernels, added up in float32 or wider."""
  wide = wide_dtype(x_XA.dtype)
  if how.name == TILES:
    return _tile_weight_gradient(x_XA, dy_XB, sizes_E, how.tile, wide)
  used_X1 = _used(x_XA.shape[0], sizes_E)
  x_XA, dy_XB = (jnp.where(used_X1, rows, jnp.zeros_like(rows)) for rows in (x_XA, dy_XB))
  if how.interpret:
    return _megablox(x_XA, dy_XB, sizes_E, interpret=True)
  version = tuple(int(part) for part in jax.__version__.split(".")[:2])
  if version >= _GROUPED_GRADIENT or wide != jnp.float32:
    return _ragged_weight_gradient(x_XA, dy_XB, sizes_E)
  return jax.lax.platform_dependent(
    *(x_XA, dy_XB, sizes_E), tpu=_megablox, default=_ragged_weight_gradient
  )


def _tile_weight_gradient(x_XA, dy_XB, sizes_E, tile: int, wide):
  ends_E = _tiles_of(sizes_E, tile)
  rows = (((0,), (0,)), ((), ()))

  def add(number, total_EAB):
    group = jnp.searchsorted(ends_E, number, side="right")
    x, dy = (jax.lax.dynamic_slice_in_dim(x, number * tile, tile) for x in (x_XA, dy_XB))
    product = jax.lax.dot_general(x, dy, rows, preferred_element_type=wide)
    return total_EAB.at[group].add(product)

  shape = (sizes_E.shape[0], x_XA.shape[1], dy_XB.shape[1])
  return jax.lax.fori_loop(0, ends_E[-1], add, jnp.zeros(shape, wide))


def _ragged_weight_gradient(x_XA, dy_XB, sizes_E):
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
  )
  wide = wide_dtype(x_XA.dtype)
  return jax.lax.ragged_dot_general(x_XA, dy_XB, sizes_E, dims, preferred_element_type=wide)


def _megablox(x_XA, dy_XB, sizes_E, *, interpret: bool = False):
  """Returns the weight gradient by megablox, which takes only full tiles of rows."""
  # Here: importing Pallas for TPUs takes a while, and other platforms do without.
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  tiles = [
    min(most, -(-size // _LANES) * _LANES)
    for most, size in zip(_MEGABLOX_TILES, (*x_XA.shape, dy_XB.shape[1]), strict=True)
  ]
  more = -x_XA.shape[0] % tiles[0]
  x_XA, dy_XB = (jnp.pad(rows, ((0, more), (0, 0))) for rows in (x_XA, dy_XB))
  arguments = x_XA.swapaxes(0, 1), dy_XB, sizes_E, jnp.float32, tuple(tiles)
  # The library relies on implicit promotion, which is off in the tests.
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    return tgmm(*arguments, interpret=interpret)
