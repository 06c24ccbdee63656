"""Frozen kernels in 8 or 4 bits per element, decoded inside of the matmul.

A block is BLOCK elements along the residual's width D, which every such kernel has; so whatever
splits the other dims cuts no block. In `int8` an element is a whole number from -127 to 127 times
the block's scale, its largest magnitude over 127. In `nf4` it is one of 16 quantiles of a normal
distribution times the block's largest magnitude, and two of them share a byte; the scales are
quantized again, GROUP of them along the kernel's last other dim: 8-bit steps from the middle
between the smallest and the largest. Source: arXiv:2305.14314 (QLoRA), section 3, where a group is
256 scales of any blocks, and steps start at its mean; that depends on the order of a sum, and bits
would differ between meshes.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from models.spec import QUANTIZED_PARTS, RESIDUAL
from partitioning.rules import Dim
from runtime.layer_kinds import QUANTIZED_BLOCK as BLOCK

GROUP = 64  # scales with one middle and one step; of a smaller dim, what divides it
# Appendix E of the paper.
NF4 = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_STEP = np.float32(1 / 127)  # multiplied by: XLA would turn a division by a constant into that
CODES, SCALES, STEPS, MIDDLES = QUANTIZED_PARTS
# Letters of the legend: blocks of D, and D in bytes of two elements.
_BLOCKS, _BYTES = "Ⓓ", "½"


def _grouped(letter: str) -> str:
  """Returns the letter of the groups of a dim: N gives Ⓝ."""
  return chr(ord(letter) - ord("a") + ord("ⓐ") if letter.islower() else ord(letter) + 0x2475)


def block_dims(legend: Mapping[str, Dim], dtype: str, kernels: list[str]) -> dict[str, Dim]:
  """Returns letter -> Dim of the parts of kernels, each with the name, and the axes, of its dim.

  Args:
    legend: of the model.
    dtype: `int8` or `nf4`.
    kernels: letters of those that are quantized.
  """
  width = legend[RESIDUAL.width]
  found = {_BLOCKS: dataclasses.replace(width, size=width.size // BLOCK, block=BLOCK)}
  if dtype == "nf4":
    found[_BYTES] = dataclasses.replace(width, size=width.size // 2)
    for letter in dict.fromkeys(_last(one) for one in kernels):
      dim = legend[letter]
      group = _group(dim.size)
      found[_grouped(letter)] = dataclasses.replace(dim, size=dim.size // group, block=group)
  return found


def _last(letters: str) -> str:
  return letters.replace(RESIDUAL.width, "")[-1]


def _group(size: int) -> int:
  return math.gcd(size, GROUP)


def _in_order(letters: str) -> str:
  """Returns the letters of a layer's kernel in the order in which it is stored: the width first.

  Only experts come before it. Of codes whose last dim is the width, the compiler for TPUs makes
  copies in another layout, of all layers.
  """
  first = letters[: letters.startswith("E")]
  return first + RESIDUAL.width + letters.removeprefix(first).replace(RESIDUAL.width, "")


def part_letters(letters: str, dtype: str) -> dict[str, str]:
  """Returns the last part of a name -> letters, of the arrays of a stacked kernel."""
  letters, width = letters[0] + _in_order(letters[1:]), RESIDUAL.width
  blocks = letters.replace(width, _BLOCKS)
  if dtype == "int8":
    return {CODES: letters, SCALES: blocks}
  groups = blocks.replace(_last(letters), _grouped(_last(letters)))
  return {
    CODES: letters.replace(width, _BYTES),
    SCALES: blocks,
    STEPS: groups,
    MIDDLES: groups,
  }


def decoded_letters(codes: str) -> str:
  """Returns the letters of a kernel, of those of its codes."""
  return codes.replace(_BYTES, RESIDUAL.width)


@dataclasses.dataclass(frozen=True)
class Format:
  """How a kernel is stored.

  Attributes:
    dtype: `int8` or `nf4`.
    place: of the width among the kernel's dims, counted from the last: others may come first.
    axis: of the width among the dims of what is stored, likewise; the last one is another.
  """

  dtype: str
  place: int
  axis: int
  last: ClassVar[int] = -1

  @classmethod
  def of(cls, letters: str, dtype: str) -> "Format":
    """Returns the format of kernels with these letters, those of a layer."""
    both = letters, _in_order(letters)
    return cls(dtype, *(one.index(RESIDUAL.width) - len(one) for one in both))

  @property
  def parts(self) -> tuple[str, ...]:
    """Returns the names of the arrays."""
    return QUANTIZED_PARTS[: 2 if self.dtype == "int8" else 4]

  def kernel_of(self, module: Any, factor: float = 1.0) -> "QuantizedKernel":
    """Returns the kernel that a module has in parameters of these names."""
    return QuantizedKernel({part: getattr(module, part)[...] for part in self.parts}, self, factor)

  def shape_of(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of the kernel, of what it is stored as."""
    shape = [*parts[CODES].shape]
    shape[self.axis] = BLOCK * parts[SCALES].shape[self.axis]
    return self.moved(shape)

  def moved(self, entries: Sequence) -> tuple:
    """Returns what there is for each dim of what is stored, in the order of the kernel's dims."""
    rank = len(entries)
    order = [n for n in range(rank) if n != rank + self.axis]
    order.insert(rank + self.place, rank + self.axis)
    return tuple(entries[n] for n in order)

  def encoded(self, kernel: Any, xp: ModuleType = jnp) -> dict[str, Any]:
    """Returns the arrays of a kernel, computed in float32, number by number but for the largest.

    So every sharding and every slice along other dims gives the same bits.

    Args:
      kernel: an array of `xp`.
      xp: jax.numpy; or numpy, which divides alike on hosts of all accelerators.
    """
    kernel = xp.moveaxis(kernel.astype(np.float32), self.place, self.axis)
    blocks = _split(kernel, self.axis, BLOCK)
    largest = xp.max(xp.abs(blocks), axis=self.axis)
    # Of a block of zeros any scale decodes to them.
    whole = xp.expand_dims(xp.where(largest > 0, largest, np.float32(1)), self.axis)
    if self.dtype == "int8":
      scales = whole * _STEP
      codes = xp.round(blocks / scales).astype(np.int8)
      return {CODES: codes.reshape(kernel.shape), SCALES: xp.squeeze(scales, self.axis)}
    normed = blocks / whole
    codes = xp.zeros(blocks.shape, np.uint8)
    for below, above in itertools.pairwise(NF4):
      codes += (normed > np.float32((below + above) / 2)).astype(np.uint8)
    low, high = xp.split(codes, 2, axis=self.axis)
    return {CODES: _merge(low | (high << np.uint8(4)), self.axis), **self._scales(largest, xp)}

  def _scales(self, largest: Any, xp: ModuleType) -> dict[str, Any]:
    """Returns the scales of `nf4`, quantized."""
    groups = _split(largest, self.last, _group(largest.shape[self.last]))
    high, low = (of(groups, axis=self.last, keepdims=True) for of in (xp.max, xp.min))
    middles = (high + low) * np.float32(0.5)
    steps = xp.max(xp.abs(groups - middles), axis=self.last, keepdims=True) * _STEP
    steps = xp.where(steps > 0, steps, np.float32(1))
    codes = xp.round((groups - middles) / steps).astype(np.int8)
    found = {SCALES: _merge(codes, self.last)}
    return found | {STEPS: _merge(steps, self.last), MIDDLES: _merge(middles, self.last)}

  def decoded(self, arrays: Mapping[str, Any]) -> jax.Array:
    """Returns the kernel in float32."""
    codes, scales = arrays[CODES], arrays[SCALES]
    if self.dtype == "int8":
      values = _split(codes, self.axis, BLOCK).astype(jnp.float32)
    else:
      packed = _split(codes, self.axis, BLOCK // 2)
      values = jnp.concatenate([_nf4(packed & 15), _nf4(packed >> 4)], axis=self.axis)
      groups = _split(scales, self.last, _group(scales.shape[self.last])).astype(jnp.float32)
      steps, middles = (jnp.expand_dims(arrays[x], self.last) for x in (STEPS, MIDDLES))
      scales = _merge(groups * steps + middles, self.last)
    kernel = _merge(values * jnp.expand_dims(scales, self.axis), self.axis)
    return jnp.moveaxis(kernel, self.axis, self.place)


def _split(x: Any, axis: int, size: int) -> Any:
  """Returns an array with a dim, counted from the last, in parts: their number, and then `size`."""
  place = x.ndim + axis
  return x.reshape(*x.shape[:place], -1, size, *x.shape[place + 1 :])


def _merge(x: Any, axis: int) -> Any:
  """Returns an array without the parts of `_split`."""
  place = x.ndim + axis
  return x.reshape(*x.shape[: place - 1], -1, *x.shape[place + 1 :])


def _nf4(codes: jax.Array) -> jax.Array:
  """Returns the values of codes from 0 to 15, by choices, which compilers fuse with the matmul."""
  values: list[Any] = [jnp.float32(one) for one in NF4]
  for bit in (1, 2, 4, 8):
    pairs = zip(values[::2], values[1::2], strict=True)
    values = [jnp.where((codes & bit) > 0, odd, even) for even, odd in pairs]
  return values[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel:
  """A kernel that is decoded where it is cast, which is the first thing that a matmul does to it.

  A matmul saves for its backward pass what it was given, so that is the codes.

  Attributes:
    arrays: of `Format.encoded`.
    format: how they are stored.
    factor: of the decoded kernel.
  """

  arrays: Mapping[str, Any]
  format: Format = dataclasses.field(metadata={"static": True})
  factor: float = dataclasses.field(default=1.0, metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns that of the decoded kernel."""
    return self.format.shape_of(self.arrays)

  def astype(self, dtype: jnp.dtype) -> jax.Array:
    """Returns the decoded kernel, rounded once."""
    kernel = self.format.decoded(self.arrays)
    return (kernel if self.factor == 1.0 else kernel * jnp.float32(self.factor)).astype(dtype)
