"""Exact expert parallelism: each token is sent to the devices of its experts, and back.

No token is dropped, whatever the routing, and all shapes are static. Two ways:

- `rounds`: buffers of a fixed capacity between each two devices, and as many all-to-all exchanges
  as the fullest of them needs: the trip count of a loop, the same on all devices. The gradient is
  computed by the same rounds: it sends the tokens again. The capacity bounds the memory and sets
  the speed, never the result.
- `gathered`: tokens of all devices are all-gathered, each device multiplies those of its experts,
  and the results are reduce-scattered. Fewest messages; memory for the worst case.

Gates travel with the tokens and are multiplied where the experts are: their gradient then needs
the experts' results there, and not at the token.

Names carry their dims: n tokens, k experts of each, A = n k assignments of a token to an expert,
P devices, C rows of a buffer from one device to another, X rows in order of the experts, E the
experts of one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from partitioning.dtypes import wide_dtype
from partitioning.parallel import collectives

# ------------------------------ matmuls of groups of rows ------------------------------
# Each group by a kernel of its own, in order of their groups. Two ways, of which each device has
# a best one:
#
# - `tiles`: a loop over tiles of rows, each of one group. Exact FLOPs on every platform.
# - `ragged`: `jax.lax.ragged_dot`. On TPUs it is a grouped kernel; XLA for CPUs and GPUs multiplies
#   all rows by all kernels (jax 0.10.2, 0.12.0). Its weight gradient is multiplied so on TPUs too
#   with jax 0.10.2; there it is the `tgmm` of JAX's megablox (arXiv:2211.15841 for the method).
#
# Rows past the last group belong to nobody. A kernel may leave anything in their results: they are
# masked, both where rows enter a kernel and where they leave it.

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


# ------------------------------ rows in order of their experts ------------------------------
# Rows are moved by gathers only, and a gather's gradient is a gather by the inverse: a scatter of
# rows takes the compiler for TPUs 20 times as long (jax 0.10.2).


class Places(NamedTuple):
  """Where each row comes from: indices, and which of them there are."""

  index: Int[Array, "..."]
  there: Bool[Array, "..."]


class Groups(NamedTuple):
  """The rows of each expert, and the expert of each row.

  Attributes:
    sizes_E: int32, how many rows an expert has.
    expert_X: int32, of each row; E for a row of no expert.
  """

  sizes_E: Int[Array, " E"]
  expert_X: Int[Array, " X"]


class Assignments(NamedTuple):
  """Assignments of tokens to experts, in order of the experts.

  Attributes:
    order_A: which assignment each is, of token `order_A // k`.
    inverse_A: its place in that order.
    starts_E1: the first of each expert, and the number of all.
  """

  order_A: Int[Array, " A"]
  inverse_A: Int[Array, " A"]
  starts_E1: Int[Array, " E+1"]

  @property
  def counts(self) -> Int[Array, " E"]:
    """The assignments of each expert."""
    return jnp.diff(self.starts_E1)


def in_order(experts_A: Int[Array, " A"], experts: int) -> Assignments:
  """Returns assignments in order of the experts; those of others than 0 to `experts` - 1 are last.

  Args:
    experts_A: int32, of each assignment.
    experts: their number.
  """
  number_A = jnp.arange(experts_A.shape[0], dtype=jnp.int32)
  mine_A = (experts_A >= 0) & (experts_A < experts)
  sorted_A, order_A = jax.lax.sort((jnp.where(mine_A, experts_A, experts), number_A), num_keys=1)
  _, inverse_A = jax.lax.sort((order_A, number_A), num_keys=1)
  every_E1 = jnp.arange(experts + 1, dtype=jnp.int32)
  starts_E1 = jnp.searchsorted(sorted_A, every_E1, side="left").astype(jnp.int32)
  return Assignments(order_A, inverse_A, starts_E1)


def group_of(ends_E: Int[Array, " E"], places: Int[Array, "*X"]) -> Int[Array, "*X"]:
  """Returns the group of each place, the number of groups for one past the last."""
  ends = ends_E.reshape((1,) * places.ndim + (-1,))
  return jnp.sum(places[..., None] >= ends, axis=-1, dtype=jnp.int32)


def rows_in_order(
  counts_E: Int[Array, " E"], rows: int, how: Way
) -> tuple[Groups, Int[Array, " X"], Bool[Array, " X"], Int[Array, " E+1"]]:
  """Returns the groups of a buffer, each row's place in its group, whether it is used, the starts.

  Args:
    counts_E: int32, the rows of each expert.
    rows: the most that all together can be.
    how: they are multiplied, which sets where groups start.
  """
  starts_E1 = starts(counts_E, how)
  place_X = jnp.arange(padded_rows(rows, counts_E.shape[0], how), dtype=jnp.int32)
  expert_X = group_of(starts_E1[1:], place_X)
  within_X = place_X - starts_E1[expert_X]
  used_X = within_X < jnp.append(counts_E, 0)[expert_X]
  experts = jnp.asarray(counts_E.shape[0], jnp.int32)
  return Groups(counts_E, jnp.where(used_X, expert_X, experts)), within_X, used_X, starts_E1


def taken(x: jax.Array, places: Places) -> jax.Array:
  """Returns rows of x [R, *D], 0 where there is none: [*places, *D]."""
  index = jnp.where(places.there, places.index, jnp.zeros_like(places.index))
  there = places.there.reshape(*places.there.shape, *(1,) * (x.ndim - 1))
  found = jnp.take(x, index, axis=0, mode="clip")
  return jnp.where(there, found, jnp.zeros_like(found))


@jax.custom_vjp
def spread(x_nD: Float[Array, "n ..."], to_X: Places, back_nk: Places) -> Float[Array, "X ..."]:
  """Returns rows of x in another order, each up to k times; its transpose is `summed`.

  Args:
    x_nD: rows.
    to_X: the row of x that each result is.
    back_nk: the results that each row of x has become.
  """
  del back_nk
  return taken(x_nD, to_X)


@jax.custom_vjp
def summed(y_XD: Float[Array, "X ..."], to_X: Places, back_nk: Places) -> Float[Array, "n ..."]:
  """Returns for each of n rows the sum of its k rows of y; the transpose of `spread`."""
  del to_X
  wide = wide_dtype(y_XD.dtype)
  return jnp.sum(taken(y_XD, back_nk).astype(wide), axis=1).astype(y_XD.dtype)


spread.defvjp(
  lambda x_nD, *places: (spread(x_nD, *places), places),
  lambda places, dy_XD: (summed(dy_XD, *places), None, None),
)
summed.defvjp(
  lambda y_XD, *places: (summed(y_XD, *places), places),
  lambda places, dx_nD: (spread(dx_nD, *places), None, None),
)


# ------------------------------ the exchange ------------------------------

ROUNDS, GATHERED = "rounds", "gathered"
EXCHANGES = (ROUNDS, GATHERED)
_ALIGNED = 8  # rows of a buffer are a multiple of it

# Rows [X, D], weights, their groups, how to multiply -> results [X, D]; rows of no expert are 0.
Experts = Callable[[jax.Array, Any, Groups, Way], jax.Array]


class Exchanged(NamedTuple):
  """What an exchange returns.

  Attributes:
    tokens_nD: the sum over each token's experts of gate times result.
    rounds: float32, the same on all devices: of all-to-all; 0 where nothing is exchanged.
    fullest: float32, likewise: rows of the fullest pair of devices, relative to the mean.
  """

  tokens_nD: Float[Array, "n D"]
  rounds: Float[Array, ""]
  fullest: Float[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
  """How tokens reach their experts.

  Attributes:
    name: one of EXCHANGES.
    axis: of the mesh, along which the experts are split.
    devices: its size, P.
    experts: E, those of one device.
    capacity: rows of a buffer between two devices, relative to the mean.
    compute: multiplies rows by the kernels of their experts.
    way: one of `WAYS`.
    largest_tile: of rows, a power of two.
  """

  name: str
  axis: str
  devices: int
  experts: int
  capacity: float
  compute: Experts
  way: str
  largest_tile: int

  def how(self, rows: int) -> Way:
    """Returns how so many rows are multiplied."""
    return way(self.way, rows, self.experts, self.largest_tile)

  def most(self, rows: int, k: int) -> int:
    """Returns how many assignments of `rows` tokens one device's experts can have."""
    return rows * min(k, self.experts)

  def buffer(self, rows: int, k: int) -> int:
    """Returns C, the rows of the buffer between two devices, each of `rows` tokens."""
    mean = rows * k / self.devices
    aligned = -(-math.ceil(self.capacity * mean) // _ALIGNED) * _ALIGNED
    return min(aligned, self.most(rows, k))


def exchanged(
  exchange: Exchange,
  x_nD: Float[Array, "n D"],
  gates_nk: Float[Array, "n k"],
  experts_nk: Int[Array, "n k"],
  weights: Any,
) -> Exchanged:
  """Returns the sum of each token's experts; inside a region that is manual over all mesh axes.

  Args:
    exchange: how.
    x_nD: the device's tokens.
    gates_nk: of each token's experts, float32 or wider.
    experts_nk: int32, of all devices' experts; those of a token are distinct.
    weights: a tree of arrays, of the device's experts.
  """
  if exchange.devices == 1:
    tokens_nD = _local(exchange, x_nD, gates_nk, experts_nk, weights)
    return Exchanged(tokens_nD, jnp.float32(0), jnp.float32(1))
  order = in_order(experts_nk.reshape(-1), exchange.devices * exchange.experts)
  counts_PE = order.counts.reshape(exchange.devices, exchange.experts)
  # Over all axes: no two devices of the program may differ in the number of rounds.
  axes = tuple(jax.sharding.get_abstract_mesh().axis_names)
  fullest = jax.lax.pmax(jnp.max(jnp.sum(counts_PE, axis=1, dtype=jnp.int32)), axes)
  relative = fullest.astype(jnp.float32) * (exchange.devices / experts_nk.size)
  if exchange.name == GATHERED:
    tokens_nD = _gathered(exchange, x_nD, gates_nk, experts_nk, weights)
    return Exchanged(tokens_nD, jnp.float32(1), relative)
  size = exchange.buffer(*experts_nk.shape)
  rounds = (fullest + size - 1) // size
  plan = _Plan(order, counts_PE, _all_to_all(exchange, counts_PE), rounds)
  tokens_nD = _in_rounds(exchange, x_nD, gates_nk, plan, weights)
  return Exchanged(tokens_nD, rounds.astype(jnp.float32), relative)


# ------------------------------ all tokens of a device, or of all ------------------------------


def _local(exchange: Exchange, x_nD, gates_nk, experts_nk, weights) -> Float[Array, "n D"]:
  """Returns the sum of each token's experts among those of this device, numbered from 0."""
  n, k = experts_nk.shape
  order = in_order(experts_nk.reshape(-1), exchange.experts)
  how = exchange.how(n * k // exchange.devices)
  groups, within_X, used_X, starts_E1 = rows_in_order(order.counts, exchange.most(n, k), how)
  first_X = order.starts_E1[groups.expert_X]
  from_A = Places(order.order_A[jnp.where(used_X, first_X + within_X, 0)], used_X)
  mine_A = (experts_nk >= 0) & (experts_nk < exchange.experts)
  own_nk = jnp.where(mine_A, experts_nk, 0)
  place_nk = order.inverse_A.reshape(n, k) - order.starts_E1[own_nk] + starts_E1[own_nk]
  back_nk, to_X = Places(place_nk, mine_A), Places(from_A.index // k, used_X)
  back_A1 = jax.tree.map(lambda x: x.reshape(-1, 1), back_nk)
  y_XD = exchange.compute(spread(x_nD, to_X, back_nk), weights, groups, how)
  gates_X = spread(gates_nk.reshape(-1), from_A, back_A1)
  return summed(_weighted(y_XD, gates_X), to_X, back_nk)


def _gathered(exchange: Exchange, x_nD, gates_nk, experts_nk, weights) -> Float[Array, "n D"]:
  first = jax.lax.axis_index(exchange.axis).astype(experts_nk.dtype) * exchange.experts
  axes = (exchange.axis,)
  x, gates, chosen = (collectives.all_gather(a, axes, 0) for a in (x_nD, gates_nk, experts_nk))
  return collectives.reduce_scatter(_local(exchange, x, gates, chosen - first, weights), axes, 0)


def _weighted(y_XD, gates_X):
  return (y_XD.astype(gates_X.dtype) * gates_X[:, None]).astype(y_XD.dtype)


# ------------------------------ rounds ------------------------------


class _Plan(NamedTuple):
  """Who sends what; the same in the forward and the backward pass.

  Attributes:
    order: of the device's assignments.
    counts_PE: of them, those to each expert of each device.
    given_PE: assignments that each device sends to each of this one's experts.
    rounds: int32.
  """

  order: Assignments
  counts_PE: Int[Array, "P E"]
  given_PE: Int[Array, "P E"]
  rounds: Int[Array, ""]


def _all_to_all(exchange: Exchange, x: jax.Array) -> jax.Array:
  return jax.lax.all_to_all(x, exchange.axis, 0, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(exchange: Exchange, x_nD, gates_nk, plan: _Plan, weights) -> Float[Array, "n D"]:
  return _rounds_forward(exchange, x_nD, gates_nk, plan, weights)[0]


def _rounds_forward(exchange: Exchange, x_nD, gates_nk, plan: _Plan, weights):
  def one(number, total_nD):
    sent = _Round(exchange, plan, gates_nk.shape, number)
    rows, gates = sent.out(x_nD), sent.out_each(gates_nk)
    y = sent.back(sent.weighted(rows, gates, weights))
    return total_nD + sent.of_tokens(y).astype(total_nD.dtype)

  wide = wide_dtype(x_nD.dtype)
  total_nD = jax.lax.fori_loop(0, plan.rounds, one, jnp.zeros(x_nD.shape, wide))
  return total_nD.astype(x_nD.dtype), (x_nD, gates_nk, plan, weights)


def _rounds_backward(exchange: Exchange, kept, dy_nD):
  x_nD, gates_nk, plan, weights = kept

  def one(number, totals):
    sent = _Round(exchange, plan, gates_nk.shape, number)
    rows, gates = sent.out(x_nD), sent.out_each(gates_nk)
    _, pull = jax.vjp(sent.weighted, rows, gates, weights)
    drows, dgates, dweights = pull(sent.out(dy_nD))
    dx_nD = sent.of_tokens(sent.back(drows))
    dgates_nk = sent.of_each(sent.back(dgates))
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), totals, (dx_nD, dgates_nk, dweights))

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), (x_nD, gates_nk, weights))
  totals = jax.lax.fori_loop(0, plan.rounds, one, zeros)
  dx_nD, dgates_nk, dweights = jax.tree.map(
    lambda total, x: total.astype(x.dtype), totals, (x_nD, gates_nk, weights)
  )
  return dx_nD, dgates_nk, None, dweights


_in_rounds.defvjp(_rounds_forward, _rounds_backward)


class _Round:
  """One all-to-all exchange: its buffers have C rows for each of P devices, flat P C."""

  def __init__(self, exchange: Exchange, plan: _Plan, shape: tuple[int, int], number):
    """Works out who sends which rows in this round, and how the received ones are ordered.

    Args:
      exchange: how.
      plan: for all rounds.
      shape: n and k.
      number: int32, of the round, from 0.
    """
    self._exchange, (n, k) = exchange, shape
    size = exchange.buffer(n, k)
    slot_C = jnp.arange(size, dtype=jnp.int32)
    start = (number * size).astype(jnp.int32)
    # Of the assignments to each device, the place of the first, and their number.
    first_P = plan.order.starts_E1[: -1 : exchange.experts]
    counts_P = jnp.sum(plan.counts_PE, axis=1, dtype=jnp.int32)
    # Sent: slot c is for assignment `start + c` among those to a device.
    place_PC = first_P[:, None] + (start + slot_C)[None]
    there = ((start + slot_C)[None] < counts_P[:, None]).reshape(-1)
    assignment = plan.order.order_A[jnp.where(there, place_PC.reshape(-1), 0)]
    self._assignments, self._tokens = Places(assignment, there), Places(assignment // k, there)
    # Back: of each assignment, the device and the slot.
    device_A = group_of(jnp.cumsum(counts_P, dtype=jnp.int32), plan.order.inverse_A)
    slot_A = plan.order.inverse_A - first_P[device_A] - start
    here_A = (slot_A >= 0) & (slot_A < size)
    places_A = Places(device_A * size + slot_A, here_A)
    self._places_nk = jax.tree.map(lambda x: x.reshape(n, k), places_A)
    self._how = exchange.how(size * exchange.devices)
    received = _received(exchange, plan.given_PE, size, start, self._how)
    self._groups, self._to_X, self._from_X = received

  def out(self, x_nD):
    """Sends tokens to the devices of their experts."""
    return self._sent(x_nD, self._tokens)

  def out_each(self, gates_nk):
    """Sends what each assignment has of its own."""
    return self._sent(gates_nk.reshape(-1), self._assignments)

  def _sent(self, x, places: Places):
    return self.back(taken(x, places))

  def back(self, rows):
    """Sends slots of the buffers to the other device; the same there and back."""
    shape = rows.shape
    buffers = rows.reshape(self._exchange.devices, -1, *shape[1:])
    return _all_to_all(self._exchange, buffers).reshape(shape)

  def weighted(self, rows, gates, weights):
    """Returns gate times the expert's result, of received rows and in their order."""
    ordered, gates_X = (spread(x, self._to_X, self._from_X) for x in (rows, gates))
    y_XD = self._exchange.compute(ordered, weights, self._groups, self._how)
    return summed(_weighted(y_XD, gates_X), self._to_X, self._from_X)

  def of_tokens(self, rows):
    """Returns the sum of each token's rows that came back in this round."""
    wide = wide_dtype(rows.dtype)
    return jnp.sum(taken(rows, self._places_nk).astype(wide), axis=1)

  def of_each(self, rows):
    """Returns each assignment's row that came back in this round, else 0."""
    return taken(rows, self._places_nk)


def _received(
  exchange: Exchange, given_PE, size: int, start, how: Way
) -> tuple[Groups, Places, Places]:
  """Returns how received rows are put in order of the experts: each device's are already.

  Args:
    exchange: how.
    given_PE: of `_Plan`.
    size: C.
    start: of the round, among the assignments from each device.
    how: rows are multiplied.

  Returns:
    The groups; where each row [X] comes from; where each slot [P C, 1] goes to.
  """
  last_PE = jnp.cumsum(given_PE, axis=1, dtype=jnp.int32)
  ends_PE = jnp.clip(last_PE - start, 0, size)
  firsts_PE = jnp.clip(last_PE - given_PE - start, 0, size)
  counts_PE = ends_PE - firsts_PE
  until_PE = jnp.cumsum(
    counts_PE, axis=0, dtype=jnp.int32
  )  # of an expert's rows, with those of earlier devices
  before_PE = until_PE - counts_PE
  most = size * exchange.devices
  groups, within_X, used_X, starts_E1 = rows_in_order(until_PE[-1], most, how)
  expert_X = jnp.where(used_X, groups.expert_X, 0)
  device_X = jnp.sum(within_X[:, None] >= until_PE.T[expert_X], axis=1, dtype=jnp.int32)
  device_X = jnp.where(used_X, device_X, 0)
  slot_X = firsts_PE[device_X, expert_X] + within_X - before_PE[device_X, expert_X]

  slot_C = jnp.arange(size, dtype=jnp.int32)[None]
  expert_PC = jnp.sum(slot_C[..., None] >= ends_PE[:, None], axis=-1, dtype=jnp.int32)
  there_PC = expert_PC < exchange.experts
  expert_PC = jnp.where(there_PC, expert_PC, 0)
  device_P1 = jnp.arange(exchange.devices, dtype=jnp.int32)[:, None]
  earlier_PC = (before_PE - firsts_PE)[device_P1, expert_PC]
  place_PC = starts_E1[expert_PC] + earlier_PC + slot_C
  from_X = Places(place_PC.reshape(-1, 1), there_PC.reshape(-1, 1))
  return groups, Places(device_X * size + slot_X, used_X), from_X
