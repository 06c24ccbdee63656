"""Runs a decoder's layers in their order, each stack of them in scans."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from runtime.layer_kinds import is_sparse

# The carry and what one layer is given -> the carry and what the layer returns.
Step = Callable[[Any, Any], tuple[Any, Any]]
STACKS = ("L", "Z")  # letters of stacked layers: of all or those with experts, of those without
# (dense, sparse, times): so many times, first so many dense layers and then so many sparse ones.
Group = tuple[int, int, int]


def order_of(model: Any) -> tuple[Group, ...]:
  """Returns the order of dense and sparse layers; those of a model without experts count as sparse.

  Equal groups that follow each other are one scan, whose code is that of one of them.

  Args:
    model: a spec, or the section `model` of a finalized config.
  """
  dense = not getattr(model, "experts", 0)
  kinds = [dense or is_sparse(model, layer) for layer in range(model.layers)]
  pairs: list[tuple[int, int]] = []
  for sparse, run in itertools.groupby(kinds):
    count = len([*run])
    if not sparse:
      pairs.append((count, 0))
    elif pairs:  # behind dense ones
      pairs[-1] = pairs[-1][0], count
    else:
      pairs.append((0, count))
  return tuple((*pair, len([*same])) for pair, same in itertools.groupby(pairs))


def trip_counts(order: tuple[Group, ...]) -> list[int]:
  """Returns the trip counts of the scans of `over_layers`; that of the most layers comes first."""
  found = []
  for dense, sparse, times in order:
    once = [(count, count) for count in (sparse, dense) if count]
    found += once if times == 1 else [((dense + sparse) * times, times)]
  return [trips for _, trips in sorted(found, key=lambda one: -one[0])]


def over_layers(
  body: Callable[[nnx.Module, Any, Any], tuple[Any, Any]],
  layers: nnx.Module,
  dense_layers: nnx.Module | None,
  order: tuple[Group, ...],
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
  dense_step, dense_stack = _step(body, dense_layers, wrapped)

  def run(group: Group, carry: Any, inputs: tuple) -> tuple[Any, tuple]:
    """Runs a group once."""
    (dense, sparse, times), (of_dense, of_sparse, every) = group, inputs
    first = rest = None
    if dense:
      carry, first = jax.lax.scan(dense_step, carry, (of_dense, _part(every, 0, dense)))
    if sparse == 1 and times > 1:  # the scan's own inputs: a slice of them would be saved for it
      carry, rest = step(carry, (of_sparse, jax.tree.map(lambda x: x[-1], every)))
    elif sparse:
      carry, rest = jax.lax.scan(step, carry, (of_sparse, _part(every, dense)), unroll=unroll)
    return carry, (first, rest)

  found: tuple[list, list] = [], []
  at = [0, 0]
  for group in order:
    dense, sparse, times = group
    ends = at[0] + dense * times, at[1] + sparse * times
    given = (
      _part(dense_stack, at[0], ends[0]),
      _part(stack, at[1], ends[1]),
      _part(every, sum(at), sum(ends)),
    )
    if times == 1:
      carry, results = run(group, carry, given)
    else:
      sizes = dense, sparse if sparse > 1 else 0, dense + sparse
      given = tuple(_in_periods(tree, size, times) for tree, size in zip(given, sizes, strict=True))
      carry, results = jax.lax.scan(functools.partial(run, group), carry, given)
      results = tuple(map(_of_periods, results, sizes[:2]))
    for kept, one, count in zip(found, results, (dense, sparse), strict=True):
      kept.extend([one] if count else [])
    at = [*ends]
  of_dense, of_sparse = (jax.tree.map(lambda *x: jnp.concatenate(x), *one) for one in found)
  return carry, of_sparse, of_dense


def _step(body: Callable, layers: nnx.Module, wrapped: Callable[[Step], Step]) -> tuple[Step, Any]:
  """Returns the body as that of a scan over stacked parameters, and these."""
  graphdef, stack = nnx.split(layers)

  def step(carry, inputs):
    params, one = inputs
    return body(nnx.merge(graphdef, params), carry, one)

  return wrapped(step), stack


def _part(tree: Any, start: int, stop: int | None = None) -> Any:
  return jax.tree.map(lambda x: x[start:stop], tree)


def _in_periods(tree: Any, size: int, times: int) -> Any:
  """Returns stacked arrays with a dim for each period; without one for the 0 or 1 in it."""
  return jax.tree.map(lambda x: x.reshape(times, size, *x.shape[1:]), tree) if size else tree


def _of_periods(tree: Any, size: int) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree) if size else tree
