"""Dtypes of computations."""

import jax
import jax.numpy as jnp


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """Returns float32, or `dtype` if it is wider: a comparison in float64 is never narrowed.

  Not `jnp.promote_types`, which strict promotion (on in the tests) restricts.
  """
  return jnp.dtype(dtype) if jnp.finfo(dtype).bits > 32 else jnp.dtype("float32")


def scaled(x: jax.Array, factor: float) -> jax.Array:
  """Returns x times a constant, multiplied in float32 or wider and rounded once.

  In bfloat16 the constant would be rounded too: 0.22 to 0.2197, the scale of DeepSeek-V3's scores
  by 0.35 %. A rounding of all results alike is an error that no sum averages out.
  """
  wide = wide_dtype(x.dtype)
  return (x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)
