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

from models import MODELS
from models.mup import HIDDEN_LAYERS, INPUTS, STACKS, VECTORS
from partitioning.parallel.matrix_groups import Group, Matrix, grouped
from partitioning.rules import letters_of, named_leaves, place_parameters

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
  """The hidden matrices of a config's model.

  Attributes:
    config: finalized.
  """

  config: ConfigDict

  def of(self, names: Iterable[str], *, per_head: bool = False) -> dict[str, Matrix]:
    """Returns name -> its matrices, of those parameters that are hidden kernels.

    Those are the kernels whose dims, STACKS apart, are all hidden ones: each expert's is one. D
    (model) is the input if it comes first of the others, else the output; likewise the dims of
    latent vectors.

    Args:
      names: of parameters.
      per_head: each head is a matrix; else all heads together are one.
    """
    model = MODELS[self.config.model.name]
    legend, rules, found = model.legend(self.config), model.parameters(self.config), {}
    for name in names:
      dims = [(i, legend[letter].name) for i, letter in enumerate(letters_of(name, rules))]
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
    model, tables = MODELS[self.config.model.name], self.config.partitioning
    rules, legend = model.parameters(self.config), model.legend(self.config)
    placements, _ = place_parameters(tree, rules, legend, tables.optimizer, sizes, tables.overrides)
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
    config, model = self.config, MODELS[self.config.model.name]
    legend, rules = model.legend(config), model.parameters(config)
    letters = {name: letters_of(name, rules) for name in names}
    kernels = [
      f"{name} ({', '.join(legend[letter].name for letter in letters[name])})"
      for name in names
      if len(letters[name]) > 1 and not name.endswith(VECTORS)
    ]
    more = f" and {len(kernels) - _MOST_KERNELS} more" if len(kernels) > _MOST_KERNELS else ""
    title = "SOAP" if config.optimizer.name == "soap" else "Muon"
    raise UnfitError(
      f"optimizer.name={config.optimizer.name}: {title} would update 0 of the {len(names)} trained "
      f"parameters of the model {config.model.name}, and its Adam all: {title} takes kernels whose "
      f"dims, {', '.join(STACKS)} apart, are all among {', '.join(_HIDDEN)}. Trained kernels are "
      f"{', '.join(kernels[:_MOST_KERNELS]) or '(none)'}{more}. Give the model's hidden dims these "
      f"names, or choose another optimizer"
    )


def argument(config: ConfigDict) -> dict[str, HiddenMatrices]:
  """Returns the argument of Muon and SOAP that follows from the model."""
  return {"hidden": HiddenMatrices(config)}
