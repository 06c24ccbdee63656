"""Quantized weights of a model folder: tensors of several entries of its files, decoded when read.

A tensor with the methods of `Weights` is read like one that is stored as it is.

DeepSeek-V3's files have float8_e4m3fn with a scale for each block of a matrix: `NAME.weight` [R, C]
is multiplied by `NAME.weight_scale_inv`, float32 with an element for each 128 x 128 elements; the
last blocks of a row and of a column may be smaller. Source: arXiv:2412.19437, section 3.3.2; the
names are those of the published files.

gpt-oss's have MXFP4, 4-bit values, 32 of which share a power of two. A matrix [R, C] is `_blocks`,
bytes [R, C / 32, 16] with two values each, the low four bits first, and `_scales`, bytes
[R, C / 32]: the exponent plus 127. Every value is one of bfloat16's. Source: OCP Microscaling
Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Protocol

import ml_dtypes
import numpy as np

from interop.safetensors_file import DTYPES, Reader, Stored

# ------------------------------ float8 with a scale for each block ------------------------------


def decoded_fp8(
  weights: np.ndarray, scales: np.ndarray, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> np.ndarray:
  """Returns float32 [rows, columns]: each value times the scale of its block.

  Args:
    weights: uint8 [rows, columns], the bits of float8_e4m3fn.
    scales: those of the blocks that have a value here.
    block: rows and columns of a block.
    first: row and column of the first value, in its block.
  """
  for axis, (size, start) in enumerate(zip(block, first, strict=True)):
    of_each = (start + np.arange(weights.shape[axis])) // size
    scales = np.take(scales, of_each, axis=axis)
  return _fp8_values()[weights] * scales.astype(np.float32)


@functools.cache
def _fp8_values() -> np.ndarray:
  """Returns the value of each byte, float32 [256]."""
  return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Fp8Blocks:
  """A matrix, or several along leading dims, that is decoded where it is read.

  Attributes:
    weights: float8_e4m3fn [..., R, C].
    scales: [..., ceil(R / rows), ceil(C / columns)].
    block_shape: rows and columns of a block.
    dtype: in which the model is published without blocks; it is read in float32.
  """

  weights: Stored
  scales: Stored
  block_shape: tuple[int, int]
  dtype: str = "BF16"

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns [..., R, C]."""
    return self.weights.shape

  @property
  def size(self) -> int:
    """Returns the bytes of all that is read."""
    return self.weights.size * np.dtype(np.float32).itemsize

  def part(self, index: int) -> "Fp8Blocks":
    """Returns the matrices with this index along the first dim."""
    parts = self.weights.part(index), self.scales.part(index)
    return Fp8Blocks(*parts, self.block_shape, self.dtype)

  def block(self, reader: Reader, rows: slice, columns: slice) -> np.ndarray:
    """Returns float32 [rows, columns]."""
    height, width = self.block_shape
    across = slice(columns.start // width, -(-columns.stop // width))
    down = slice(rows.start // height, -(-rows.stop // height))
    scales = self.scales.block(reader, down, across).copy()
    weights = self.weights.block(reader, rows, columns)
    first = rows.start % height, columns.start % width
    return decoded_fp8(weights, scales, self.block_shape, first)


# ------------------------------ MXFP4 ------------------------------

MXFP4_GROUP = 32  # values of one scale
_MXFP4_BYTES = MXFP4_GROUP // 2
_MXFP4_BIAS = 127
_MXFP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign


def decoded_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns bfloat16 [..., 32 G], exactly; beyond bfloat16's largest number, infinity.

  Args:
    blocks: uint8 [..., G, 16].
    scales: uint8 [..., G].
  """
  pairs = _mxfp4_pairs()[(scales[..., None].astype(np.uint16) << 8) | blocks]
  return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _mxfp4_pairs() -> np.ndarray:
  """Returns the two values of each scale and byte, 2 * bfloat16 as uint32 [65536]."""
  values = np.array([*_MXFP4_POSITIVE, *(-one for one in _MXFP4_POSITIVE)], np.float64)
  exponents = np.arange(256) - _MXFP4_BIAS
  every = np.ldexp(values, exponents[:, None])  # [scale, four bits]
  both = np.stack([np.tile(every, 16), np.repeat(every, 16, axis=1)], axis=-1)
  with np.errstate(over="ignore"):
    return both.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint32)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
  """A matrix, or several along leading dims, that is decoded where it is read.

  Attributes:
    blocks: uint8 [..., R, G, 16].
    scales: uint8 [..., R, G].
    dtype: of what is read, in the names of safetensors.
  """

  blocks: Stored
  scales: Stored
  dtype: str = "BF16"

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns [..., R, 32 G]."""
    return (*self.scales.shape[:-1], MXFP4_GROUP * self.scales.shape[-1])

  @property
  def size(self) -> int:
    """Returns the bytes of all that is read."""
    return self.blocks.size * 2 * np.dtype(ml_dtypes.bfloat16).itemsize

  def part(self, index: int) -> "Mxfp4":
    """Returns the matrices with this index along the first dim."""
    return Mxfp4(self.blocks.part(index), self.scales.part(index), self.dtype)

  def block(self, reader: Reader, rows: slice, columns: slice) -> np.ndarray:
    """Returns bfloat16 [rows, columns] of a matrix."""
    first, stop = columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP)
    scales = self.scales.block(reader, rows, slice(first, stop)).copy()
    blocks = self.blocks.block(reader, rows, slice(first * _MXFP4_BYTES, stop * _MXFP4_BYTES))
    found = decoded_mxfp4(blocks.reshape(*scales.shape, _MXFP4_BYTES), scales)
    return found[:, columns.start - first * MXFP4_GROUP : columns.stop - first * MXFP4_GROUP]


# ------------------------------ tensors of several entries ------------------------------

_BLOCKS, _SCALES = "_blocks", "_scales"
_INVERSE = "_scale_inv"


class Weights(Protocol):
  """A tensor of a folder.

  Attributes:
    dtype: in the names of safetensors.
    shape: of the values.
    size: of the values that are read, in bytes.
  """

  dtype: str
  shape: tuple[int, ...]
  size: int

  def part(self, index: int) -> "Weights":
    """Returns what has this index along the first dim."""
    ...

  def block(self, reader: Reader, rows: slice, columns: slice) -> np.ndarray:
    """Returns [rows, columns] of a matrix; valid until the reader's next call."""
    ...


def combined(
  stored: Mapping[str, Stored], block: tuple[int, int]
) -> tuple[dict[str, Weights], list[str]]:
  """Returns a folder's tensors; those that are quantized are made of two entries of its files.

  MXFP4's has the name of its blocks (`NAME_blocks`, `NAME_scales`), FP8's that of its weights
  (`NAME`, `NAME_scale_inv`).

  Args:
    stored: name -> entry.
    block: rows and columns of a block of FP8.

  Returns:
    Name -> tensor; and a line for each of which the scales do not fit.
  """
  found: dict[str, Weights] = {}
  wrong, used = [], set()
  for name, one in stored.items():
    scales = _scales_of(name, one)
    if scales not in stored:
      found[name] = one
      continue
    used.add(scales)
    if name.endswith(_BLOCKS) and one.shape[-1] != MXFP4_GROUP // 2:
      wrong.append(f"{name} has {one.shape[-1]} bytes in a block; {MXFP4_GROUP // 2} are read")
      continue
    shape, kinds = _scales_shape(name, one, block)
    if stored[scales].shape != shape or stored[scales].dtype not in kinds:
      there = f"{stored[scales].dtype}{list(stored[scales].shape)}"
      wanted = f"{kinds[0]}{list(shape)}"
      wrong.append(f"{scales} is {there}, and {name} {one.dtype}{list(one.shape)} needs {wanted}")
    elif name.endswith(_BLOCKS):
      found[name] = Mxfp4(one, stored[scales])
    else:
      found[name] = Fp8Blocks(one, stored[scales], block)
  return {name: one for name, one in found.items() if name not in used}, wrong


def _scales_of(name: str, one: Stored) -> str:
  """Returns the name of a quantized tensor's scales; "" of one that is not."""
  if name.endswith(_BLOCKS) and one.dtype == "U8" and len(one.shape) > 2:
    return name.removesuffix(_BLOCKS) + _SCALES
  return name + _INVERSE if one.dtype == "F8_E4M3" and len(one.shape) > 1 else ""


def _scales_shape(
  name: str, one: Stored, block: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """Returns the shape of a quantized tensor's scales, and the dtypes that they may have."""
  if name.endswith(_BLOCKS):
    return one.shape[:-1], ("U8",)
  blocks = (-(-size // part) for size, part in zip(one.shape[-2:], block, strict=True))
  return (*one.shape[:-2], *blocks), ("F32", *DTYPES)
