"""Dtypes of computations, and the magnitudes by which numbers are scaled to 8 bits."""

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


# ------------------------------ delayed scaling ------------------------------

MAGNITUDES = 3  # of a kernel's matmuls: of inputs, kernel and gradients
HISTORY = "amax_history"  # the last part of the name of a history of these


@jax.custom_vjp
def known_magnitudes(history: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the largest magnitudes of earlier steps as scalars, for delayed scaling.

  Args:
    history: [MAGNITUDES, steps], the latest first, 0 of steps that were not taken. Its cotangent
      has this step's magnitudes in the place of the latest, and zeros.
  """
  return tuple(jnp.max(history, axis=1))


def _known_forward(history: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
  return known_magnitudes(history), history


def _known_backward(history: jax.Array, seen: tuple[jax.Array, ...]) -> tuple[jax.Array]:
  return (jnp.zeros_like(history).at[:, 0].set(jnp.stack(seen)),)


known_magnitudes.defvjp(_known_forward, _known_backward)


def is_history(name: str) -> bool:
  """Returns whether a variable is a history of delayed scaling, by its name."""
  return name.endswith(f"/{HISTORY}")


def advanced_history(history: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns a history with a step's magnitudes; those that are not finite count as not known.

  Args:
    history: [..., steps], as in `known_magnitudes`.
    seen: the cotangent of it, of one step.
  """
  latest = seen[..., :1]
  latest = jnp.where(jnp.isfinite(latest), latest, jnp.zeros_like(latest))
  return jnp.concatenate([latest, history[..., :-1]], axis=-1)
