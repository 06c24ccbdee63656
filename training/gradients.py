"""A step's gradients, composed of functions with one signature, `Gradients`.

`of_loss` gives those of a microbatch, `accumulate` adds up several. `training/microbatches.py` has
those of a schedule of stages, and of sums that are reduced once per step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.losses import Batch, Sums
from partitioning.dtypes import HISTORY, is_history
from training.state import merged, split

# From (rows, differentiated arrays, other parameters, other variables, key) to ((gradients, loss
# sums), other variables afterwards). Arrays are nested dicts; those that are differentiated are the
# trained parameters, float32 or wider, and the histories of delayed scaling, whose gradients are
# magnitudes of the step (`partitioning.dtypes`).
Gradients = Callable[[Batch, Any, Any, Any, jax.Array | None], tuple[tuple[Any, Sums], Any]]
# From (parameters and histories, other variables, rows, key) to (loss sums, variables afterwards).
Loss = Callable[[Any, Any, Batch, jax.Array | None], tuple[Sums, Any]]


def of_loss(loss: Loss, finish: Callable[[Sums], Sums]) -> Gradients:
  """Returns the gradients of the sum `loss`; `finish`, which is linear, is applied to all sums."""

  def gradients(
    batch: Batch, learned: Any, frozen: Any, variables: Any, key: jax.Array | None
  ) -> tuple[tuple[Any, Sums], Any]:
    def summed(learned: Any) -> tuple[jax.Array, tuple[Sums, Any]]:
      sums, after = loss(merged(learned, frozen), variables, batch, key)
      sums = finish(sums)
      return sums["loss"], (sums, after)

    grads, (sums, after) = jax.grad(summed, has_aux=True)(learned)
    _, others = split(after, is_history)
    return (grads, sums), others

  return gradients


def accumulate(gradients: Gradients, count: int) -> Gradients:
  """Returns the sum of the gradients of `count` microbatches; of magnitudes, the largest.

  The variables are carried through the microbatches in order.
  """

  def accumulated(
    batch: Batch, learned: Any, frozen: Any, variables: Any, key: jax.Array | None
  ) -> tuple[tuple[Any, Sums], Any]:
    microbatches = split_rows(batch, count)
    keys = None if key is None else jax.random.split(key, count)

    def add(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
      (total, variables), (microbatch, key) = carry, inputs
      found, variables = gradients(microbatch, learned, frozen, variables, key)
      return (jax.tree.map_with_path(_added, total, found), variables), None

    one, its_key = jax.tree.map(lambda x: x[0], (microbatches, keys))
    shapes, _ = jax.eval_shape(gradients, one, learned, frozen, variables, its_key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, (zeros, variables), (microbatches, keys))[0]

  return gradients if count == 1 else accumulated


def _added(path: tuple, total: jax.Array, one: jax.Array) -> jax.Array:
  return (jnp.maximum if path[-1].key == HISTORY else jnp.add)(total, one)


def split_rows(batch: Batch, count: int) -> dict[str, jax.Array]:
  """Returns microbatches of a batch, [count, rows, ...].

  Row r of the batch belongs to microbatch r % count, so that no row moves between devices.
  """
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), dict(batch)
  )


def each(function: Callable[[jax.Array], jax.Array], sums: Sums) -> Sums:
  """Returns a function of each of the sums; counts, which are integers, stay as they are."""
  counts = {name for name, x in sums.items() if jnp.issubdtype(x.dtype, jnp.integer)}
  return {name: x if name in counts else function(x) for name, x in sums.items()}
