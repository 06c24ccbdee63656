"""MXFP4 weights, as gpt-oss's files have them: 4-bit values, 32 of which share a power of two.

A matrix [R, C] is `_blocks`, bytes [R, C / 32, 16] with two values each, the low four bits first,
and `_scales`, bytes [R, C / 32]: the exponent plus 127. Every value is one of bfloat16's. Source:
OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from interop.safetensors_file import Reader, Stored

GROUP = 32  # values of one scale
_BYTES = GROUP // 2
_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns bfloat16 [..., 32 G], exactly; beyond bfloat16's largest number, infinity.

  Args:
    blocks: uint8 [..., G, 16].
    scales: uint8 [..., G].
  """
  pairs = _pairs()[(scales[..., None].astype(np.uint16) << 8) | blocks]
  return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _pairs() -> np.ndarray:
  """Returns the two values of each scale and byte, 2 * bfloat16 as uint32 [65536]."""
  values = np.array([*_POSITIVE, *(-one for one in _POSITIVE)], np.float64)
  exponents = np.arange(256) - _BIAS
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
    return (*self.scales.shape[:-1], GROUP * self.scales.shape[-1])

  @property
  def size(self) -> int:
    """Returns the bytes of all that is read."""
    return self.blocks.size * 2 * np.dtype(ml_dtypes.bfloat16).itemsize

  def part(self, index: int) -> "Mxfp4":
    """Returns the matrices with this index along the first dim."""
    return Mxfp4(self.blocks.part(index), self.scales.part(index), self.dtype)

  def block(self, reader: Reader, rows: slice, columns: slice) -> np.ndarray:
    """Returns bfloat16 [rows, columns] of a matrix."""
    first, stop = columns.start // GROUP, -(-columns.stop // GROUP)
    scales = self.scales.block(reader, rows, slice(first, stop)).copy()
    blocks = self.blocks.block(reader, rows, slice(first * _BYTES, stop * _BYTES))
    found = decoded(blocks.reshape(*scales.shape, _BYTES), scales)
    return found[:, columns.start - first * GROUP : columns.stop - first * GROUP]
