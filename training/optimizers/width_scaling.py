"""muP's learning rates: parts of the parameters whose optimizers have rates of their own.

What a parameter's update does to activations grows with the width, unless its rate shrinks; by how
much depends on the optimizer and on which of its dims are widths (`models.mup`). Parts are groups
of parameters with a rate of their own, as those of `optimizer.groups` are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from models import model_spec, mup
from models.mup import VECTORS, Growth, Kind
from partitioning.parallel.matrix_groups import Matrix
from partitioning.rules import letters_of, named_leaves
from training.optimizer import optimizer_row, optimizers_with
from training.optimizer_groups import Make, of_group
from training.optimizers.arguments import parse_arguments
from training.optimizers.hidden_matrices import hidden_matrices
from training.state import split

Rule = Callable[[Growth], float]


def entrywise(growth: Growth) -> float:
  """Returns the rate's factor of optimizers whose updates have elements of one size at all widths.

  Source: arXiv:2203.03466, table 8, "Adam LR"; arXiv:2308.01814 for others than Adam.
  """
  return 1 / growth.inputs if growth.kind is Kind.HIDDEN else 1.0


def by_gradient(growth: Growth) -> float:
  """Returns the rate's factor of SGD. Source: arXiv:2203.03466, table 8, "SGD LR"."""
  if growth.kind is Kind.HIDDEN:
    return growth.outputs / growth.inputs
  return growth.inputs * growth.outputs


# Name in a row of the table of optimizers -> the rate's factor by a parameter's growth alone.
RULES: Mapping[str, Rule] = {"entrywise": entrywise, "by_gradient": by_gradient}
ORTHOGONAL = "orthogonal"  # the rule of hidden matrices; the other parameters have AdamW's


def orthogonal(
  matrix: Matrix, shape: tuple[int, ...], ratios: Sequence[float], growth: Growth
) -> float:
  """Returns the rate's factor of a hidden matrix whose update is 0.2 sqrt(max(A, B)) times U V^T.

  Activations of size 1 change by the update's spectral norm times sqrt(inputs / outputs), which is
  to be the same at all widths; so it falls as the square root of the width, not as the width.
  Source: arXiv:2310.17813, condition 1. Where each head is a matrix, the changes of all heads that
  the residual takes are added up.

  Args:
    matrix: which dims of the parameter are rows (inputs) and columns of a matrix.
    shape: of the parameter.
    ratios: size of each of its dims over that in the base model.
    growth: of the parameter.
  """
  rows, columns = (math.prod(ratios[dim] for dim in dims) for dims in (matrix.rows, matrix.columns))
  sides = [
    (math.prod(shape[dim] for dim in dims), ratio)
    for dims, ratio in ((matrix.rows, rows), (matrix.columns, columns))
  ]
  largest, of_base = max(size for size, _ in sides), max(size / ratio for size, ratio in sides)
  wanted = math.sqrt(columns / rows) * rows / growth.inputs
  return wanted / math.sqrt(largest / of_base)


def scaled(make: Make) -> Make:
  """Returns `make`, with muP's learning rates where `model.base_width` is set.

  Args:
    make: builds the optimizer of a config without groups, for a part of the parameters.
  """

  def of_widths(
    config: ConfigDict, params: Any, decays_all: bool = False
  ) -> optax.GradientTransformation:
    found = parts(config, params)
    if len(found) == 1:
      return make(found[0][0], params, decays_all)
    transforms = {str(i): make(own, part, decays_all) for i, (own, part) in enumerate(found)}
    labels = {name: str(i) for i, (_, part) in enumerate(found) for name in named_leaves(part)}

    def labelled(tree: Any) -> Any:
      names = named_leaves(tree)
      return jax.tree.unflatten(jax.tree.structure(tree), [labels[name] for name in names])

    return optax.partition(transforms, labelled)

  return of_widths


def parts(config: ConfigDict, params: Any) -> list[tuple[ConfigDict, Any]]:
  """Returns parts of the parameters, each with a config that has their learning rate.

  Weight decay, which an optimizer multiplies by the learning rate, is divided by the rate's factor:
  what a step takes off a parameter is the same at all widths. Gradients fall with the width, and so
  does Adam's epsilon. Sources: microsoft/mup; arXiv:2505.01618, table 1.

  Args:
    config: finalized, of an optimizer without groups.
    params: nested dict of arrays or ShapeDtypeStructs.

  Raises:
    ValueError: an optimizer without a rule.
  """
  keys, found = config.optimizer, {}
  widths = mup.widths(config.model)
  if not widths.base_width:
    return [(config, params)]
  if not optimizer_row(keys.name).width_rule:
    raise ValueError(_refusal(config))
  if not widths.differ:
    return [(config, params)]
  for name, changes in _changes(config, params).items():
    found.setdefault(changes, []).append(name)
  result = []
  for changes, names in found.items():
    part, _ = split(params, frozenset(names).__contains__)
    rate, epsilon, *other = changes
    group = {"name": other[0]} if other else {}
    if rate != 1.0:
      group["learning_rate"] = keys.learning_rate * rate
      if not keys.independent_weight_decay:  # which is divided by the learning rate already
        group["weight_decay"] = keys.weight_decay / rate
    if epsilon != 1.0:
      group["epsilon"] = keys.epsilon * epsilon
    result.append((of_group(config, group) if group else config, part))
  return result


def _changes(config: ConfigDict, params: Any) -> dict[str, tuple]:
  """Returns name -> factors of its learning rate and of epsilon, and the optimizer if another."""
  model, named = model_spec(config), optimizer_row(config.optimizer.name).width_rule
  rules, legend = model.parameters, model.legend
  leaves, widths = named_leaves(params), mup.widths(config.model)
  matrices, rule, other = {}, RULES.get(named, entrywise), ()
  if named == ORTHOGONAL:
    hidden, given = hidden_matrices(config), parse_arguments(config.optimizer.arguments)
    matrices, other = hidden.of(leaves, per_head=given.get("per_head", False)), ("adamw",)
  found = {}
  for leaf_name, leaf in leaves.items():
    letters = letters_of(leaf_name, rules)
    growth = widths.growth(letters, legend, vector=leaf_name.endswith(VECTORS))
    epsilon = 1.0 if growth.kind is Kind.FINITE else 1 / widths.ratio
    if leaf_name in matrices:
      ratios = [widths.dim_ratio(legend[letter].name) for letter in letters]
      found[leaf_name] = (orthogonal(matrices[leaf_name], leaf.shape, ratios, growth), epsilon)
    else:
      found[leaf_name] = (rule(growth), epsilon, *other)
  return found


def _refusal(config: ConfigDict) -> str:
  name = config.optimizer.name
  why = optimizer_row(name).without_width_rule
  return (
    f"model.base_width={config.model.base_width}: muP has no rule here for the learning rates of "
    f"optimizer.name={name}{': ' if why else ''}{why}; it has for "
    f"{', '.join(optimizers_with(lambda row: row.width_rule))}. Choose one of these, or set "
    f"model.base_width=0"
  )
