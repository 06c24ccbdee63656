"""8-bit blocks: code numbers, scales and rounding against NumPy; which blocks an array has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.optimizers.low_precision import (
  Blocks,
  block_shape,
  decode_blocks,
  encode_blocks,
  rounding_key,
  rounding_words,
)

SHAPE, BLOCK = (2, 32, 48), (1, 8, 16)


def code_numbers(largest_code):
  """Returns the numbers of the codes: 32 of them 1 apart, then 16 twice as far apart, and so on."""
  numbers, step = list(range(32)), 2
  while len(numbers) <= largest_code:
    numbers += [16 * step + step * i for i in range(16)]
    step *= 2
  return np.array(numbers[: largest_code + 1], np.float64)


SIGNED, UNSIGNED = code_numbers(127), code_numbers(255)


def blocks_of(x):
  """Returns [block, element]."""
  (a, b, c), (_, m, n) = x.shape, BLOCK
  return x.reshape(a, b // m, m, c // n, n).transpose(0, 1, 3, 2, 4).reshape(-1, m * n)


def rounded(x, fractions):
  """Returns what NumPy makes of it: up if the fraction reaches what is missing to the next one."""
  found = []
  for values, chances in zip(blocks_of(x), blocks_of(fractions), strict=True):
    numbers = SIGNED if values.min() < 0 else UNSIGNED
    scale = np.float64(np.float32(np.abs(values).max()) / np.float32(numbers[-1]))
    magnitude = np.abs(values) / scale
    at = np.minimum(np.searchsorted(numbers, magnitude, side="right") - 1, len(numbers) - 2)
    share = (magnitude - numbers[at]) / (numbers[at + 1] - numbers[at])
    code = at + (share + chances >= 1)
    if numbers is UNSIGNED:
      code = np.where(values > 0, np.maximum(code, 1), code)
    found.append(np.sign(values) * numbers[code] * scale)
  return np.array(found)


@jax.jit
def through(x):
  return decode_blocks(encode_blocks(x, (1, 128), jnp.zeros(x.shape, jnp.uint32)))


def stored(x):
  """Returns what is stored of [1, 256], rounded down."""
  return np.asarray(through(x))


def drawn(kind):
  random = np.random.default_rng(1)
  x = random.standard_normal(SHAPE) * np.exp(3 * random.standard_normal(SHAPE))
  return (x if kind == "first moment" else x**2).astype(np.float32)


def test_the_code_numbers_are_those_of_the_documentation():
  assert (len(SIGNED), SIGNED[-1], len(UNSIGNED), UNSIGNED[-1]) == (128, 1984, 256, 507904)
  np.testing.assert_array_equal(SIGNED[[31, 32, 33, 47, 48, 49]], [31, 32, 34, 62, 64, 68])
  codes = np.stack([np.arange(256, dtype=np.uint8)] * 2)
  found = jax.jit(decode_blocks)(Blocks(codes, np.array([[-2.0], [1.0]], np.float32)))
  wanted = np.concatenate([2 * SIGNED, -2 * SIGNED]), UNSIGNED  # the sign is the upper bit
  np.testing.assert_array_equal(np.asarray(found), np.stack(wanted))


@jax.jit
def encoded(x, words):
  return encode_blocks(x, BLOCK, words)


decoded_from = jax.jit(decode_blocks)


@pytest.mark.parametrize("kind", ["first moment", "second moment"])
def test_encoding_rounds_as_numpy_does(kind):
  x = drawn(kind)
  chosen = rounding_words(rounding_key(0, jnp.int32(1)), kind, SHAPE)
  found = encoded(x, chosen)
  assert (found.codes.dtype, found.scales.shape) == (jnp.uint8, (2, 4, 3))
  assert np.all(np.signbit(found.scales) == (kind == "first moment"))
  decoded = blocks_of(np.asarray(decoded_from(found), np.float64))
  wanted = rounded(x, np.asarray(chosen >> jnp.uint32(16), np.float64) / 2**16)
  # float32 may see an element on the other side of its chance.
  assert np.mean(np.abs(decoded - wanted) > 1e-6 * np.abs(wanted)) < 1e-3
  # The largest of each block stays, and so do numbers that are encoded once more.
  np.testing.assert_allclose(np.abs(decoded).max(1), np.abs(blocks_of(x)).max(1), rtol=3e-7)
  twice = decoded_from(encoded(decoded_from(found), chosen ^ jnp.uint32(2**32 - 1)))
  np.testing.assert_allclose(blocks_of(np.asarray(twice)), decoded, rtol=3e-7)


def test_a_second_moment_above_zero_is_never_zero_and_zeros_stay():
  x = np.zeros((1, 256), np.float32)
  x[0, :3] = 1.0, 1e-12, 1e-30
  found = stored(x)
  np.testing.assert_allclose(found[0, :3], [1, 1 / 507904, 1 / 507904], rtol=1e-6)
  assert not found[0, 3:].any()
  x[0, 3] = -1e-12  # now it is no second moment
  found = stored(x)
  np.testing.assert_array_equal(found[0, 1:], 0)


def test_what_is_not_finite_stays_so():
  for bad in (np.nan, np.inf):
    x = np.ones((1, 256), np.float32)
    x[0, 7] = bad
    found = stored(x)
    assert not np.isfinite(found[0, 7])
    np.testing.assert_allclose(found[0, 128:], 1, rtol=1e-6)  # the other block


def test_blocks_leave_dims_that_a_mesh_can_split():
  head = [False] * 3 + [True]
  layers = [True] + [False] * 3
  for shape, whole, wanted in (
    ((32, 4096, 14336), head[:3], (1, 16, 8)),  # Llama 3 8B
    ((128256, 4096), head[:2], (4, 32)),
    ((32, 4096, 32, 128), head, (1, 1, 1, 128)),
    ((3, 128, 8, 16), head, (1, 8, 1, 16)),
    ((100, 300), head[:2], None),  # 4 x 4 only
    ((128, 5), head[:2], None),  # 128 layers
  ):
    apart = layers if len(shape) > 2 or shape[1] == 5 else [False] * 4
    assert block_shape(shape, whole[: len(shape)], apart[: len(shape)]) == wanted
