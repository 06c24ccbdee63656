"""The key/value cache of generation."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from partitioning.constraints import constrain

# The letters of the cache's arrays, of all layers.
CACHE = {"keys": "LBSKH", "values": "LBSKH", "lengths": "B"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of the tokens read so far, of one layer or (with L first) of all.

  A row is one document. Slot s of a row holds its s-th token, so rows may differ in length: what is
  at or past a row's length is masked, whatever it is.

  Attributes:
    keys: [L, B, S, K, H], rotated by their positions, in the compute dtype.
    values: likewise.
    lengths: int32 [B], tokens read of each row.
  """

  keys: Any
  values: Any
  lengths: Any


def update_cache(
  cache: Cache, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
) -> Cache:
  """Returns one layer's cache with new keys and values appended to each row.

  The lengths are unchanged: the caller knows how many of the T are tokens and not padding.
  """

  def write(row_SKH: Array, new_TKH: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(row_SKH, new_TKH, start, axis=0)

  keys_BSKH = jax.vmap(write)(cache.keys, k_BTKH, cache.lengths)
  values_BSKH = jax.vmap(write)(cache.values, v_BTKH, cache.lengths)
  keys_BSKH, values_BSKH = constrain(keys_BSKH, "BSKH"), constrain(values_BSKH, "BSKH")
  return dataclasses.replace(cache, keys=keys_BSKH, values=values_BSKH)


def cache_layer(cache: Cache, layer: Int[Array, ""]) -> Cache:
  """Returns one layer's cache."""
  keys_BSKH, values_BSKH = (
    constrain(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), "BSKH")
    for x in (cache.keys, cache.values)
  )
  return dataclasses.replace(cache, keys=keys_BSKH, values=values_BSKH)


def set_cache_layer(cache: Cache, layer: Int[Array, ""], new: Cache) -> Cache:
  """Returns the cache of all layers with one layer's keys and values replaced."""
  keys_LBSKH, values_LBSKH = (
    jax.lax.dynamic_update_index_in_dim(x, new_x, layer, axis=0)
    for x, new_x in ((cache.keys, new.keys), (cache.values, new.values))
  )
  return dataclasses.replace(cache, keys=keys_LBSKH, values=values_LBSKH)
