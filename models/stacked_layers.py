"""Runs stacked layers: of complete rows, or of tokens that follow those in a cache.

Where pipeline stages split the layers, and no schedule runs, one stage after another.
Names carry their dims: `x_BRD` is batch, residual sequence, width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models import activations
from models.kv_cache import (
  Cache,
  LatentCache,
  cache_layer,
  of_layers,
  per_layer,
  set_cache_layer,
)
from models.layer_stack import over_layers
from models.rematerialization import rematerialized
from models.spec import RESIDUAL
from models.token_positions import Rows
from partitioning.parallel import pipeline_relay

_LAYERS = "L"  # the letter of the dim of stacked layers


def blocks(
  model: Any,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  key: Key[Array, ""] | None,
  *,
  start: int,
  stop: int | None,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Returns what `Transformer.blocks` does, of a `Transformer`; arguments as there."""
  graphdef, stack = nnx.split(model.layers)
  stages = pipeline_relay.stages(_LAYERS)
  if stages == 1:
    return _run(model, graphdef, stack, x_BRD, rows, key, start, stop, first)
  count = model.spec.layers // stages

  def of_stage(stack: Any, x_BRD: Array, given: Any, stage: Int[Array, ""]) -> tuple:
    rows, key = given
    with activations.recording():  # of one stage: not those of all layers
      return _run(model, graphdef, stack, x_BRD, rows, key, 0, None, stage * count)

  return pipeline_relay.relayed(of_stage, stack, x_BRD, (rows, key), RESIDUAL.between)


def _run(
  model: Any,
  graphdef: nnx.GraphDef,
  stack: Any,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  key: Key[Array, ""] | None,
  start: int,
  stop: int | None,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Runs stacked layers start to stop - 1, of which number 0 is number `first` of the model."""
  keys = None if key is None else jax.random.split(key, model.spec.layers)
  every = (model.layer_pattern.stacked(), keys)
  if model.dense_layers is None:
    stop = jax.tree.leaves(stack)[0].shape[0] if stop is None else stop
    if stop - start < model.spec.layers:
      every = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, first + start, stop - start), every
      )
      stack = jax.tree.map(lambda x: x[start:stop], stack)
  else:
    assert (start, stop) == (0, None), "layers of two stacks are run together"

  def layer(block, x_BRD, one):
    with activations.layer() as recorded:
      x_BRD, _, numbers = block(x_BRD, *one, rows)
    return x_BRD, (numbers, recorded)

  x_BRD, found, of_dense = over_layers(
    layer,
    nnx.merge(graphdef, stack),
    model.dense_layers,
    model.layer_order,
    x_BRD,
    every,
    wrapped=lambda step: rematerialized(
      step, model.spec.rematerialization, reshard=model.spec.reshard_after_forward
    ),
    unroll=model.spec.scan_unroll,
  )
  if of_dense:
    activations.record_layers(of_dense[1], activations.DENSE)
  activations.record_layers(found[1])
  return x_BRD, found[0]


def extended(
  model: Any, x_BRD: Float[Array, "B R D"], rows: Rows, cache: Cache | LatentCache
) -> tuple[Float[Array, "B R D"], Cache | LatentCache]:
  """Returns the residual after all layers of a `Transformer`, and the cache with the tokens.

  Args:
    model: the decoder.
    x_BRD: of the tokens that follow those in the cache.
    rows: their slots and positions.
    cache: of all layers.
  """
  graphdef, stack = nnx.split(model.layers)
  stages = pipeline_relay.stages(_LAYERS)
  count = model.spec.layers // stages

  def of_stage(stacked: Any, x_BRD: Array, given: Any, stage: Int[Array, ""] | int) -> tuple:
    (stack, arrays), (rows, lengths_B) = stacked, given
    cache = of_layers(arrays, lengths_B)
    return _extended(model, nnx.merge(graphdef, stack), x_BRD, rows, cache, stage * count)

  given = (stack, per_layer(cache)), x_BRD, (rows, cache.lengths)
  if stages == 1:
    x_BRD, arrays = of_stage(*given, 0)
  else:
    x_BRD, arrays = pipeline_relay.relayed(of_stage, *given, RESIDUAL.between)
  return x_BRD, dataclasses.replace(cache, **arrays)


def _extended(
  model: Any,
  layers: nnx.Module,
  x_BRD: Float[Array, "B R D"],
  rows: Rows,
  cache: Cache | LatentCache,
  first: Int[Array, ""] | int,
) -> tuple[Float[Array, "B R D"], dict[str, jax.Array]]:
  """Returns the residual after stacked layers, of which `first` is the first, and their cache."""

  def layer(block, carry, inputs):
    x_BRD, cache = carry
    one, number = inputs
    x_BRD, new, _ = block(x_BRD, one, None, rows, cache_layer(cache, number))
    return (x_BRD, set_cache_layer(cache, number, new)), None

  count = jax.tree.leaves(per_layer(cache))[0].shape[0]
  every = model.layer_pattern.stacked()
  if count < model.spec.layers:
    every = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), every)
  # In the carry, not a scanned input: a layer is updated in place, and there is only one cache.
  (x_BRD, cache), *_ = over_layers(
    layer,
    layers,
    model.dense_layers,
    model.layer_order,
    (x_BRD, cache),
    (every, jnp.arange(count, dtype=jnp.int32)),
  )
  return x_BRD, per_layer(cache)
