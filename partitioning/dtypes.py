"""Dtypes of computations."""

import jax.numpy as jnp


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """Returns float32, or `dtype` if it is wider: a comparison in float64 is never narrowed.

  Not `jnp.promote_types`, which strict promotion (on in the tests) restricts.
  """
  return jnp.dtype(dtype) if jnp.finfo(dtype).bits > 32 else jnp.dtype("float32")
