"""Types that arithmetic is done in."""

import jax.numpy as jnp


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """Returns float32, or `dtype` where it is wider: a proof in float64 is never narrowed.

  Said here and not by `jnp.promote_types`, which strict promotion (on in the tests) restricts.
  """
  return jnp.dtype(dtype) if jnp.finfo(dtype).bits > 32 else jnp.dtype("float32")
