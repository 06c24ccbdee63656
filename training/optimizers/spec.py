"""What an optimizer follows; `training.specs` resolves it."""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from models.mup import Widths
from partitioning.rules import Legend, Overrides, Table, named_leaves


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerSpec:
  """What an optimizer needs to know of a finalized config.

  A field that is a key of the section `optimizer`, or of `training`, has the key's name.

  Attributes:
    steps: of the run.
    model: its name.
    letters: pattern of parameter names -> the letters of their dims.
    legend: letter -> Dim, of the model.
    widths: of the model, beside those of muP's base model.
    state_table: dim name -> mesh axes, for optimizer state.
    overrides: (name, PartitionSpec entries).
    keys: the names of all keys of the section `optimizer`.
    others: values of those that are no field, such as one that a config file has added.
  """

  name: str
  arguments: str
  learning_rate: float
  schedule: str
  final_fraction: float
  warmup_steps: int
  decay_steps: int
  decay: str
  schedule_changes: Sequence[tuple[int, int, str]]
  beta_1: float
  beta_2: float
  epsilon: float
  momentum: float
  weight_decay: float
  independent_weight_decay: bool
  groups: Sequence[Mapping[str, Any]]
  ema_decays: Sequence[float]
  clip_norm: float
  clip_groups: bool
  clip_quantile: float
  clip_window: int
  state_dtype: str
  seed: int
  steps: int
  parameter_dtype: str
  compute_dtype: str
  model: str
  letters: Mapping[str, str]
  legend: Legend
  widths: Widths
  state_table: Table
  overrides: Overrides
  keys: Sequence[str]
  others: Mapping[str, Any]

  def value(self, key: str) -> Any:
    """Returns the value of a key of the section `optimizer`."""
    return self.others[key] if key in self.others else getattr(self, key)

  @property
  def names(self) -> list[str]:
    """Returns the names of its optimizer and of those of its groups."""
    return list(
      dict.fromkeys([self.name, *(group.get("name", self.name) for group in self.groups)])
    )

  def replaced(self, group: Mapping[str, Any]) -> "OptimizerSpec":
    """Returns what a group's optimizer follows: its keys have replaced those of `optimizer`.

    Another optimizer has none of the arguments of this one.
    """
    own = {key: value for key, value in group.items() if key != "parameters"}
    if own.get("name", self.name) != self.name:
      own = {"arguments": "", **own}
    others = {key: own.pop(key) for key in self.others if key in own}
    return dataclasses.replace(self, **{"groups": (), **own, "others": {**self.others, **others}})


REST = "rest"  # label of the parameters in no group


@dataclasses.dataclass(frozen=True)
class Part:
  """Parameters that are updated alike.

  Attributes:
    label: of its state: the number of its group, counted from 0, or `REST`.
    spec: what its optimizer follows; it has no groups.
    params: nested dict of its parameters.
    decays_all: whether weight decay is for all of them, scales and biases included.
  """

  label: str
  spec: OptimizerSpec
  params: Any
  decays_all: bool = False


def parse_arguments(text: str) -> dict[str, Any]:
  """Returns name -> value of `b1=0.9,nesterov=True,mu_dtype=bfloat16`, as in a call in Python.

  Raises:
    ValueError: the text is not of this form.
  """
  try:
    call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
      raise ValueError(text)
    if any(word.arg is None for word in call.keywords):
      raise ValueError(text)
    return {
      word.arg: word.value.id if isinstance(word.value, ast.Name) else ast.literal_eval(word.value)
      for word in call.keywords
    }
  except (ValueError, SyntaxError) as error:
    raise ValueError(
      f"optimizer.arguments={text!r}: give name=value,name=value, such as b1=0.9,nesterov=True"
    ) from error


def tree_of_names(tree: Any, of: Callable[[str], Any]) -> Any:
  """Returns a tree of the same structure whose leaves are what a function says of their names."""
  return jax.tree.unflatten(jax.tree.structure(tree), [of(name) for name in named_leaves(tree)])
