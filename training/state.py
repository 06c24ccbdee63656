"""The train state; which of its parameters are trained, and the dtypes of these and the others."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.spec import MTP_LAYERS, QUANTIZED_PARTS, TEACHER
from partitioning.dtypes import wide_dtype
from partitioning.rules import named_leaves, nested
from runtime.layer_kinds import LAYERS, MIXER_LAYERS, MLP_LAYERS, QUANTIZED
from runtime.suggest import most_similar
from training.specs import StepSpec

_NEAR = 3  # names that a message suggests
# The biases by which routers balance their experts: moved by the step, not by the optimizer. They
# are parameters, so that they are placed, saved, imported and exported as these are; but they have
# no gradient, no optimizer state and no weight decay, and are not in the gradient norm.
# Source: arXiv:2408.15664 (auxiliary-loss-free load balancing).
# Of each stack of layers that may have experts, in the order of their counts.
ROUTER_BIASES = tuple(
  f"{stack}experts/router/correction" for stack in (LAYERS, MIXER_LAYERS, MLP_LAYERS, MTP_LAYERS)
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """The state that a run carries from step to step.

  Attributes:
    step: int32 scalar, the number of steps done.
    params: nested dict of parameters.
    optimizer: the optimizer's state, a tree of optax's, of the parameters that are trained.
    variables: nested dict of the model's other NNX variables, which its loss may change in each
      step; replicated. {} if it has none: a checkpoint then has no such arrays.
  """

  step: jax.Array
  params: Any
  optimizer: Any
  variables: Any = dataclasses.field(default_factory=dict)


def trainable(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
  """Returns the names of parameters that any of the patterns matches, and an optimizer may update.

  Args:
    patterns: as in `fnmatch`; `*` matches `/` too.
    names: of all parameters.

  Raises:
    ValueError: a pattern that matches nothing, no patterns, or nothing but routers' biases.
  """
  wrong = [one for one in patterns if not fnmatch.filter(names, one)]
  if wrong or not patterns:
    lines = [
      f"{one!r} matches no parameter; near are {', '.join(most_similar(one, names, _NEAR))}"
      for one in wrong
    ]
    lines = lines or ["no parameter would be trained; ('*',) trains all"]
    raise ValueError("\n".join(f"training.trainable: {line}" for line in lines))
  found = frozenset(name for one in patterns for name in fnmatch.filter(names, one))
  if found <= {*ROUTER_BIASES}:
    raise ValueError(
      f"training.trainable selects only {', '.join(sorted(found))}, which no optimizer updates: it "
      f"moves by training.router_bias_rate, also where it is not selected; select a parameter that "
      f"has gradients, such as {LAYERS}experts/router/kernel"
    )
  return found - {*ROUTER_BIASES}


def stored(params: Any, trained: frozenset[str], spec: StepSpec) -> Any:
  """Returns parameters in the dtypes of the trained and of the other ones.

  The routers' biases are in float32 or wider: their steps are smaller than bfloat16 resolves. What
  quantized kernels are stored as stays as it is; what is frozen beside them is in bfloat16.
  """
  wide_of = wide_dtype(jnp.dtype(spec.parameter_dtype))
  frozen = "bfloat16" if spec.frozen_dtype in QUANTIZED else spec.frozen_dtype

  def dtype(name: str, own: Any) -> Any:
    if name.endswith(QUANTIZED_PARTS):
      return own
    if name in ROUTER_BIASES:
      return wide_of
    return spec.parameter_dtype if name in trained else frozen

  return nested({name: x.astype(dtype(name, x.dtype)) for name, x in named_leaves(params).items()})


def without_teacher(params: Any) -> Any:
  """Returns a tree like the parameters without those of a teacher, which are never saved."""
  return {name: part for name, part in params.items() if name != TEACHER}


def teacher_branch(params: Any) -> Any:
  """Returns the branch that is a teacher's, under its name; {} where there is none."""
  return {name: part for name, part in params.items() if name == TEACHER}


def wide(tree: Any) -> Any:
  """Returns a tree of arrays in float32 or wider."""
  return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def split(tree: Any, chosen: Callable[[str], bool], prefix: str = "") -> tuple[Any, Any]:
  """Returns the leaves of nested dicts whose names are chosen, and the others, as nested dicts.

  A part without leaves is left out.
  """
  ours, others = {}, {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    if not isinstance(value, Mapping):
      (ours if chosen(name) else others)[key] = value
      continue
    for side, part in zip((ours, others), split(value, chosen, f"{name}/"), strict=True):
      if part:
        side[key] = part
  return ours, others


def merged(ours: Any, others: Any) -> Any:
  """Returns the nested dict that `split` was given."""
  # A key on both sides is an inner node: each leaf is on one side.
  both = {key: merged(ours[key], others[key]) for key in ours if key in others}
  return {**ours, **others, **both}
