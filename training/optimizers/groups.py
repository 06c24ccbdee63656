"""Parts of the parameters whose optimizer, learning rate or decay is another.

`optimizer.groups` makes such parts, and so does muP: what a parameter's update does to activations
grows with the width, unless its rate shrinks; by how much depends on the optimizer and on which of
its dims are widths (`models.mup`).
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optax
from etils import epy

from models.mup import VECTORS, Growth, Kind
from partitioning.rules import letters_of, named_leaves
from runtime.suggest import most_similar
from training.optimizer import optimizer_row, optimizers_with
from training.optimizers.spec import REST, OptimizerSpec, Part, parse_arguments, tree_of_names
from training.state import split

with epy.lazy_imports():  # for optimizers of matrices
  from partitioning.parallel import matrix_groups
  from training.optimizers import muon

_NEAR = 3  # names that a message suggests


def parts_by_group(spec: OptimizerSpec, params: Any) -> list[Part]:
  """Returns the parts of `optimizer.groups`: each parameter is of the first with a pattern for it.

  Args:
    spec: with groups.
    params: nested dict of arrays or ShapeDtypeStructs.

  Raises:
    ValueError: patterns that match nothing, and groups that get no parameter.
  """
  patterns = [_patterns(group) for group in spec.groups]
  labels = {name: _label(name, patterns) for name in named_leaves(params)}
  _check_matched(patterns, labels)
  parts = []
  for label in sorted(set(labels.values())):
    group = {} if label == REST else spec.groups[int(label)]
    part, _ = split(params, lambda name, label=label: labels[name] == label)
    parts.append(Part(label, spec.replaced(group), part, "weight_decay" in group))
  return parts


def joined(
  parts: Iterable[tuple[str, Any]], transforms: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
  """Returns an optimizer that updates each parameter by the transformation of its part.

  Args:
    parts: (label, nested dict of parameters).
    transforms: label -> what updates its parameters.
  """
  labels = {name: label for label, part in parts for name in named_leaves(part)}
  return optax.partition(transforms, lambda tree: tree_of_names(tree, labels.__getitem__))


def _patterns(group: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns a group's patterns, of which it may give one alone."""
  given = group["parameters"]
  return (given,) if isinstance(given, str) else tuple(given)


def _label(name: str, patterns: Sequence[tuple[str, ...]]) -> str:
  for number, group in enumerate(patterns):
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in group):
      return str(number)
  return REST


def _check_matched(patterns: Sequence[tuple[str, ...]], labels: Mapping[str, str]) -> None:
  wrong = []
  for number, group in enumerate(patterns, 1):
    missed = [one for one in group if not any(fnmatch.fnmatchcase(name, one) for name in labels)]
    wrong += [
      f"group {number}: {one!r} matches no trained parameter; near are "
      f"{', '.join(most_similar(one, labels, _NEAR))}"
      for one in missed
    ]
    if not missed and str(number - 1) not in labels.values():
      wrong.append(f"group {number}: its parameters are all in groups before it")
  if wrong:
    raise ValueError("\n".join(f"optimizer.groups: {line}" for line in wrong))


# ------------------------------ muP's learning rates ------------------------------


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
RULES: Mapping[str, Callable[[Growth], float]] = {
  "entrywise": entrywise,
  "by_gradient": by_gradient,
}
ORTHOGONAL = "orthogonal"  # the rule of hidden matrices; the other parameters have AdamW's


def orthogonal(
  matrix: "matrix_groups.Matrix",
  shape: tuple[int, ...],
  ratios: Sequence[float],
  growth: Growth,
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


def parts_by_width(spec: OptimizerSpec, params: Any) -> list[tuple[OptimizerSpec, Any]]:
  """Returns parts of the parameters, each with muP's learning rate in what its optimizer follows.

  Weight decay, which an optimizer multiplies by the learning rate, is divided by the rate's factor:
  what a step takes off a parameter is the same at all widths. Gradients fall with the width, and so
  does Adam's epsilon. Sources: microsoft/mup; arXiv:2505.01618, table 1.

  Args:
    spec: of an optimizer without groups; with `model.base_width`.
    params: nested dict of arrays or ShapeDtypeStructs.

  Raises:
    ValueError: an optimizer without a rule.
  """
  if not optimizer_row(spec.name).width_rule:
    raise ValueError(_without_rule(spec))
  if not spec.widths.differ:
    return [(spec, params)]
  names: dict[tuple, list[str]] = {}
  for name, changes in _changes(spec, params).items():
    names.setdefault(changes, []).append(name)
  result = []
  for (rate, epsilon, *other), mine in names.items():
    keys = {"name": other[0]} if other else {}
    if rate != 1.0:
      keys["learning_rate"] = spec.learning_rate * rate
      if not spec.independent_weight_decay:  # which is divided by the learning rate already
        keys["weight_decay"] = spec.weight_decay / rate
    if epsilon != 1.0:
      keys["epsilon"] = spec.epsilon * epsilon
    part, _ = split(params, frozenset(mine).__contains__)
    result.append((spec.replaced(keys), part))
  return result


def _changes(spec: OptimizerSpec, params: Any) -> dict[str, tuple]:
  """Returns name -> factors of its learning rate and of epsilon, and the optimizer if another."""
  named, leaves, widths = optimizer_row(spec.name).width_rule, named_leaves(params), spec.widths
  matrices, rule, other = {}, RULES.get(named, entrywise), ()
  if named == ORTHOGONAL:
    per_head = parse_arguments(spec.arguments).get("per_head", False)
    matrices, other = muon.HiddenMatrices(spec).of(leaves, per_head=per_head), ("adamw",)
  found = {}
  for name, leaf in leaves.items():
    letters = letters_of(name, spec.letters)
    growth = widths.growth(letters, spec.legend, vector=name.endswith(VECTORS))
    epsilon = 1.0 if growth.kind is Kind.FINITE else 1 / widths.ratio
    if name in matrices:
      ratios = [widths.dim_ratio(spec.legend[letter].name) for letter in letters]
      found[name] = (orthogonal(matrices[name], leaf.shape, ratios, growth), epsilon)
    else:
      found[name] = (rule(growth), epsilon, *other)
  return found


def _without_rule(spec: OptimizerSpec) -> str:
  why = optimizer_row(spec.name).without_width_rule
  return (
    f"model.base_width={spec.widths.base_width}: muP has no rule here for the learning rates of "
    f"optimizer.name={spec.name}{': ' if why else ''}{why}; it has for "
    f"{', '.join(optimizers_with(lambda row: row.width_rule))}. Choose one of these, or set "
    f"model.base_width=0"
  )
