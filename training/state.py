"""The train state: step, parameters, optimizer state, and nothing hidden."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """All that a run carries from step to step.

  Attributes:
    step: int32 scalar, the number of steps done.
    params: nested dict of parameters.
    optimizer: the optimizer's state, a tree of optax's.
  """

  step: jax.Array
  params: Any
  optimizer: Any
