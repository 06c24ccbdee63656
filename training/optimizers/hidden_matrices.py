"""Which parameters are hidden matrices, for optimizers that treat these alone as matrices.

The others get AdamW.

They follow from the letters of the model's parameters, and so does their sharding.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from models import model_spec
from models.mup import HIDDEN_LAYERS, INPUTS, STACKS, VECTORS
from partitioning.dims import Legend, Table
from partitioning.parallel.matrix_groups import Group, Matrix, grouped
from partitioning.rules import Overrides, letters_of, named_leaves, place_parameters

# Dims of hidden matrices; not those of inputs, outputs and tables.
_HIDDEN = (
  *("model", *HIDDEN_LAYERS, "heads", "kv_heads", "head", "value_head", "key_value_head"),
  *("query_latent", "query_latent_output", "latent", "latent_output", "rotary_key"),
)
_HEADS = ("heads", "kv_heads")
_MOST_KERNELS = 6  # that a message names


class UnfitError(ValueError):
  """An optimizer does not fit the model."""


def beside_adamw(
  scaled: optax.GradientTransformation,
  label: str,
  matrices: Callable[[Any], Collection[str]],
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  mask: Any,
) -> optax.GradientTransformation:
  """Returns an optimizer of some parameters, and AdamW for all others.

  Args:
    scaled: makes updates of the gradients of those parameters, before decay and learning rate.
    label: of their state.
    matrices: a tree of parameters -> the names of those that it is for.
    learning_rate: of both.
    b1: of AdamW's first moment.
    b2: of AdamW's second moment.
    eps: of AdamW.
    weight_decay: of both, decoupled, times the learning rate.
    mask: parameters -> which of them decay.
  """

  def labels(params: Any) -> Any:
    chosen = matrices(params)
    found = [label if name in chosen else "adamw" for name in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)

  return optax.chain(
    optax.partition({label: scaled, "adamw": optax.scale_by_adam(b1, b2, eps)}, labels),
    optax.add_decayed_weights(weight_decay, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenMatrices:
  """The hidden matrices of a model.

  Attributes:
    optimizer: the name of the one that treats them as matrices.
    model: its name.
    legend: letter -> Dim, of the model.
    letters: pattern of parameter names -> the letters of their dims.
    table: dim name -> mesh axes, for optimizer state.
    overrides: (name, PartitionSpec entries).
    parameter_dtype: of parameters between steps.
    compute_dtype: of activations and matmuls.
  """

  optimizer: str
  model: str
  legend: Legend
  letters: Mapping[str, str]
  table: Table
  overrides: Overrides
  parameter_dtype: str
  compute_dtype: str

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
      letters = letters_of(name, self.letters)
      dims = [(i, self.legend[letter].name) for i, letter in enumerate(letters)]
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
    given = self.letters, self.legend, self.table, sizes, self.overrides
    placements, _ = place_parameters(tree, *given)
    return {name: placement.spec for name, placement in placements.items()}

  def groups(self, params: Any, sizes: Mapping[str, int], *, per_head: bool = False) -> list[Group]:
    """Returns the matrices as the devices of a mesh share them.

    Args:
      params: a tree of the trained parameters, arrays or ShapeDtypeStructs.
      sizes: mesh axis -> size.
      per_head: as in `of`.
    """
    leaves = named_leaves(params)
    matrices = self.of(leaves, per_head=per_head)
    shapes = {name: leaves[name].shape for name in matrices}
    return grouped(shapes, matrices, self.specs(params, sizes), sizes)

  def refuse_none(self, names: Iterable[str]) -> None:
    """Raises UnfitError if none of the parameters is a hidden kernel."""
    names = list(names)
    if self.of(names):
      return
    letters = {name: letters_of(name, self.letters) for name in names}
    kernels = [
      f"{name} ({', '.join(self.legend[letter].name for letter in letters[name])})"
      for name in names
      if len(letters[name]) > 1 and not name.endswith(VECTORS)
    ]
    more = f" and {len(kernels) - _MOST_KERNELS} more" if len(kernels) > _MOST_KERNELS else ""
    title = "SOAP" if self.optimizer == "soap" else "Muon"
    raise UnfitError(
      f"optimizer.name={self.optimizer}: {title} would update 0 of the {len(names)} trained "
      f"parameters of the model {self.model}, and its Adam all: {title} takes kernels whose "
      f"dims, {', '.join(STACKS)} apart, are all among {', '.join(_HIDDEN)}. Trained kernels are "
      f"{', '.join(kernels[:_MOST_KERNELS]) or '(none)'}{more}. Give the model's hidden dims these "
      f"names, or choose another optimizer"
    )


def hidden_matrices(config: ConfigDict) -> HiddenMatrices:
  """Returns the hidden matrices of a finalized config's model."""
  model, training, tables = model_spec(config), config.training, config.partitioning
  return HiddenMatrices(
    optimizer=config.optimizer.name,
    model=config.model.name,
    legend=model.legend,
    letters=model.parameters,
    table=tables.optimizer,
    overrides=tables.overrides,
    parameter_dtype=training.parameter_dtype,
    compute_dtype=training.compute_dtype,
  )


def argument(config: ConfigDict) -> dict[str, HiddenMatrices]:
  """Returns the argument of Muon and SOAP that follows from the model."""
  return {"hidden": hidden_matrices(config)}
