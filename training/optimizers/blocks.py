"""Arrays in blocks of 128 elements: 8 bits for each element, and a float32 scale for each block.

Source of blocks with a scale of their own: arXiv:2110.02861. The 8 bits are a small floating-point
number, not an integer: Adam divides one moment by the root of the other, so what counts is the
relative error, also of elements that are far below the largest of their block.

Where no element of a block is negative (second moments), the sign's bit widens the exponent. With
the scale being 1, the code numbers are

    4 bits of mantissa, 3 of exponent, a sign: 0, 1, ..., 31, 32, 34, ..., 62, 64, 68, ..., 1984
    4 bits of mantissa, 4 of exponent:         0, 1, ..., 31, 32, 34, ..., 62, 64, 68, ..., 507904

and the scale is that for which the largest element is the last of them. Beyond 32 neighbours differ
by 3 to 6 percent. A positive number below the first code number of an unsigned block is rounded up:
a second moment is divided by, so it may be too large but not 0. It is at least
1 / 507904 of the block's largest, its root 1 / 713, more than the 1 / 1984 of a first
moment: an element whose moments are both below that gets no larger updates than others.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt32

from training.optimizers import stochastic_rounding

SIZE = 128  # elements of a block
_MANTISSA = 4  # bits
_STEPS = 2**_MANTISSA
# The largest exponent and code, and the number that it stands for, with a sign and without.
_LAST_SIGNED, _LAST = 127, 255
_TOP_SIGNED, _TOP = 31.0 * 2**6, 31.0 * 2**14
_SIGN = 128


class Blocks(NamedTuple):
  """An array in blocks.

  Attributes:
    codes: uint8, of the array's shape.
    scales: float32, of the array's shape divided by that of a block; below zero where the block has
      negative elements.
  """

  codes: UInt8[Array, "..."]
  scales: Float[Array, "..."]


def block_shape(
  shape: Sequence[int], whole: Sequence[bool], apart: Sequence[bool]
) -> tuple[int, ...] | None:
  """Returns the shape of the blocks of an array, which does not depend on the mesh.

  The factors of two that a block takes from the dims leave each of them divisible by as large a
  power of two as possible, so that a mesh may split it.

  Args:
    shape: of the whole array.
    whole: which dims no mesh splits; blocks take them first.
    apart: which dims are numbers of separate arrays, such as layers; blocks take nothing of them.

  Returns:
    A size for each dim; None if the dims together have no factor 128.
  """
  block, left = [1] * len(shape), list(shape)

  def halve(dim: int) -> None:
    left[dim] //= 2
    block[dim] *= 2

  for dim in (i for i, is_whole in enumerate(whole) if is_whole):
    while left[dim] % 2 == 0 and math.prod(block) < SIZE:
      halve(dim)
  others = [i for i in range(len(shape)) if not apart[i] and not whole[i]]
  while math.prod(block) < SIZE:
    powers = {i: left[i] & -left[i] for i in others}  # the largest power of two that divides it
    dim = max(powers, key=powers.__getitem__, default=None)
    if dim is None or powers[dim] == 1:
      return None
    halve(dim)
  return tuple(block)


def encode(x: Float[Array, "..."], block: Sequence[int], words: UInt32[Array, "..."]) -> Blocks:
  """Rounds an array stochastically to code numbers times the scale of their block.

  Args:
    x: float32.
    block: the shape of a block.
    words: random, of the shape of x.
  """
  signed = _of_blocks(jnp.min, x, block) < 0
  largest = _of_blocks(jnp.max, jnp.abs(x), block)
  scales = largest / jnp.where(signed, jnp.float32(_TOP_SIGNED), jnp.float32(_TOP))
  blocks = jnp.where(signed, -scales, scales)
  spread = _spread(blocks, block)
  signed, scale = spread < 0, jnp.abs(spread)
  value = jnp.abs(x) / jnp.where(scale > 0, scale, jnp.ones_like(scale))
  bits = jax.lax.bitcast_convert_type(value, jnp.uint32).astype(jnp.int32)
  exponent = jnp.clip((bits >> 23) - (127 + _MANTISSA), 0, 14)
  part = value * _power_of_two(-exponent) + stochastic_rounding.fraction(words)
  code = jnp.floor(part).astype(jnp.int32) + _STEPS * exponent
  code = jnp.minimum(code, jnp.where(signed, _LAST_SIGNED, _LAST))
  unsigned = jnp.where((x > 0) & (scale > 0), jnp.maximum(code, 1), code)
  code = jnp.where(signed, code | jnp.where(x < 0, _SIGN, 0), unsigned)
  return Blocks(code.astype(jnp.uint8), blocks)


def decode(blocks: Blocks) -> Float[Array, "..."]:
  """Returns the array in float32: code numbers times scales."""
  block = [n // m for n, m in zip(blocks.codes.shape, blocks.scales.shape, strict=True)]
  scale, code = _spread(blocks.scales, block), blocks.codes.astype(jnp.int32)
  signed = scale < 0
  magnitude = jnp.where(signed, code & _LAST_SIGNED, code)
  exponent = jnp.maximum((magnitude >> _MANTISSA) - 1, 0)
  number = (magnitude - _STEPS * exponent).astype(jnp.float32) * _power_of_two(exponent)
  # The scale of a block with negative elements is below zero.
  return jnp.where(signed & (code < _SIGN), -number, number) * scale


def _power_of_two(exponent: Array) -> Array:
  return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _of_blocks(reduce, x: Array, block: Sequence[int]) -> Array:
  """Reduces each block to one number.

  Dim by dim, the first ones first: on TPUs, taking apart the last dim moves elements, and then
  there are fewer of them.
  """
  for dim, size in enumerate(block):
    if size > 1:
      shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
      x = reduce(x.reshape(shape), axis=dim + 1)
  return x


def _spread(x: Array, block: Sequence[int]) -> Array:
  """Returns the number of its block for each element."""
  for dim in reversed(range(x.ndim)):
    if block[dim] > 1:
      wide = (*x.shape[: dim + 1], block[dim], *x.shape[dim + 1 :])
      x = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), wide)
      x = x.reshape((*x.shape[:dim], -1, *x.shape[dim + 2 :]))
  return x
