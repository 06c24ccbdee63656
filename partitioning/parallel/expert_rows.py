"""Which row of a buffer is which token's, where tokens are in order of their experts.

Rows are moved by gathers only, and a gather's gradient is a gather by the inverse: a scatter of
rows takes the compiler for TPUs 20 times as long (jax 0.10.2).

Names carry their dims: n tokens, k experts of each, A = n k assignments of a token to an expert,
P devices, C rows of a buffer from one device to another, X rows in order of the experts, E the
experts of one device.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from partitioning.dtypes import wide_dtype
from partitioning.parallel import grouped_matmul
from partitioning.parallel.grouped_matmul import Way


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


@dataclasses.dataclass(frozen=True)
class Assignments:
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
  starts_E1 = grouped_matmul.starts(counts_E, how)
  place_X = jnp.arange(grouped_matmul.padded_rows(rows, counts_E.shape[0], how), dtype=jnp.int32)
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
