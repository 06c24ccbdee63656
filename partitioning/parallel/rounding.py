"""Numbers in 8 bits and their scales: rounding, gathers and contractions of them.

What is computed is in docs/memory.md.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from partitioning.dims import Axes
from partitioning.parallel import collectives

TOKENS = 2  # batch and sequence, the first dims of an activation
_LARGEST = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}


class Rounded(NamedTuple):
  """Numbers in 8 bits, and their scale, of as many dims; of size 1 where numbers share one."""

  values: jax.Array
  scale: jax.Array


def wide(x: jax.Array) -> jnp.dtype:
  """Returns float32, or the dtype of x if that is wider."""
  return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def rounded(
  x: jax.Array, shared: range, over: Axes, to: type, known: Sequence[jax.Array]
) -> Rounded:
  """Rounds an array to 8 bits.

  Args:
    x: the array, or a device's part of it.
    shared: the dims whose numbers share a scale.
    over: the axes that split those dims.
    to: the format.
    known: the magnitude of earlier steps, for delayed scaling, or nothing.
  """
  x = x.astype(wide(x))
  largest, dtype = _LARGEST[to], x.dtype

  def here() -> jax.Array:
    return jnp.max(jnp.abs(x), axis=tuple(shared), keepdims=True)

  if known:
    [before] = known
    before_wide = before.astype(dtype).reshape((1,) * x.ndim)

    def reduced_where_needed() -> jax.Array:
      return jax.lax.cond(before > 0, lambda: before_wide, lambda: largest_over(here(), over))

    def reduced() -> jax.Array:  # no collective inside a conditional: see `collectives.in_turn`
      return largest_over(jax.lax.cond(before > 0, lambda: before_wide, here), over)

    magnitude = jax.lax.platform_dependent(cpu=reduced, default=reduced_where_needed)
  else:
    magnitude = largest_over(here(), over)
  # At least the smallest normal number, for arrays of zeros. NaN stays NaN, and what is not finite
  # makes the scale so, and with it the result.
  scale = jnp.maximum(magnitude / largest, jnp.finfo(dtype).tiny)
  values = jnp.clip(x * (1 / scale), -largest, largest)
  return Rounded((jnp.round(values) if to == jnp.int8 else values).astype(to), scale)


def largest_over(magnitude: jax.Array, axes: Axes) -> jax.Array:
  """Returns the largest magnitude on the devices along the axes; infinity if one of them is NaN."""
  if not axes:
    return magnitude
  # On CPUs the maximum over devices leaves NaN out.
  return jax.lax.pmax(jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude), axes)


def gathered(one: Rounded, moves: Sequence[tuple[int, Axes]], shared: range) -> Rounded:
  """All-gathers the numbers, and the scales along the dims in which they differ."""
  values, scale = one
  # As integers: XLA for CPUs would send float8 as float16 (jax 0.10.2).
  bits = jax.lax.bitcast_convert_type(values, jnp.int8)
  for dim, axes in moves:
    bits = collectives.all_gather(bits, axes, dim)
    if dim not in shared:
      scale = collectives.all_gather(scale, axes, dim)
  return Rounded(jax.lax.bitcast_convert_type(bits, values.dtype), scale)


def dot(
  a: jax.Array,
  b: jax.Array,
  contracted: Sequence[range],
  dtype: jnp.dtype,
  *,
  precise: bool = False,
) -> jax.Array:
  """Contracts dims of two arrays: integers exactly, in int32, and others in `dtype`.

  Args:
    a: its other dims are the first of the result.
    b: likewise, the last.
    contracted: the dims of both.
    dtype: of the result.
    precise: whether `training.matmul_precision` applies.
  """
  exact = a.dtype == jnp.int8
  result = jax.lax.dot_general(
    a,
    b,
    (tuple(map(tuple, contracted)), ((), ())),
    precision=None if precise else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.int32 if exact else dtype,
  )
  return result.astype(dtype)


def of_tokens(scale: jax.Array, ndim: int) -> jax.Array:
  """Returns the scale of an activation, for an array of the same tokens with `ndim` dims."""
  return scale.reshape(*scale.shape[:TOKENS], *(1,) * (ndim - TOKENS))


def of_outputs(scale: jax.Array, contracted: int) -> jax.Array:
  """Returns the scale of a kernel for its products: after tokens, and without contracted dims."""
  return scale.reshape(*(1,) * TOKENS, *scale.shape[: scale.ndim - contracted])
