"""Random numbers of some rows of an array, equal to those that `jax.random` draws for all of it.

Where each device draws for its own rows, it must not draw those of other rows again. JAX's
partitionable threefry generator hashes the index of each element, so that any part of an array can
be drawn alone; `jax.random` has no argument for it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# jax.random draws complete arrays only; which counts it hashes: jax#13040.
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Int, UInt32

_MOST = 2**32  # elements whose index is one word


def bernoulli_rows(
  words: UInt32[Array, "2"], p: float, shape: tuple[int, ...], first: Int[Array, ""]
) -> Bool[Array, "..."]:
  """Returns rows `first` to `first + shape[0] - 1` of `jax.random.bernoulli(key, p, ...)`.

  Args:
    words: of the key, `jax.random.key_data(key)`.
    p: the probability of True.
    shape: of the result; the complete array has more rows, and the same other dims.
    first: int32, the number of the first row; the last row's elements are below 2**32.
  """
  assert math.prod(shape) < _MOST, shape
  row = math.prod(shape[1:])
  index = jax.lax.broadcasted_iota(jnp.uint32, (shape[0], row), 0) + first.astype(jnp.uint32)
  index = index * np.uint32(row) + jax.lax.broadcasted_iota(jnp.uint32, (shape[0], row), 1)
  index = index.reshape(shape)
  high, low = threefry2x32_p.bind(*words, jnp.zeros_like(index), index)
  return _uniform(high, low) < p


def _uniform(high: Array, low: Array) -> Array:
  """Returns numbers of [0, 1): random bits as the mantissa of numbers of [1, 2), minus 1."""
  dtype = jnp.zeros(()).dtype  # that of `jax.random.bernoulli` with a Python float
  if dtype == jnp.float64:
    bits = (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
  else:
    bits = high ^ low
  info = jnp.finfo(dtype)
  unsigned = bits.dtype.type
  one = unsigned(np.ones((), dtype).view(bits.dtype))
  bits = (bits >> unsigned(info.bits - info.nmant)) | one
  return jax.lax.bitcast_convert_type(bits, dtype) - jnp.ones((), dtype)
