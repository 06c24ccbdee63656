"""Optimizer state and parameters in fewer bytes: bfloat16, or 8-bit blocks; rounded stochastically.

Moments are computed in float32. An array of the state counts as a moment if it belongs to a
parameter and has its shape, is float32, and does not begin as a copy of the parameter (which
averages do). Those of scales and biases, and small ones, stay float32.

Rounded to the nearest, an update of less than half the distance between two stored numbers is lost,
in every step again; rounded up or down by chance, its expected value is the number itself. Source:
arXiv:2010.06192. The random bits of an element follow from the seed, the step, the array's name and
the element's index in the whole array. So they are the same on every mesh and after a resume, and
each device computes those of its shards.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt8, UInt32

from models.mup import STACKS, VECTORS
from partitioning.rules import Path, kept_by_trial, leaves_by_path, letters_of, named_leaves, owners
from training.optimizers.spec import OptimizerSpec

# ------------------------------ stochastic rounding ------------------------------

_BITS = 16  # of a word that rounding uses, the upper ones
# Of a 32-bit mixing function, found by search: https://github.com/skeeto/hash-prospector
_FACTORS, _SHIFTS = (0x7FEB352D, 0x846CA68B), (16, 15, 16)
_PURPOSE = 0x5EED  # sets these keys apart from those of dropout


def rounding_key(seed: int, step: Int[Array, ""]) -> UInt32[Array, " 2"]:
  """Returns two random words for a step, from which those of all elements follow."""
  drawn = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _PURPOSE), step)
  return jax.random.bits(drawn, (2,), jnp.uint32)


def rounding_words(
  key: UInt32[Array, " 2"], name: str, shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
  """Returns a random word for each element of an array.

  `jax.random.bits` would give as good ones, equal on every mesh too, in 80 times the time on CPUs.
  Elements whose indices differ by a multiple of 2**32 get the same word.

  Args:
    key: of the step.
    name: of the array.
    shape: of the whole array.
  """
  salt = zlib.crc32(name.encode())
  place = jnp.full(shape, 0, jnp.uint32) + _mixed(key[0] ^ jnp.uint32(salt))
  for dim in range(len(shape)):
    stride = math.prod(shape[dim + 1 :]) % 2**32
    place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
  return _mixed(_mixed(place) ^ _mixed(key[1] + jnp.uint32(salt)))


def _mixed(x: Array) -> Array:
  """Returns words in which each bit depends on all bits of x; a bijection."""
  for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return x ^ (x >> jnp.uint32(_SHIFTS[2]))


def fraction(words: UInt32[Array, "..."]) -> Float[Array, "..."]:
  """Returns float32 numbers from 0 to below 1, multiples of 2**-16."""
  return (words >> jnp.uint32(32 - _BITS)).astype(jnp.float32) * jnp.float32(2.0**-_BITS)


def to_bfloat16(x: Float[Array, "..."], words: UInt32[Array, "..."]) -> Float[Array, "..."]:
  """Rounds float32 to one of the two bfloat16 numbers around it, with the right expected value.

  A number that bfloat16 has stays; beyond the largest one is infinity, as for every rounding.

  Args:
    x: float32.
    words: random, of the same shape.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (words >> jnp.uint32(32 - _BITS))
  rounded = jax.lax.bitcast_convert_type((bits >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
  # Adding to the bits of a NaN could give those of a number.
  return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), rounded)


def rounded_parameters(seed: int, params: Any, step: Int[Array, ""]) -> Any:
  """Returns a step's updated parameters, a nested dict, rounded to bfloat16."""
  key = rounding_key(seed, step)
  rounded = [
    to_bfloat16(x, rounding_words(key, name, x.shape))
    for name, x in named_leaves(params, "params/").items()
  ]
  return jax.tree.unflatten(jax.tree.structure(params), rounded)


# ------------------------------ blocks of 128 elements ------------------------------
# 8 bits for each element, and a float32 scale for each block. Source of blocks with a scale of
# their own: arXiv:2110.02861. The 8 bits are a small floating-point number, not an integer: Adam
# divides one moment by the root of the other, so what counts is the relative error, also of
# elements that are far below the largest of their block.
#
# Where no element of a block is negative (second moments), the sign's bit widens the exponent. With
# the scale being 1, the code numbers are
#
#   4 bits of mantissa, 3 of exponent, a sign: 0, 1, ..., 31, 32, 34, ..., 62, 64, 68, ..., 1984
#   4 bits of mantissa, 4 of exponent:         0, 1, ..., 31, 32, 34, ..., 62, 64, 68, ..., 507904
#
# and the scale is that for which the largest element is the last of them. Beyond 32 neighbours
# differ by 3 to 6 percent. A positive number below the first code number of an unsigned block is
# rounded up: a second moment is divided by, so it may be too large but not 0. It is at least
# 1 / 507904 of the block's largest, its root 1 / 713, more than the 1 / 1984 of a first moment: an
# element whose moments are both below that gets no larger updates than others.

BLOCK = 128  # elements of a block
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
    while left[dim] % 2 == 0 and math.prod(block) < BLOCK:
      halve(dim)
  others = [i for i in range(len(shape)) if not apart[i] and not whole[i]]
  while math.prod(block) < BLOCK:
    powers = {i: left[i] & -left[i] for i in others}  # the largest power of two that divides it
    dim = max(powers, key=powers.__getitem__, default=None)
    if dim is None or powers[dim] == 1:
      return None
    halve(dim)
  return tuple(block)


def encode_blocks(
  x: Float[Array, "..."], block: Sequence[int], words: UInt32[Array, "..."]
) -> Blocks:
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
  part = value * _power_of_two(-exponent) + fraction(words)
  code = jnp.floor(part).astype(jnp.int32) + _STEPS * exponent
  code = jnp.minimum(code, jnp.where(signed, _LAST_SIGNED, _LAST))
  unsigned = jnp.where((x > 0) & (scale > 0), jnp.maximum(code, 1), code)
  code = jnp.where(signed, code | jnp.where(x < 0, _SIGN, 0), unsigned)
  return Blocks(code.astype(jnp.uint8), blocks)


def decode_blocks(blocks: Blocks) -> Float[Array, "..."]:
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


# ------------------------------ moments ------------------------------

LEAST = 4096  # elements; smaller arrays stay float32
# Dims, by name, that no mesh splits; and those that are numbers of separate arrays.
_WHOLE, _APART = ("head",), STACKS

# Path of a moment -> the shape of its blocks; None: it is stored in bfloat16.
Stored = dict[Path, tuple[int, ...] | None]


class NarrowState(NamedTuple):
  """The state of an optimizer whose moments are stored in another dtype.

  Attributes:
    count: int32 scalar, the number of updates, from which random bits follow.
    inner: the optimizer's own state, with bfloat16 arrays or `Blocks` in place of moments.
  """

  count: jax.Array
  inner: Any


def stored_narrow(
  spec: OptimizerSpec, optimizer: optax.GradientTransformation, params: Any
) -> optax.GradientTransformation:
  """Returns the optimizer with its moments stored as `optimizer.state_dtype` says.

  In an update they are decoded to float32, and rounded stochastically at its end.

  Args:
    spec: with `state_dtype`, bfloat16 or int8.
    optimizer: computes in the dtype of the parameters that it is given.
    params: nested dict of float32 arrays or ShapeDtypeStructs.

  Raises:
    ValueError: it has no state to which this applies.
  """
  dtype, dims = spec.state_dtype, _dims(spec, params)
  which = functools.partial(_moments, optimizer.init, dims=dims, in_blocks=dtype == "int8")
  if not which(params) and dtype != spec.parameter_dtype:
    in_blocks = f", and with a factor {BLOCK} in their dims" if dtype == "int8" else ""
    raise ValueError(
      f"optimizer.state_dtype={dtype}: it would apply to nothing in the state of {spec.name}: only "
      f"to moments of kernels and tables, of their shapes, with at least {LEAST} elements"
      f"{in_blocks}; leave it out, or choose an optimizer with moments, such as adamw"
    )

  def encoded(tree: Any, stored: Stored, count: jax.Array) -> Any:
    key = rounding_key(spec.seed, count)

    def one(path: Path, leaf: jax.Array) -> Any:
      if path not in stored:
        return leaf
      words = rounding_words(key, "/".join(path), leaf.shape)
      if (block := stored[path]) is None:
        return to_bfloat16(leaf, words)
      return encode_blocks(leaf, block, words)

    leaves = leaves_by_path(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), [one(*item) for item in leaves.items()])

  def init(params: Any) -> NarrowState:
    count = jnp.zeros((), jnp.int32)
    # Moments begin as constants, and XLA would take seconds to encode them while it compiles.
    first = jax.lax.optimization_barrier(optimizer.init(params))
    return NarrowState(count, encoded(first, which(params), count))

  def update(updates: Any, state: NarrowState, params: Any = None) -> tuple[Any, NarrowState]:
    stored = which(params)
    wide = jax.tree_util.tree_map_with_path(
      functools.partial(_decoded, stored), state.inner, is_leaf=_is_blocks
    )
    updates, inner = optimizer.update(updates, wide, params)
    count = state.count + 1
    return updates, NarrowState(count, encoded(inner, stored, count))

  return optax.GradientTransformation(init, update)


def _decoded(stored: Stored, path: Any, leaf: Any) -> jax.Array:
  if _is_blocks(leaf):
    return decode_blocks(leaf)
  name = tuple(jax.tree_util.keystr((part,), simple=True) for part in path)
  return leaf.astype(jnp.float32) if name in stored else leaf


def _is_blocks(node: Any) -> bool:
  return isinstance(node, Blocks)


def _moments(
  init: Callable[[Any], Any],
  params: Any,
  *,
  dims: Mapping[Path, Sequence[str]],
  in_blocks: bool,
) -> Stored:
  """Returns the moments that are stored narrower; the others are too small or fit no blocks."""
  parameters = leaves_by_path(params)
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  state = leaves_by_path(jax.eval_shape(init, params))
  copies = _from_parameters(init, params)
  found: Stored = {}
  whose = owners(state, parameters)
  # A square of a side (SOAP's) has the shape of a parameter whose dims are equal.
  equal = any(len(set(leaf.shape)) < len(leaf.shape) for leaf in parameters.values())
  kept = kept_by_trial(init, parameters) if equal else {}
  for (path, leaf), is_copy in zip(state.items(), copies, strict=True):
    owner = whose[path]
    if owner is None or is_copy or leaf.shape != parameters[owner].shape:
      continue
    if equal and tuple(range(leaf.ndim)) not in kept[path]:
      continue
    if leaf.dtype != jnp.float32 or leaf.size < LEAST or owner[-1].endswith(VECTORS):
      continue
    block = _block(leaf.shape, dims[owner]) if in_blocks else None
    if block is not None or not in_blocks:
      found[path] = block
  return found


def _block(shape: Sequence[int], dims: Sequence[str]) -> tuple[int, ...] | None:
  names = [*dims, *[""] * (len(shape) - len(dims))]  # of a model without letters, unnamed
  whole, apart = ([name in chosen for name in names] for chosen in (_WHOLE, _APART))
  return block_shape(shape, whole, apart)


def _dims(spec: OptimizerSpec, params: Any) -> dict[Path, list[str]]:
  """Returns parameter -> the names of its dims."""
  found = {}
  for path in leaves_by_path(params):
    letters = letters_of("/".join(path), spec.letters)
    found[path] = [spec.legend[letter].name for letter in letters if letter in spec.legend]
  return found


def _from_parameters(init: Callable[[Any], Any], params: Any) -> list[bool]:
  """Returns for each array of the first state whether it depends on the values of parameters."""
  with jax.numpy_dtype_promotion("standard"):
    jaxpr = jax.make_jaxpr(init)(params).jaxpr
  known = {id(x) for x in jaxpr.invars}
  for equation in jaxpr.eqns:
    if any(id(x) in known for x in equation.invars):
      known.update(id(x) for x in equation.outvars)
  return [id(x) in known for x in jaxpr.outvars]
