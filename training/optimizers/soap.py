"""SOAP: Adam in the eigenbases of Shampoo's preconditioners, matrices whole on one device.

Source: arXiv:2409.11321, algorithms 3 and 4, and section 4 (the first step only makes the bases; a
side that is too large has none).

Of an A x B gradient G, with bases Q_L [A, A] and Q_R [B, B]:

  L = beta L + (1 - beta) G G^T,  R = beta R + (1 - beta) G^T G
  G' = Q_L^T G Q_R,  m = b1 m + (1 - b1) G',  v = b2 v + (1 - b2) G'^2
  update = Q_L (m / (sqrt(v) + eps)) Q_R^T, m and v being bias-corrected

In the first step the bases are the eigenvectors of L and R, and nothing else happens. Every
`precondition_frequency` steps from then on, Q_L becomes the Q of the QR decomposition of L Q_L, and
m is turned into the new bases.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partitioning.dtypes import wide_dtype
from partitioning.parallel.matrix_groups import COLUMNS, MATRIX, ROWS, Group, Matrix, Move
from partitioning.parallel.whole_matrices import Exchange, Stacks, in_rounds
from partitioning.rules import named_leaves
from training.optimizers.muon import HiddenMatrices, beside_adamw
from training.optimizers.spec import tree_of_names

# Of each side: its statistic, its basis.
_SIDES = {ROWS: ("left", "left_basis"), COLUMNS: ("right", "right_basis")}
# float32 matmuls on TPUs would round their arguments to bfloat16.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class SoapState(NamedTuple):
  """A step count, and trees of the hidden kernels, whose leaves are of the kernels' matrices.

  Attributes:
    count: steps so far.
    mu: the first moment of the gradients in the bases.
    nu: the second moment of the gradients in the bases.
    left: [.., rows, rows]: of G G^T; None where there are too many rows.
    right: [.., columns, columns]: of G^T G; likewise.
    left_basis: [.., rows, rows]: eigenvectors of `left`, approximately.
    right_basis: [.., columns, columns]: those of `right`.
  """

  count: jax.Array
  mu: Any
  nu: Any
  left: Any
  right: Any
  left_basis: Any
  right_basis: Any


@dataclasses.dataclass(frozen=True)
class Preconditioning:
  """Which matrices have preconditioners, and how these are computed, by arguments of `soap`."""

  hidden: HiddenMatrices
  b2: float
  precondition_frequency: int
  shampoo_beta: float | None
  max_precondition_dim: int

  def __post_init__(self):
    """Raises ValueError for an argument that cannot be."""
    for name, allowed, good in (
      ("precondition_frequency", "at least 1", self.precondition_frequency >= 1),
      ("shampoo_beta", "at least 0 and below 1", 0 <= self.beta < 1),
      ("max_precondition_dim", "at least 1", self.max_precondition_dim >= 1),
    ):
      if not good:
        raise ValueError(f"optimizer.arguments: {name}={getattr(self, name)}: {allowed}")

  @property
  def beta(self) -> float:
    """Returns the decay of the statistics."""
    return self.b2 if self.shampoo_beta is None else self.shampoo_beta

  def matrices(self, params: Any) -> dict[str, Matrix]:
    """Returns name -> its matrices, of hidden kernels with a preconditioner on some side."""
    leaves = named_leaves(params)
    return {
      name: matrix
      for name, matrix in self.hidden.of(leaves).items()
      if self.sides(leaves[name].shape, matrix)
    }

  def sides(self, shape: tuple[int, ...], matrix: Matrix) -> dict[str, int]:
    """Returns kind -> size of those sides that have a preconditioner."""
    sizes = {
      kind: math.prod(shape[dim] for dim in dims)
      for kind, dims in ((ROWS, matrix.rows), (COLUMNS, matrix.columns))
    }
    return {kind: size for kind, size in sizes.items() if size <= self.max_precondition_dim}

  def groups(self, params: Any, sizes: Mapping[str, int]) -> list[Group]:
    """Returns the matrices of some parameters as the devices of a mesh share them."""
    return self.hidden.groups(params, self.matrices(params), sizes, transpose=False)

  @property
  def dtype(self) -> jnp.dtype:
    """Returns the dtype in which matrices are exchanged."""
    return jnp.dtype(self.hidden.spec.parameter_dtype)

  def moves(self, group: Group) -> list[Move]:
    """Returns what an update of a group exchanges when it refreshes the bases."""
    found = [
      Move(MATRIX, 2, 2, "turned into the bases, and back"),
      Move(MATRIX, 1, 1, "first moments, turned into new bases"),
    ]
    for kind in self._kinds(group):
      found.append(Move(kind, 1, 1, f"bases, and statistics of gradients, of {kind}"))
      found.append(Move(kind, 1, 1, f"statistics, and new bases, of {kind}"))
    return found

  def computed(self, group: Group) -> tuple[Callable, tuple[Any, ...]]:
    """Returns what a device computes of a round of a group without a refresh, and its arguments."""
    count, dtype = group.each // group.rounds, wide_dtype(self.dtype)
    sides = dict(zip((ROWS, COLUMNS), group.shape, strict=True))
    bases = {
      kind: jax.ShapeDtypeStruct((count, sides[kind], sides[kind]), dtype)
      for kind in self._kinds(group)
    }

    def matmuls(x, bases):
      turned = _turned(_turned(x, bases), bases, back=True)
      return turned, [_gram(x, kind) for kind in bases]

    return matmuls, (jax.ShapeDtypeStruct((count, *group.shape), dtype), bases)

  def _kinds(self, group: Group) -> list[str]:
    """Returns the sides of a group's matrices that have a preconditioner."""
    sizes = zip((ROWS, COLUMNS), group.shape, strict=True)
    return [kind for kind, size in sizes if size <= self.max_precondition_dim]


def soap(
  learning_rate: optax.ScalarOrSchedule,
  hidden: HiddenMatrices,
  b1: float = 0.95,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  mask: Any = None,
  precondition_frequency: int = 10,
  shampoo_beta: float | None = None,
  max_precondition_dim: int = 10_000,
) -> optax.GradientTransformation:
  """Returns SOAP for the hidden matrices, and AdamW for all other parameters.

  Args:
    learning_rate: of both.
    hidden: which parameters are hidden matrices.
    b1: of the first moments.
    b2: of the second moments.
    eps: added to the root of the second moments.
    weight_decay: of both, decoupled, times the learning rate.
    mask: parameters -> which of them decay.
    precondition_frequency: steps from one refresh of the bases to the next.
    shampoo_beta: decay of the preconditioners' statistics; None: `b2`.
    max_precondition_dim: a side of a matrix that is larger has no preconditioner; where both are,
      the matrix is AdamW's.

  Raises:
    ValueError: an argument that cannot be.
  """
  how = Preconditioning(hidden, b2, precondition_frequency, shampoo_beta, max_precondition_dim)
  given = how.matrices, learning_rate, (b1, b2, eps), (weight_decay, mask)
  return beside_adamw(scale_by_soap(how, b1, b2, eps), "soap", *given)


def scale_by_soap(
  how: Preconditioning, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
  """Returns the transformation of gradients of hidden kernels."""

  def init(params: Any) -> SoapState:
    leaves, matrices = named_leaves(params), how.matrices(params)

    def squares(kind: str) -> Any:
      return tree_of_names(params, lambda n: _square(leaves[n], matrices[n], how, kind))

    moments = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    sides = [squares(kind) for _ in range(2) for kind in _SIDES]
    return SoapState(jnp.zeros((), jnp.int32), *moments, *sides)

  def update(grads: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
    del params
    matrices, sizes = how.matrices(grads), dict(jax.sharding.get_abstract_mesh().shape)
    arrays = {"gradient": (MATRIX, grads), "mu": (MATRIX, state.mu), "nu": (MATRIX, state.nu)}
    for kind, labels in _SIDES.items():
      arrays |= {label: (kind, getattr(state, label)) for label in labels}
    found = in_rounds(
      functools.partial(_update, how.precondition_frequency, (b1, b2, how.beta), eps),
      {label: (kind, named_leaves(tree)) for label, (kind, tree) in arrays.items()},
      list(arrays),
      how.groups(grads, sizes),
      matrices,
      how.hidden.specs(grads, sizes),
      sizes,
      [state.count],
    )
    trees = {label: tree_of_names(grads, found[label].get) for label in arrays}
    return trees.pop("gradient"), SoapState(state.count + 1, **trees)

  return optax.GradientTransformation(init, update)


def _square(x: jax.Array, matrix: Matrix, how: Preconditioning, kind: str) -> jax.Array | None:
  """Returns the statistic of a side before the first step, or its basis: zeros; None: it has none.

  Bases of zeros make all that the first step would add to the moments zero.
  """
  size = how.sides(x.shape, matrix).get(kind)
  stack = [n for dim, n in enumerate(x.shape) if dim not in (*matrix.rows, *matrix.columns)]
  return jnp.zeros((*stack, size, size), wide_dtype(x.dtype)) if size else None


# ------------------------------ of the matrices of a round ------------------------------


def _update(
  frequency: int,
  betas: tuple[float, float, float],
  eps: float,
  exchange: Exchange,
  state: Stacks,
  count: jax.Array,
) -> Stacks:
  """Returns the update, under the label of the gradient, and the state after it.

  The moments stay where their shards are: the gradient in the bases goes back to them, and what
  Adam makes of it comes to the device that has the bases.
  """
  b1, b2, beta = betas
  state, dtype = dict(state), state["mu"].dtype
  whole = exchange.whole(state["gradient"])
  whole = whole.astype(wide_dtype(whole.dtype))
  sides = {kind: labels for kind, labels in _SIDES.items() if labels[0] in state}
  bases = {kind: exchange.whole(state[basis], kind) for kind, (_, basis) in sides.items()}
  for kind, (statistic, _) in sides.items():
    gram = exchange.back(_gram(whole, kind), kind)
    state[statistic] = beta * state[statistic] + (1 - beta) * gram
  turned = exchange.back(_turned(whole, bases).astype(dtype))
  state["mu"] = b1 * state["mu"] + (1 - b1) * turned
  state["nu"] = b2 * state["nu"] + (1 - b2) * jnp.square(turned)
  # The first step, which makes the bases, is none of Adam's.
  steps = jnp.maximum(count, 1).astype(dtype)
  mean, square = state["mu"] / (1 - b1**steps), state["nu"] / (1 - b2**steps)
  update = exchange.whole(mean / (jnp.sqrt(square) + eps)).astype(whole.dtype)
  update = _turned(update, bases, back=True).astype(state["gradient"].dtype)
  state["gradient"] = exchange.back(update)

  def refreshed(state: Stacks) -> Stacks:
    found = {}
    for kind, (statistic, _) in sides.items():
      found[kind] = _basis(exchange.whole(state[statistic], kind), bases[kind], count)
    mu = _turned(exchange.whole(state["mu"]).astype(whole.dtype), bases, back=True)
    mu = exchange.back(_turned(mu, found).astype(dtype))
    return {
      **state,
      "mu": mu,
      **{basis: exchange.back(found[kind], kind) for kind, (_, basis) in sides.items()},
    }

  return jax.lax.cond(count % frequency == 0, refreshed, lambda state: state, state)


def _gram(x: jax.Array, kind: str) -> jax.Array:
  """Returns G G^T of matrices, or G^T G."""
  return _product("mij,mkj->mik" if kind == ROWS else "mji,mjk->mik", x, x)


def _turned(x: jax.Array, bases: Mapping[str, jax.Array], *, back: bool = False) -> jax.Array:
  """Returns matrices in these bases, or matrices in these bases as they were."""
  if ROWS in bases:
    x = _product("mij,mjk->mik" if back else "mji,mjk->mik", bases[ROWS], x)
  if COLUMNS in bases:
    x = _product("mij,mkj->mik" if back else "mij,mjk->mik", x, bases[COLUMNS])
  return x


def _basis(statistic: jax.Array, basis: jax.Array, count: jax.Array) -> jax.Array:
  """Returns the eigenvectors of statistics in the first step, and better ones later."""
  return jax.lax.cond(
    count == 0, lambda s, q: eigenvectors(s), lambda s, q: iterated(s, q), statistic, basis
  )


def iterated(statistic: jax.Array, basis: jax.Array) -> jax.Array:
  """Returns the Q of the QR decomposition of the statistic times its basis: a power iteration.

  The columns are decomposed in the order of their Rayleigh quotients, the largest first, since a
  column becomes orthogonal to those before it; each stays at its place, where its moments are.

  Args:
    statistic: [matrices, size, size], symmetric.
    basis: [matrices, size, size], orthogonal.
  """
  product = _product("mij,mjk->mik", statistic, basis)
  quotients = jnp.einsum("mij,mij->mj", basis, product)
  order = jnp.argsort(quotients, axis=1, descending=True)
  found, _ = jnp.linalg.qr(jnp.take_along_axis(product, order[:, None], axis=2))
  return jnp.take_along_axis(found, jnp.argsort(order, axis=1)[:, None], axis=2)


def eigenvectors(statistic: jax.Array) -> jax.Array:
  """Returns eigenvectors, and a basis of the null space that rounding does not decide.

  The statistic of one gradient lacks full rank on the longer side of a matrix. Of the null space
  any basis is as good, but which one a decomposition finds depends on the last bits, and with it
  all later steps. So it is made of the projections of unit vectors, which do not.

  Args:
    statistic: [matrices, size, size], symmetric, no eigenvalue below 0.
  """
  size = statistic.shape[-1]
  values, vectors = jnp.linalg.eigh(statistic)
  values, vectors = values[:, ::-1], vectors[:, :, ::-1]  # the largest first
  positive = values > values[:, :1] * (size * jnp.finfo(statistic.dtype).eps)
  kept = jnp.where(positive[:, None], vectors, 0)
  rest = jnp.eye(size, dtype=statistic.dtype)[None] - _product("mij,mkj->mik", kept, kept)
  return jnp.linalg.qr(jnp.where(positive[:, None], vectors, rest))[0]
