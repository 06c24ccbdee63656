"""The biases by which routers balance their experts: moved by the step, not by the optimizer.

Source: arXiv:2408.15664 (auxiliary-loss-free load balancing). They are parameters, so that they are
placed, saved, imported and exported as these are; but they have no gradient, no optimizer state
and no weight decay, and are not in the gradient norm.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from models import expert_sums, load_balance
from models.load_balance import COUNTS
from models.spec import EXPERTS
from training.state import merged, split

PARAMETER = f"{EXPERTS}/router/correction"


def without(names: Iterable[str]) -> frozenset[str]:
  """Returns the names of parameters that an optimizer may update, of those that are to be trained.

  Raises:
    ValueError: there are no others than the biases.
  """
  names = frozenset(names)
  if names == {PARAMETER}:
    raise ValueError(
      f"training.trainable selects only {PARAMETER}, which no optimizer updates: it moves by "
      f"training.router_bias_rate, also where it is not selected; select a parameter that has "
      f"gradients, such as {EXPERTS}/router/kernel"
    )
  return names - {PARAMETER}


def moved(params: Any, means: Mapping[str, jax.Array], rate: float) -> Any:
  """Returns the parameters with the biases of the next step.

  Args:
    params: nested dict.
    means: of a step, with the experts' counts over the global batch.
    rate: by which they move; 0: they stay.
  """
  if COUNTS not in means or not rate:
    return params
  bias, others = split(params, PARAMETER.__eq__)
  bias = jax.tree.map(lambda x: load_balance.updated_bias(x, means[COUNTS], rate), bias)
  return merged(bias, others)


def as_metrics(means: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the means of a step, with the experts' shares in place of their counts."""
  found = dict(means)
  counts = found.pop(COUNTS, None)
  return found if counts is None else {**found, **expert_sums.shares(counts)}
