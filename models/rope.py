"""Rotary position embeddings. Source: arXiv:2104.09864.

Scaled variants let rows be longer than those of pretraining. `model.rotary_scaling` names one with
its numbers: `("yarn", {"factor": 4.0, "original_length": 32768})`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from partitioning.dtypes import wide_dtype


def rotary_frequencies(
  size: int,
  base: float,
  scaling: tuple = (),
  *,
  dtype: jnp.dtype,
  length: int = 0,
) -> Float[Array, " h"]:
  """Returns the angle between one position and the next of each of the pairs, in radians.

  Args:
    size: dims of a head that are rotated, twice the number of pairs.
    base: of the geometric series.
    scaling: a spec's `rotary_scaling`. Four numbers are Llama 3's (factor, low, high, length):
      frequencies of less than `low` rotations in `length` positions are divided by `factor`, those
      of more than `high` are unchanged, those in between are interpolated. Source:
      `rope_type: llama3` in Llama 3.1's configuration. () changes none.
    dtype: of the result, float32 or wider.
    length: tokens of a row of training; some kinds have other frequencies for longer rows.
  """
  if scaling and isinstance(scaling[0], str):
    kind, numbers = scaling[0], dict(scaling[1])
    if kind != "llama3":
      return jnp.asarray(_FREQUENCIES[kind](size, base, numbers, length), dtype)
    scaling = tuple(numbers[name] for name in ("factor", "low", "high", "original_length"))
  half = size // 2
  frequency_h = jnp.asarray(base, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
  if not scaling:
    return frequency_h
  factor, low, high, original = (jnp.asarray(value, dtype) for value in scaling)
  turns_h = original * frequency_h / jnp.asarray(2 * math.pi, dtype)
  share_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
  return frequency_h * (share_h + (1 - share_h) / factor)


def _plain(size: int, base: float) -> np.ndarray:
  return base ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def _linear(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Position interpolation: as if all positions were divided. Source: arXiv:2306.15595."""
  del length
  return _plain(size, base) / numbers["factor"]


def _dynamic(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """NTK-aware scaling by the length of the row; rows up to the original length are unchanged.

  Source: `rope_type: dynamic` of the transformers library; arXiv:2309.00071, section 3.1.
  """
  factor, original = numbers["factor"], numbers["original_length"]
  stretch = factor * max(length, original) / original - (factor - 1)
  return _plain(size, base * stretch ** (size / (size - 2)))


def _yarn(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Interpolates the slow frequencies and leaves the fast ones. Source: arXiv:2309.00071."""
  del length

  def pair(rotations: float) -> float:
    """Returns the pair, counted as a real number, that rotates so often in the original length."""
    turns = numbers["original_length"] / (rotations * 2 * math.pi)
    return size * math.log(turns) / (2 * math.log(base))

  first, last = pair(numbers.get("beta_fast", 32.0)), pair(numbers.get("beta_slow", 1.0))
  if numbers.get("truncate", True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, size - 1)
  last += 0.001 if first == last else 0
  slow_h = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
  frequency_h = _plain(size, base)
  return frequency_h * (1 - slow_h) + frequency_h / numbers["factor"] * slow_h


def _longrope(size: int, base: float, numbers: Mapping[str, Any], length: int) -> np.ndarray:
  """Divides each frequency by a number of its own, searched for. Source: arXiv:2402.13753."""
  name = "long_factors" if length > numbers["original_length"] else "short_factors"
  return _plain(size, base) / np.asarray(numbers[name], np.float64)


_FREQUENCIES = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}


def attention_factor(scaling: tuple) -> float:
  """Returns the factor of cosine and sine, so its square is a factor of the scores.

  The number of that name, or its default: 0.1 ln(factor) + 1 of YaRN (arXiv:2309.00071, equation
  22), the square root of 1 + ln(factor) / ln(original_length) of LongRoPE (arXiv:2402.13753).

  Args:
    scaling: a spec's `rotary_scaling`.
  """
  if not scaling or scaling[0] not in ("yarn", "longrope"):
    return 1.0
  numbers = dict(scaling[1])
  if given := numbers.get("attention_factor"):
    return given
  if (factor := numbers["factor"]) <= 1:
    return 1.0
  if scaling[0] == "yarn":
    return 0.1 * math.log(factor) + 1
  return math.sqrt(1 + math.log(factor) / math.log(numbers["original_length"]))


def rope_table(
  positions_BT: Int[Array, "#B T"], frequency_h: Float[Array, " h"], factor: float = 1.0
) -> Float[Array, "2 #B T h"]:
  """Returns cosine and sine of each pair's angle at each position, times a factor."""
  angle_BTh = positions_BT.astype(frequency_h.dtype)[:, :, None] * frequency_h[None, None]
  table_2BTh = jnp.stack([jnp.cos(angle_BTh), jnp.sin(angle_BTh)])
  return table_2BTh if factor == 1.0 else table_2BTh * jnp.asarray(factor, table_2BTh.dtype)


def apply_rope(
  x_BTNH: Float[Array, "B T N H"], table_2BTh: Float[Array, "2 #B T h"], *, adjacent: bool = False
) -> Float[Array, "B T N H"]:
  """Rotates each pair of dims by its position's angle, in float32 or wider.

  Dims from 2 h on are not rotated (GPT-NeoX's partial rotary positions).

  Args:
    x_BTNH: queries or keys.
    table_2BTh: of `rope_table`.
    adjacent: the pairs are (2 i, 2 i + 1), as in arXiv:2104.09864; else (i, i + h), as GPT-NeoX has
      them.
  """
  wide = wide_dtype(x_BTNH.dtype)
  half = table_2BTh.shape[-1]
  cos, sin = table_2BTh.astype(wide)[:, :, :, None]
  parts = (
    (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if adjacent
    else (slice(0, half), slice(half, 2 * half))
  )
  first, second = (x_BTNH[..., part].astype(wide) for part in parts)
  turned = first * cos - second * sin, second * cos + first * sin
  if adjacent:
    rotated = jnp.stack(turned, axis=-1).reshape(*x_BTNH.shape[:-1], 2 * half)
  else:
    rotated = jnp.concatenate(turned, axis=-1)
  rotated = rotated.astype(x_BTNH.dtype)
  if x_BTNH.shape[-1] == 2 * half:
    return rotated
  return jnp.concatenate([rotated, x_BTNH[..., 2 * half :]], axis=-1)
