"""Rotary position embeddings. Source: arXiv:2104.09864."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.dtypes import wide_dtype


def rotary_frequencies(
  head_size: int, base: float, scaling: tuple[float, ...] = (), *, dtype: jnp.dtype
) -> Float[Array, " h"]:
  """Returns the angle between one position and the next of each of the H/2 pairs, in radians.

  Args:
    head_size: H.
    base: of the geometric series.
    scaling: Llama 3's, for longer contexts than it was first trained on: (factor, low, high,
      length). Frequencies of less than `low` rotations in `length` positions are divided by
      `factor`, those of more than `high` are unchanged, those in between are interpolated. Source:
      `rope_type: llama3` in Llama 3.1's configuration. () changes none.
    dtype: of the result, float32 or wider.
  """
  half = head_size // 2
  frequency_h = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  if not scaling:
    return frequency_h
  factor, low, high, length = (jnp.asarray(value, dtype) for value in scaling)
  turns_h = length * frequency_h / jnp.asarray(2 * math.pi, dtype)
  share_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
  return frequency_h * (share_h + (1 - share_h) / factor)


def rope_table(
  positions_BT: Int[Array, "#B T"], frequency_h: Float[Array, " h"]
) -> Float[Array, "2 #B T h"]:
  """Returns cosine and sine of each pair's angle at each position."""
  angle_BTh = positions_BT.astype(frequency_h.dtype)[:, :, None] * frequency_h[None, None]
  return jnp.stack([jnp.cos(angle_BTh), jnp.sin(angle_BTh)])


def apply_rope(
  x_BTNH: Float[Array, "B T N H"], table_2BTh: Float[Array, "2 #B T h"]
) -> Float[Array, "B T N H"]:
  """Rotates each pair (i, i + H/2) by its position's angle, in float32 or wider."""
  wide = wide_dtype(x_BTNH.dtype)
  half = x_BTNH.shape[-1] // 2
  cos, sin = table_2BTh.astype(wide)[:, :, :, None]
  first, second = x_BTNH[..., :half].astype(wide), x_BTNH[..., half:].astype(wide)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)
