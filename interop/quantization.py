"""Quantized weights of a model folder: tensors of several entries of its files, decoded when read.

A tensor with the methods of `Weights` is read like one that is stored as it is.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from interop import mxfp4
from interop.fp8_blocks import Fp8Blocks
from interop.mxfp4 import Mxfp4
from interop.safetensors_file import DTYPES, Reader, Stored

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
    if name.endswith(_BLOCKS) and one.shape[-1] != mxfp4.GROUP // 2:
      wrong.append(f"{name} has {one.shape[-1]} bytes in a block; {mxfp4.GROUP // 2} are read")
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
