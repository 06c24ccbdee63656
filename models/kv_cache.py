"""The caches of generation: keys and values, or the latent vectors that they are computed from."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jaxtyping import Array, Float, Int

from partitioning.constraints import constrain

# The letters of the caches' arrays, of all layers.
CACHE = {
  "keys": "LBSKH",
  "values": "LBSKH",
  "latents": "LBSC",
  "rotary_keys": "LBSI",
  "lengths": "B",
}


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
  """What the keys and values of latent attention are computed from, as `Cache`.

  Attributes:
    latents: [L, B, S, C], after their norm, in the compute dtype.
    rotary_keys: [L, B, S, I], of all heads, rotated by their positions.
    lengths: int32 [B], tokens read of each row.
  """

  latents: Any
  rotary_keys: Any
  lengths: Any


AnyCache = TypeVar("AnyCache", Cache, LatentCache)


def update_cache(cache: AnyCache, *new: Float[Array, "B T ..."]) -> AnyCache:
  """Returns one layer's cache with what new tokens add to its arrays, appended to each row.

  The lengths are unchanged: the caller knows how many of the T are tokens and not padding.

  Args:
    cache: of one layer.
    *new: in the order of the cache's fields, such as keys and values.
  """

  def write(row: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

  found = {}
  for name, x in zip(_arrays(cache), new, strict=True):
    joined = jax.vmap(write)(getattr(cache, name), x, cache.lengths)
    found[name] = constrain(joined, CACHE[name][1:])
  return dataclasses.replace(cache, **found)


def cache_layer(cache: AnyCache, layer: Int[Array, ""]) -> AnyCache:
  """Returns one layer's cache."""
  found = {
    name: constrain(
      jax.lax.dynamic_index_in_dim(getattr(cache, name), layer, keepdims=False), CACHE[name][1:]
    )
    for name in _arrays(cache)
  }
  return dataclasses.replace(cache, **found)


def set_cache_layer(cache: AnyCache, layer: Int[Array, ""], new: AnyCache) -> AnyCache:
  """Returns the cache of all layers with one layer's arrays replaced."""
  found = {
    name: jax.lax.dynamic_update_index_in_dim(
      getattr(cache, name), getattr(new, name), layer, axis=0
    )
    for name in _arrays(cache)
  }
  return dataclasses.replace(cache, **found)


def per_layer(cache: Cache | LatentCache) -> dict[str, Any]:
  """Returns the arrays that have the layers as their first dim, by field."""
  return {name: getattr(cache, name) for name in _arrays(cache)}


def of_layers(arrays: Mapping[str, Any], lengths_B: Int[Array, " B"]) -> Cache | LatentCache:
  """Returns the cache with these arrays of `per_layer`."""
  kind = Cache if "keys" in arrays else LatentCache
  return kind(**arrays, lengths=lengths_B)


def _arrays(cache: Cache | LatentCache) -> list[str]:
  """Returns the names of the fields with numbers of each token."""
  return [field.name for field in dataclasses.fields(cache) if field.name != "lengths"]
