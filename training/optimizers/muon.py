"""Optimizers of hidden matrices, and Muon: momentum whose matrices are orthogonalized.

Which parameters are hidden matrices follows from the letters of the model's parameters, and so does
their sharding. The other parameters get AdamW. Each matrix is whole on one device while it is
orthogonalized.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (the method, its coefficients);
arXiv:2502.16982, sections 2.1 and 2.2 (weight decay, and the update's size, that of AdamW's).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from models.mup import HIDDEN_LAYERS, INPUTS, STACKS, VECTORS
from partitioning.dtypes import wide_dtype
from partitioning.parallel.matrix_groups import MATRIX, Group, Matrix, Move, grouped
from partitioning.parallel.whole_matrices import on_whole_matrices
from partitioning.rules import letters_of, named_leaves, place_parameters
from runtime.printable import few
from training.optimizers.spec import OptimizerSpec, tree_of_names

# Dims of hidden matrices; not those of inputs, outputs and tables.
_HIDDEN = (
  *("model", *HIDDEN_LAYERS, "heads", "kv_heads", "head", "value_head", "key_value_head"),
  *("query_latent", "query_latent_output", "latent", "latent_output", "rotary_key"),
  *("mixer_heads", "mixer_key_heads", "mixer_head", "mixer_value_head", "mixer_channels"),
  *("decay_latent", "gate_latent"),
)
_HEADS = ("heads", "kv_heads", "mixer_heads", "mixer_key_heads")
_MOST_KERNELS = 6  # that a message names


@dataclasses.dataclass(frozen=True)
class HiddenMatrices:
  """The hidden matrices of a model, as an optimizer's spec describes its parameters."""

  spec: OptimizerSpec

  def of(self, names: Iterable[str], *, per_head: bool = False) -> dict[str, Matrix]:
    """Returns name -> its matrices, of those parameters that are hidden kernels.

    Those are the kernels whose dims, STACKS apart, are all hidden ones: each expert's is one. D
    (model) is the input if it comes first of the others, else the output; likewise the dims of
    latent vectors.

    Args:
      names: of parameters.
      per_head: each head is a matrix; else all heads together are one.
    """
    found = {}
    for name in names:
      letters = letters_of(name, self.spec.letters)
      dims = [(i, self.spec.legend[letter].name) for i, letter in enumerate(letters)]
      dims = [(i, dim) for i, dim in dims if dim not in STACKS]
      hidden = all(dim in _HIDDEN for _, dim in dims)
      cut = 1 if dims and dims[0][1] in INPUTS else -1
      sides = dims[:cut], dims[cut:]
      if per_head:
        sides = tuple([one for one in side if one[1] not in _HEADS] for side in sides)
      if hidden and all(sides) and not name.endswith(VECTORS):
        found[name] = Matrix(*(tuple(i for i, _ in side) for side in sides))
    return found

  def specs(self, tree: Any, sizes: Mapping[str, int]) -> dict[str, PartitionSpec]:
    """Returns name -> the sharding of optimizer state of the parameter's shape.

    Args:
      tree: of arrays of the parameters' shapes.
      sizes: mesh axis -> size.
    """
    given = self.spec.letters, self.spec.legend, self.spec.state_table, sizes, self.spec.overrides
    placements, _ = place_parameters(tree, *given)
    return {name: placement.spec for name, placement in placements.items()}

  def groups(
    self, params: Any, matrices: Mapping[str, Matrix], sizes: Mapping[str, int], **how: bool
  ) -> list[Group]:
    """Returns the matrices of some parameters as the devices of a mesh share them.

    Args:
      params: a tree of the trained parameters, arrays or ShapeDtypeStructs.
      matrices: name -> those of a parameter.
      sizes: mesh axis -> size.
      **how: as of `grouped`.
    """
    leaves = named_leaves(params)
    shapes = {name: leaves[name].shape for name in matrices}
    return grouped(shapes, matrices, self.specs(params, sizes), sizes, **how)

  def refuse_none(self, names: Iterable[str]) -> None:
    """Raises ValueError if none of the parameters is a hidden kernel."""
    names = list(names)
    if self.of(names):
      return
    letters = {name: letters_of(name, self.spec.letters) for name in names}
    kernels = [
      f"{name} ({', '.join(self.spec.legend[letter].name for letter in letters[name])})"
      for name in names
      if len(letters[name]) > 1 and not name.endswith(VECTORS)
    ]
    title = "SOAP" if self.spec.name == "soap" else "Muon"
    raise ValueError(
      f"optimizer.name={self.spec.name}: {title} would update 0 of the {len(names)} trained "
      f"parameters of the model {self.spec.model}, and its Adam all: {title} takes kernels whose "
      f"dims, {', '.join(STACKS)} apart, are all among {', '.join(_HIDDEN)}. Trained kernels are "
      f"{few(kernels, _MOST_KERNELS) or '(none)'}. Give the model's hidden dims these "
      f"names, or choose another optimizer"
    )


def of_model(spec: OptimizerSpec) -> dict[str, HiddenMatrices]:
  """Returns the argument of Muon and SOAP that follows from the model."""
  return {"hidden": HiddenMatrices(spec)}


def optax_dimensions(spec: OptimizerSpec) -> dict[str, Any]:
  """Returns the argument of optax's Muon that follows from the model: its dimension numbers.

  Without them it takes arrays of rank 2, and leaves the kernels of stacked layers to Adam.
  """
  hidden = HiddenMatrices(spec)

  def numbers(params: Any) -> Any:
    matrices = hidden.of(named_leaves(params))

    def of(name: str) -> optax.contrib.MuonDimensionNumbers | None:
      matrix = matrices.get(name)
      return matrix and optax.contrib.MuonDimensionNumbers(matrix.rows, matrix.columns)

    return tree_of_names(params, of)

  return {"muon_weight_dimension_numbers": numbers}


def beside_adamw(
  scaled: optax.GradientTransformation,
  label: str,
  matrices: Callable[[Any], Collection[str]],
  learning_rate: optax.ScalarOrSchedule,
  adam: tuple[float, float, float],
  decay: tuple[float, Any],
) -> optax.GradientTransformation:
  """Returns an optimizer of some parameters, and AdamW for all others.

  Args:
    scaled: makes updates of the gradients of those parameters, before decay and learning rate.
    label: of their state.
    matrices: a tree of parameters -> the names of those that it is for.
    learning_rate: of both.
    adam: AdamW's decays of both moments, and its epsilon.
    decay: of both: the weight decay, decoupled, times the learning rate; parameters -> which decay.
  """

  def labels(params: Any) -> Any:
    chosen = matrices(params)
    return tree_of_names(params, lambda name: label if name in chosen else "adamw")

  return optax.chain(
    optax.partition({label: scaled, "adamw": optax.scale_by_adam(*adam)}, labels),
    optax.add_decayed_weights(*decay),
    optax.scale_by_learning_rate(learning_rate),
  )


# ------------------------------ Muon ------------------------------

# Of the quintic iteration: as steep at 0 as possible, while singular values end near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7  # added to the norm of a matrix, which may be 0
UPDATE_RMS = 0.2  # that of AdamW's updates is 0.2 to 0.4


class MuonState(NamedTuple):
  """The sum of the gradients, decayed by `momentum` in each step: a tree of the hidden kernels."""

  momentum: Any


DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Orthogonalization:
  """How matrices are orthogonalized; the fields are arguments of `muon`."""

  hidden: HiddenMatrices
  steps: int
  per_head: bool
  newton_schulz_dtype: str | None

  def __post_init__(self):
    """Raises ValueError for fewer steps than one, and for a dtype that is none of floats."""
    if self.steps < 1:
      raise ValueError(f"optimizer.arguments: steps={self.steps}: at least 1")
    if self._dtype not in DTYPES:
      raise ValueError(
        f"optimizer.arguments: newton_schulz_dtype={self._dtype!r}: one of {', '.join(DTYPES)}"
      )

  @property
  def dtype(self) -> jnp.dtype:
    """Returns that in which matrices are exchanged and iterated; the norm is float32 or wider."""
    return jnp.dtype(self._dtype)

  @property
  def _dtype(self) -> str:
    # float32 and wider parameters of a proof are not rounded; training in bfloat16 is, here too.
    return self.newton_schulz_dtype or self.hidden.spec.compute_dtype

  def matrices(self, params: Any) -> dict[str, Matrix]:
    """Returns name -> its matrices, of the hidden kernels among the parameters."""
    return self.hidden.of(named_leaves(params), per_head=self.per_head)

  def groups(self, params: Any, sizes: Mapping[str, int]) -> list[Group]:
    """Returns the matrices of some parameters as the devices of a mesh share them."""
    return self.hidden.groups(params, self.matrices(params), sizes)

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
  orthogonal = Orthogonalization(hidden, steps, per_head, newton_schulz_dtype)
  scaled, adamw = scale_by_muon(orthogonal, momentum, nesterov), (b1, b2, eps)
  given = orthogonal.matrices, learning_rate, adamw, (weight_decay, mask)
  return beside_adamw(scaled, "muon", *given)


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
