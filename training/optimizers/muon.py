"""Muon: momentum whose matrices are orthogonalized, each whole on one device.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the method, its coefficients);
arXiv:2502.16982, sections 2.1 and 2.2 (weight decay, and the update's size, that of AdamW's).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from partitioning.dtypes import wide_dtype
from partitioning.parallel.matrix_groups import MATRIX, Group, Matrix, Move
from partitioning.parallel.whole_matrices import on_whole_matrices
from partitioning.rules import named_leaves
from training.optimizers.hidden_matrices import HiddenMatrices, beside_adamw

# Of the quintic iteration: as steep at 0 as possible, while singular values end near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7  # added to the norm of a matrix, which may be 0
UPDATE_RMS = 0.2  # that of AdamW's updates is 0.2 to 0.4


class MuonState(NamedTuple):
  """The sum of the gradients, decayed by `momentum` in each step: a tree of the hidden kernels."""

  momentum: Any


@dataclasses.dataclass(frozen=True)
class Orthogonalization:
  """How the matrices are orthogonalized.

  Attributes:
    hidden: which parameters are hidden matrices.
    steps: iterations of Newton-Schulz.
    per_head: each head is a matrix; else all heads together are one.
    dtype: in which matrices are exchanged and iterated; the norm is in float32 or wider.
  """

  hidden: HiddenMatrices
  steps: int
  per_head: bool
  dtype: jnp.dtype

  def matrices(self, params: Any) -> dict[str, Matrix]:
    """Returns name -> its matrices, of the hidden kernels among the parameters."""
    return self.hidden.of(named_leaves(params), per_head=self.per_head)

  def groups(self, params: Any, sizes: Mapping[str, int]) -> list[Group]:
    """Returns the matrices of some parameters as the devices of a mesh share them."""
    return self.hidden.groups(params, sizes, per_head=self.per_head)

  def moves(self, group: Group) -> list[Move]:
    """Returns what an update of a group exchanges."""
    del group  # all alike
    return [Move(MATRIX, 1, 1, "orthogonalized")]

  def computed(self, group: Group) -> tuple[Callable, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns what a device computes of a round of a group, and its arguments."""
    kernels = jax.ShapeDtypeStruct((group.each // group.rounds, *group.shape), self.dtype)
    return lambda x: newton_schulz(x, self.steps), (kernels,)

  def __call__(self, tree: Any) -> Any:
    """Returns a tree with each matrix orthogonalized, and scaled to the RMS of AdamW's updates."""
    leaves, matrices = named_leaves(tree), self.matrices(tree)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    found = on_whole_matrices(
      lambda x: newton_schulz(x, self.steps),
      {name: x.astype(self.dtype) for name, x in leaves.items()},
      matrices,
      self.hidden.specs(tree, sizes),
      sizes,
    )
    scaled = [
      found[name].astype(x.dtype) * (UPDATE_RMS * math.sqrt(max(_sides(x.shape, matrices[name]))))
      for name, x in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), scaled)


def orthogonalization(
  hidden: HiddenMatrices,
  steps: int = 5,
  per_head: bool = False,
  newton_schulz_dtype: str | None = None,
  **others,
) -> Orthogonalization:
  """Returns it as `muon` uses it, of the arguments of `muon`.

  Raises:
    ValueError: fewer steps than one, or a dtype that is none of floats.
  """
  del others
  if steps < 1:
    raise ValueError(f"optimizer.arguments: steps={steps}: at least 1")
  # float32 and wider parameters of a proof are not rounded; training in bfloat16 is, here too.
  dtype = newton_schulz_dtype or hidden.compute_dtype
  if dtype not in DTYPES:
    raise ValueError(
      f"optimizer.arguments: newton_schulz_dtype={dtype!r}: one of {', '.join(DTYPES)}"
    )
  return Orthogonalization(hidden, steps, per_head, jnp.dtype(dtype))


DTYPES = ("bfloat16", "float32", "float64")


def muon(
  learning_rate: optax.ScalarOrSchedule,
  hidden: HiddenMatrices,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  mask: Any = None,
  momentum: float = 0.95,
  nesterov: bool = True,
  steps: int = 5,
  per_head: bool = False,
  newton_schulz_dtype: str | None = None,
) -> optax.GradientTransformation:
  """Returns Muon for the hidden matrices, and AdamW for all other parameters.

  Args:
    learning_rate: of both: the update of a matrix has the RMS of one of AdamW's.
    hidden: which parameters are hidden matrices.
    b1: of AdamW's first moment.
    b2: of AdamW's second moment.
    eps: of AdamW.
    weight_decay: of both, decoupled, times the learning rate.
    mask: parameters -> which of them decay.
    momentum: decay of the sum of gradients.
    nesterov: whether the update is the sum as it will be if the gradient stays.
    steps: iterations of Newton-Schulz.
    per_head: each head is a matrix; else all heads together are one.
    newton_schulz_dtype: None: `training.compute_dtype`.

  Raises:
    ValueError: an argument that cannot be.
  """
  orthogonal = orthogonalization(hidden, steps, per_head, newton_schulz_dtype)
  scaled, adamw = scale_by_muon(orthogonal, momentum, nesterov), {"b1": b1, "b2": b2, "eps": eps}
  decay = {"weight_decay": weight_decay, "mask": mask}
  return beside_adamw(scaled, "muon", orthogonal.matrices, learning_rate, **adamw, **decay)


def scale_by_muon(
  orthogonal: Orthogonalization, momentum: float, nesterov: bool
) -> optax.GradientTransformation:
  """Returns the transformation of gradients of hidden kernels."""

  def init(params: Any) -> MuonState:
    return MuonState(jax.tree.map(jnp.zeros_like, params))

  def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
    del params
    total = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, grads)
    ahead = jax.tree.map(lambda m, g: momentum * m + g, total, grads) if nesterov else total
    return orthogonal(ahead), MuonState(total)

  return optax.GradientTransformation(init, update)


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
  """Returns U S' V^T of matrices U S V^T, the singular values S' being near 1.

  After five steps they are within 0.68 and 1.21, but for those that were less than 0.002 times the
  norm of the matrix.

  Args:
    x: [matrices, rows, columns], no more rows than columns: the products are then the smallest.
    steps: iterations.
  """
  a, b, c = COEFFICIENTS
  dtype, wide = x.dtype, wide_dtype(x.dtype)
  norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(wide)), axis=(1, 2), keepdims=True))
  x = (x.astype(wide) / (norm + _TINY)).astype(dtype)
  for _ in range(steps):
    # Sums in float32: in bfloat16 the coefficients themselves would be rounded.
    gram = jnp.einsum("mij,mkj->mik", x, x)
    square = jnp.einsum("mij,mjk->mik", gram, gram)
    polynomial = (b * gram.astype(wide) + c * square.astype(wide)).astype(dtype)
    product = jnp.einsum("mij,mjk->mik", polynomial, x)
    x = (a * x.astype(wide) + product.astype(wide)).astype(dtype)
  return x


def _sides(shape, matrix) -> tuple[int, int]:
  """Returns how many rows and columns a matrix has."""
  rows, columns = (math.prod(shape[dim] for dim in dims) for dims in (matrix.rows, matrix.columns))
  return rows, columns
