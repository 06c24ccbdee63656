"""Rotary position embeddings. Source: arXiv:2104.09864."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.dtypes import wide_dtype


def rotary_frequencies(
  head_size: int, base: float, scaling: tuple[float, ...] = (), *, dtype: jnp.dtype
) -> Float[Array, " h"]:
  """Returns by how much each of the H/2 pairs turns from one position to the next, in radians.

  Args:
    head_size: H.
    base: of the geometric series.
    scaling: Llama 3's, for longer texts than it was first trained on: (factor, low, high, length).
      Pairs that turn less than `low` times in `length` positions turn `factor` times slower, those
      that turn more than `high` times are left alone, in between it is interpolated. Source: the
      definition of `rope_type: llama3` in Llama 3.1's configuration. () leaves all alone.
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


def turns(
  positions_BT: Int[Array, "#B T"], frequency_h: Float[Array, " h"]
) -> Float[Array, "2 #B T h"]:
  """Returns cosine and sine of how far each pair is turned at each position."""
  angle_BTh = positions_BT.astype(frequency_h.dtype)[:, :, None] * frequency_h[None, None]
  return jnp.stack([jnp.cos(angle_BTh), jnp.sin(angle_BTh)])


def rotate(
  x_BTNH: Float[Array, "B T N H"], turns_2BTh: Float[Array, "2 #B T h"]
) -> Float[Array, "B T N H"]:
  """Turns each pair (i, i + H/2) by its position, in float32 or wider. Source: arXiv:2104.09864."""
  wide = wide_dtype(x_BTNH.dtype)
  half = x_BTNH.shape[-1] // 2
  cos, sin = turns_2BTh.astype(wide)[:, :, :, None]
  first, second = x_BTNH[..., :half].astype(wide), x_BTNH[..., half:].astype(wide)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)
