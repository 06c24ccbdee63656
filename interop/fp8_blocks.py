"""Weights in float8_e4m3fn with a scale for each block of a matrix, as DeepSeek-V3's files.

`NAME.weight` [R, C] is multiplied by `NAME.weight_scale_inv`, float32 with an element for each 128
x 128 elements; the last blocks of a row and of a column may be smaller. Source: arXiv:2412.19437,
section 3.3.2; the names are those of the published files.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from interop.safetensors_file import Reader, Stored


def decoded(
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
  return _values()[weights] * scales.astype(np.float32)


@functools.cache
def _values() -> np.ndarray:
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
    return decoded(weights, scales, self.block_shape, first)
