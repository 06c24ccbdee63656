"""Random words of elements, and rounding by them: against NumPy, over all words, and on meshes."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from runtime import collectives
from training.optimizers.low_precision import (
  fraction,
  rounding_key,
  rounding_words,
  to_bfloat16,
)

SHAPE = (2, 96, 40)
ALL = (np.arange(2**16, dtype=np.uint32) << 16) + 12345  # the lower half is not used


def mixed(x):
  """The mixing function lowbias32, in NumPy."""
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
  return x ^ (x >> np.uint32(16))


def drawn(seed=3, step=5, name="a/b", shape=SHAPE):
  return np.asarray(rounding_words(rounding_key(seed, jnp.int32(step)), name, shape))


def test_words_follow_from_key_name_and_index():
  first, second = np.asarray(rounding_key(3, jnp.int32(5)))
  salt = np.array([zlib.crc32(b"a/b")], np.uint32)
  index = np.arange(math.prod(SHAPE), dtype=np.uint32)
  wanted = mixed(mixed(index + mixed(first ^ salt)) ^ mixed(second + salt))
  np.testing.assert_array_equal(drawn().reshape(-1), wanted)


def test_every_mesh_draws_the_same_and_sends_nothing():
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  sharding = NamedSharding(mesh, PartitionSpec(None, "x", "y"))
  draw = jax.jit(
    lambda step: rounding_words(rounding_key(3, step), "a/b", SHAPE), out_shardings=sharding
  )
  compiled = draw.lower(jnp.int32(5)).compile()
  found = compiled(jnp.int32(5))
  assert found.addressable_shards[0].data.shape == sharding.shard_shape(SHAPE)
  np.testing.assert_array_equal(np.asarray(found), drawn())
  assert collectives.collectives(compiled.as_text(), mesh) == []


VALUES = np.array([1.0, 1.00123, -1.00123, 3.14159265, -2.5e-3, 1e-30, 6.1e37, 0.0], np.float32)


def test_over_all_words_the_mean_is_the_number_itself():
  every = [np.broadcast_to(x, (len(VALUES), len(ALL))) for x in (VALUES[:, None], ALL)]
  rounded = np.asarray(jax.jit(to_bfloat16)(*every), np.float64)
  for found, x in zip(rounded, VALUES, strict=True):
    assert found.mean() == x  # exactly: sums of so few bits are not rounded
    assert len(np.unique(found)) <= 2
    assert np.abs(found - x).max() <= abs(x) * 2.0**-7


def test_rounding_is_up_where_the_word_is_above_what_is_cut_off():
  random = np.random.default_rng(0)
  x = random.standard_normal(SHAPE).astype(np.float32)
  bits = x.view(np.uint32)
  up = (bits & 0xFFFF) + (drawn() >> 16) >= 2**16
  wanted = (((bits >> 16) + up) << 16).astype(np.uint32).view(np.float32)
  found = np.asarray(to_bfloat16(jnp.asarray(x), jnp.asarray(drawn())), np.float32)
  np.testing.assert_array_equal(found, wanted)
  np.testing.assert_array_equal(fraction(ALL), np.arange(2**16) / 2**16)


def test_numbers_of_bfloat16_stay_and_what_is_no_number_is_not_made_one():
  x = jnp.asarray([1.0, -0.0, 0.15625, 3.0e38, jnp.inf, -jnp.inf], jnp.bfloat16)
  for word in (0, 2**32 - 1):
    found = to_bfloat16(x.astype(jnp.float32), jnp.full(x.shape, word, jnp.uint32))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x))
  nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
  assert jnp.isnan(to_bfloat16(jnp.asarray(nans), jnp.full(3, 2**32 - 1, jnp.uint32))).all()
