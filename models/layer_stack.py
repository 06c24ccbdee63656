"""Runs a decoder's layers in their order, each stack of them in a scan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

# The carry and what one layer is given -> the carry and what the layer returns.
Step = Callable[[Any, Any], tuple[Any, Any]]
STACKS = ("L", "Z")  # letters of stacked layers: of all or those with experts, of those without


def order_of(config: ConfigDict) -> tuple[int, int]:
  """Returns how many layers the dense stack begins with, and which of the later ones is sparse."""
  model = config.model
  return (model.dense_layers, model.sparse_every) if model.experts else (0, 1)


def over_layers(
  body: Callable[[nnx.Module, Any, Any], tuple[Any, Any]],
  layers: nnx.Module,
  dense_layers: nnx.Module | None,
  order: tuple[int, int],
  carry: Any,
  every: Any,
  *,
  wrapped: Callable[[Step], Step] = lambda step: step,
  unroll: int = 1,
) -> tuple[Any, Any, Any]:
  """Runs all layers, one after another.

  Args:
    body: takes a layer, the carry, and what is this layer's of `every`.
    layers: stacked.
    dense_layers: those of a model with experts that have none, stacked; None: there are none.
    order: of `order_of`.
    carry: what the first layer is given.
    every: a tree of arrays with one entry for each layer, in the order in which they run.
    wrapped: makes of a layer's function another, such as a rematerialized one.
    unroll: layers of an iteration of the scan over `layers`.

  Returns:
    The carry after the last layer; what the layers returned, stacked; what the dense ones did.
  """
  step, stack = _step(body, layers, wrapped)
  if dense_layers is None:
    return *jax.lax.scan(step, carry, (stack, every), unroll=unroll), {}
  dense_step, dense = _step(body, dense_layers, wrapped)
  first, each = order
  found = []
  if first:
    before = _part(dense, 0, first), _part(every, 0, first)
    carry, of_first = jax.lax.scan(dense_step, carry, before)
    found.append(of_first)
  if each == 1:
    given = stack, _part(every, first)
    return *jax.lax.scan(step, carry, given, unroll=unroll), found[0]

  def period(carry, inputs):
    dense, one, every = inputs
    before = dense, _part(every, 0, each - 1)
    carry, of_dense = jax.lax.scan(dense_step, carry, before)
    carry, of_one = step(carry, (one, jax.tree.map(lambda x: x[-1], every)))
    return carry, (of_one, of_dense)

  given = _in_periods(_part(dense, first), each - 1), stack, _in_periods(_part(every, first), each)
  carry, (of_sparse, of_dense) = jax.lax.scan(period, carry, given)
  found.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_dense))
  return carry, of_sparse, jax.tree.map(lambda *x: jnp.concatenate(x), *found)


def _step(body: Callable, layers: nnx.Module, wrapped: Callable[[Step], Step]) -> tuple[Step, Any]:
  """Returns the body as that of a scan over stacked parameters, and these."""
  graphdef, stack = nnx.split(layers)

  def step(carry, inputs):
    params, one = inputs
    return body(nnx.merge(graphdef, params), carry, one)

  return wrapped(step), stack


def _part(tree: Any, start: int, stop: int | None = None) -> Any:
  return jax.tree.map(lambda x: x[start:stop], tree)


def _in_periods(tree: Any, size: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)
