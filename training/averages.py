"""Exponential moving averages of the parameters, kept in the optimizer's state.

So they are placed by `partitioning.optimizer`, saved, resumed and compared between replicas as the
rest of that state is. Only parameters that are trained have one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

FIELD = "averages"  # of the state, and part of the arrays' names in a checkpoint


class Averaged(NamedTuple):
  """The state of an optimizer with averages.

  Attributes:
    count: int32 scalar, the number of updates.
    averages: `key` of a decay -> a tree like the parameters.
    inner: the optimizer's own state.
  """

  count: jax.Array
  averages: Mapping[str, Any]
  inner: Any


def key(decay: float) -> str:
  """Returns a decay as a part of names: `0_999`."""
  return repr(float(decay)).replace(".", "_")


def averaged(
  optimizer: optax.GradientTransformation, decays: Sequence[float]
) -> optax.GradientTransformation:
  """Returns an optimizer that also averages the parameters which its updates lead to.

  After update n, counted from 1, an average moves by 1 - min(decay, n / (n + 9)) of its distance to
  the parameters, so that it forgets the initial ones also in a short run.

  Args:
    optimizer: what updates them.
    decays: between 0 and 1, one for each average.
  """

  def init(params: Any) -> Averaged:
    return Averaged(
      jnp.zeros((), jnp.int32), {key(decay): params for decay in decays}, optimizer.init(params)
    )

  def update(updates: Any, state: Averaged, params: Any = None) -> tuple[Any, Averaged]:
    updates, inner = optimizer.update(updates, state.inner, params)
    after = optax.apply_updates(params, updates)
    count = state.count + 1
    averages = {
      name: _moved(state.averages[name], after, decay, count)
      for name, decay in zip(state.averages, decays, strict=True)
    }
    return updates, Averaged(count, averages, inner)

  return optax.GradientTransformation(init, update)


def _moved(average: Any, params: Any, decay: float, count: jax.Array) -> Any:
  share = 1 - jnp.minimum(decay, count / (count + 9))
  return jax.tree.map(lambda a, p: a + (p - a) * share.astype(a.dtype), average, params)
