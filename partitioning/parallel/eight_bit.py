"""Matmuls with 8-bit operands, forward and backward; what is gathered for them is 8-bit too.

Y = X W becomes Y = X' W', where ' is what rounding to 8 bits leaves. Gradients pass the rounding
unchanged (straight-through estimator, arXiv:1308.3432):

- int8: each token of X has a scale, and each output of W. dX = (dY s)' (W' / s)^T, where s are the
  scales of W and each token of dY s has one: W is rounded once for both passes. dW = X'^T dY is not
  in 8 bits: it contracts over tokens, and needs more of them (arXiv:2304.13013).
- float8: one scale for each array; X and W as e4m3, dY as e5m2 (arXiv:2209.05433).
  dX = dY' W'^T and dW = X'^T dY' are in 8 bits too.

A scale is the largest magnitude over the largest number of the format. The magnitude is reduced
over the mesh axes that split what it belongs to, so the mesh does not change what is computed. A
kernel is rounded on its shards, and all-gathered in 8 bits, with its scales; gradients are reduced
in the compute dtype.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from partitioning.constraints import automatic_layout, manual_axes
from partitioning.dims import Axes
from partitioning.parallel import collectives
from partitioning.parallel.sharded_function import GATHERED, SEQUENCE_DIM, Stored

INT8, FLOAT8 = "int8", "float8"
# Of operands in the forward pass, and of gradients.
_FORMATS = {
  INT8: (jnp.int8, jnp.int8),
  FLOAT8: (jnp.float8_e4m3fn, jnp.float8_e5m2),
}
_LARGEST = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
_TOKENS = 2  # batch and sequence, the first dims of an activation
MAGNITUDES = 3  # of a kernel's matmuls: of inputs, kernel and gradients


@dataclasses.dataclass(frozen=True)
class EightBit:
  """How to multiply by a weight in 8 bits, which `weight.eight_bit()` returns where it is so.

  Attributes:
    dtype: int8 or float8.
    known: delayed scaling (float8): the largest magnitudes of earlier steps, scalars: of inputs,
      kernel and gradients, 0 where none is known yet. Their cotangents are the magnitudes of this
      step. (): current scaling, by the arrays' own.
  """

  dtype: str
  known: tuple[jax.Array, ...] = ()


@jax.custom_vjp
def known(history: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the largest magnitudes of earlier steps as scalars, for `EightBit`.

  Args:
    history: [MAGNITUDES, steps], the latest first, 0 of steps that were not taken. Its cotangent
      has this step's magnitudes in the place of the latest, and zeros.
  """
  return tuple(jnp.max(history, axis=1))


def _known_forward(history: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
  return known(history), history


def _known_backward(history: jax.Array, seen: tuple[jax.Array, ...]) -> tuple[jax.Array]:
  return (jnp.zeros_like(history).at[:, 0].set(jnp.stack(seen)),)


known.defvjp(_known_forward, _known_backward)


def advanced(history: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns a history with a step's magnitudes; those that are not finite count as not known.

  Args:
    history: [..., steps], as in `known`.
    seen: the cotangent of it, of one step.
  """
  latest = seen[..., :1]
  latest = jnp.where(jnp.isfinite(latest), latest, jnp.zeros_like(latest))
  return jnp.concatenate([latest, history[..., :-1]], axis=-1)


class Rounded(NamedTuple):
  """Numbers in 8 bits, and their scale, of as many dims; of size 1 where numbers share one."""

  values: jax.Array
  scale: jax.Array


class Products:
  """The products of an activation with some kernels, in 8 bits."""

  def __init__(self, dtype: str, x: str, stored_x: str, outputs: Sequence[str]):
    """Takes letters. Not inside a manual region, where no axis is left to split them.

    Args:
      dtype: int8 or float8.
      x: of the activation as it is multiplied: batch, sequence, then the contracted dims.
      stored_x: of the activation as it is given.
      outputs: of each product: batch, sequence, then the kernel's other dims.
    """
    self.by_token, self.formats = dtype == INT8, _FORMATS[dtype]
    self.contracted = len(x) - _TOKENS
    contracted = _split(x[_TOKENS:])
    self.over_x = contracted if self.by_token else _split(stored_x)
    skipped = _TOKENS if self.by_token else 0
    self.over_outputs = [_split(letters[skipped:]) for letters in outputs]
    # `jax.shard_map` divides the gradient of a result by the number of its copies, see
    # `collectives.total`, which multiplies it back.
    sizes = automatic_layout()[1]
    left = ({*sizes} - manual_axes() - {*contracted, *_split(letters)} for letters in outputs)
    self.copies = [math.prod(sizes[axis] for axis in axes) for axes in left]

  def __call__(
    self,
    manual: bool,
    x: jax.Array,
    kernels: Sequence[Stored],
    known: Sequence[jax.Array] = (),
    sequence: Axes = (),
  ) -> list[jax.Array]:
    """Returns the products in the dtype of x, summed over a device's part of the contracted dims.

    Args:
      manual: whether this is inside a manual region.
      x: the activation.
      kernels: as they are stored, the contracted dims last.
      known: those of `EightBit`, of one kernel after the other.
      sequence: the axes along which the sequence of x is to be gathered.
    """
    ways = [dataclasses.replace(kernel, shard=None) for kernel in kernels]
    calculation = _Calculation(self, manual, ways, sequence, bool(known))
    products = jax.custom_vjp(calculation.products)
    products.defvjp(calculation.forward, calculation.backward)
    return products(x, [kernel.shard for kernel in kernels], list(known))

  def shared(self, ndim: int, kept: int) -> range:
    """Returns the dims of an array whose numbers share a scale; `kept` dims stand before them."""
    return range(kept if self.by_token else 0, ndim)


class _Calculation:
  """Both passes of `Products`, for `jax.custom_vjp`."""

  def __init__(
    self, letters: Products, manual: bool, ways: Sequence[Stored], sequence: Axes, delayed: bool
  ):
    self._letters, self._manual, self._ways, self._delayed = letters, manual, ways, delayed
    self._sequence = sequence

  def products(self, x: jax.Array, shards: list, known: list) -> list[jax.Array]:
    """Returns the products."""
    return self.forward(x, shards, known)[0]

  def forward(self, x: jax.Array, shards: list, known: list) -> tuple[list[jax.Array], tuple]:
    """Returns the products, and what the backward pass needs."""
    letters, wide = self._letters, _wide(x)
    to, contracted = letters.formats[0], letters.contracted
    shared = letters.shared(x.ndim, _TOKENS)
    inputs = _rounded(x, shared, letters.over_x if self._manual else (), to, known[:1])
    inputs = _gathered(inputs, [(SEQUENCE_DIM, self._sequence)] if self._sequence else [], shared)
    weights, results = [], []
    for number, (shard, way) in enumerate(zip(shards, self._ways, strict=True)):
      shared = letters.shared(shard.ndim, shard.ndim - contracted)
      over = tuple(axis for dim in shared for axis in way.axes[dim])
      weight = _rounded(shard, shared, over, to, known[MAGNITUDES * number + 1 :][:1])
      weight = _gathered(weight, way.moves, shared)
      weights.append(checkpoint_name(weight, GATHERED) if way.moves else weight)
      last = [range(array.ndim - contracted, array.ndim) for array in (x, shard)]
      product = _dot(inputs.values, weights[-1].values, last, wide)
      scale = _of_tokens(inputs.scale, product.ndim) * _of_outputs(weights[-1].scale, contracted)
      results.append((product * scale).astype(x.dtype))
    seen = (x, shards, known) if self._delayed else (None, None, known)
    return results, (inputs, weights, seen)

  def backward(self, saved: tuple, gradients: list[jax.Array]) -> tuple[jax.Array, list, list]:
    """Returns the gradients of the activation and of each shard, and the magnitudes seen."""
    inputs, weights, (x, shards, known) = saved
    of_x, of_shards, seen = 0.0, [], []
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
      copies = self._letters.copies[number] if self._manual else 1
      before = [one / copies for one in known[MAGNITUDES * number + 2 :][:1]]
      part, of_kernel = self._of_product(number, inputs, weight, gradient, before)
      of_x = part + of_x
      for dim, axes in reversed(self._ways[number].moves):
        of_kernel = collectives.reduce_scatter(of_kernel, axes, dim)
      of_shards.append(of_kernel)
      if self._delayed:
        wide = gradient.astype(_wide(gradient))
        seen += self._seen(x, shards[number], wide * copies, known[0].dtype)
    of_x = of_x.astype(gradients[0].dtype)
    if self._sequence:
      of_x = collectives.reduce_scatter(of_x, self._sequence, SEQUENCE_DIM)
    return of_x, of_shards, seen

  def _of_product(
    self, number: int, inputs: Rounded, weight: Rounded, gradient: jax.Array, before: list
  ) -> tuple[jax.Array, jax.Array]:
    """Returns what one product gives to dX, in float32 or wider, and dW before its reduction."""
    letters, wide, to = self._letters, _wide(gradient), self._ways[number].gradient_dtype
    over = letters.over_outputs[number] if self._manual else ()
    given = gradient.astype(wide)
    if letters.by_token:
      given = given * _of_outputs(weight.scale, letters.contracted)
    shared = letters.shared(given.ndim, _TOKENS)
    rounded = _rounded(given, shared, over, letters.formats[1], before)
    outputs, tokens = range(_TOKENS, given.ndim), [range(_TOKENS)] * 2
    of_x = _dot(rounded.values, weight.values, (outputs, range(len(outputs))), wide)
    of_x = of_x * _of_tokens(rounded.scale, of_x.ndim)
    if letters.by_token:
      dequantized = (inputs.values.astype(wide) * inputs.scale).astype(gradient.dtype)
      return of_x, _dot(gradient, dequantized, tokens, to, precise=True)
    scales = [one.scale.reshape(()) for one in (weight, rounded, inputs)]
    of_kernel = _dot(rounded.values, inputs.values, tokens, wide) * (scales[1] * scales[2])
    return of_x * scales[0], of_kernel.astype(to)

  def _seen(
    self, x: jax.Array, shard: jax.Array, gradient: jax.Array, dtype: jnp.dtype
  ) -> list[jax.Array]:
    """Returns the magnitudes of this step as cotangents, which the other devices add zeros to."""
    seen = jnp.stack([jnp.max(jnp.abs(array)).astype(dtype) for array in (x, shard, gradient)])
    if self._manual:
      axes = tuple(sorted(manual_axes()))
      seen = _largest_over(seen, axes)
      first = jax.lax.axis_index(axes) == 0
      seen = jnp.where(first, seen, jnp.zeros_like(seen))
    return list(seen)


def _split(letters: str) -> Axes:
  """Returns the axes that split these dims of an activation; none of a dim that is replicated."""
  layout, sizes = automatic_layout()
  found = []
  for dim in (layout.legend[letter] for letter in letters):
    axes = [axis for axis in layout.table[dim.name] if sizes[axis] > 1]
    replicated = dim.may_replicate and dim.size % math.prod(sizes[axis] for axis in axes)
    found += [] if replicated else axes
  return tuple(found)


def _wide(x: jax.Array) -> jnp.dtype:
  """Returns float32, or the dtype of x if that is wider."""
  return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def _rounded(
  x: jax.Array, shared: range, over: Axes, to: type, known: Sequence[jax.Array]
) -> Rounded:
  """Rounds an array to 8 bits.

  Args:
    x: the array, or a device's part of it.
    shared: the dims whose numbers share a scale.
    over: the axes that split those dims.
    to: the format.
    known: the magnitude of earlier steps, for delayed scaling, or nothing.
  """
  x = x.astype(_wide(x))
  largest, dtype = _LARGEST[to], x.dtype

  def here() -> jax.Array:
    return jnp.max(jnp.abs(x), axis=tuple(shared), keepdims=True)

  if known:
    [before] = known
    before_wide = before.astype(dtype).reshape((1,) * x.ndim)

    def reduced_where_needed() -> jax.Array:
      return jax.lax.cond(before > 0, lambda: before_wide, lambda: _largest_over(here(), over))

    def reduced() -> jax.Array:  # no collective inside a conditional: see `collectives.in_turn`
      return _largest_over(jax.lax.cond(before > 0, lambda: before_wide, here), over)

    magnitude = jax.lax.platform_dependent(cpu=reduced, default=reduced_where_needed)
  else:
    magnitude = _largest_over(here(), over)
  # At least the smallest normal number, for arrays of zeros. NaN stays NaN, and what is not finite
  # makes the scale so, and with it the result.
  scale = jnp.maximum(magnitude / largest, jnp.finfo(dtype).tiny)
  values = jnp.clip(x * (1 / scale), -largest, largest)
  return Rounded((jnp.round(values) if to == jnp.int8 else values).astype(to), scale)


def _largest_over(magnitude: jax.Array, axes: Axes) -> jax.Array:
  """Returns the largest magnitude on the devices along the axes; infinity if one of them is NaN."""
  if not axes:
    return magnitude
  # On CPUs the maximum over devices leaves NaN out.
  return jax.lax.pmax(jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude), axes)


def _gathered(one: Rounded, moves: Sequence[tuple[int, Axes]], shared: range) -> Rounded:
  """All-gathers the numbers, and the scales along the dims in which they differ."""
  values, scale = one
  # As integers: XLA for CPUs would send float8 as float16 (jax 0.10.2).
  bits = jax.lax.bitcast_convert_type(values, jnp.int8)
  for dim, axes in moves:
    bits = collectives.all_gather(bits, axes, dim)
    if dim not in shared:
      scale = collectives.all_gather(scale, axes, dim)
  return Rounded(jax.lax.bitcast_convert_type(bits, values.dtype), scale)


def _dot(
  a: jax.Array,
  b: jax.Array,
  contracted: Sequence[range],
  dtype: jnp.dtype,
  *,
  precise: bool = False,
) -> jax.Array:
  """Contracts dims of two arrays: integers exactly, in int32, and others in `dtype`.

  Args:
    a: its other dims are the first of the result.
    b: likewise, the last.
    contracted: the dims of both.
    dtype: of the result.
    precise: whether `training.matmul_precision` applies.
  """
  exact = a.dtype == jnp.int8
  result = jax.lax.dot_general(
    a,
    b,
    (tuple(map(tuple, contracted)), ((), ())),
    precision=None if precise else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.int32 if exact else dtype,
  )
  return result.astype(dtype)


def _of_tokens(scale: jax.Array, ndim: int) -> jax.Array:
  """Returns the scale of an activation, for an array of the same tokens with `ndim` dims."""
  return scale.reshape(*scale.shape[:_TOKENS], *(1,) * (ndim - _TOKENS))


def _of_outputs(scale: jax.Array, contracted: int) -> jax.Array:
  """Returns the scale of a kernel for its products: after tokens, and without contracted dims."""
  return scale.reshape(*(1,) * _TOKENS, *scale.shape[: scale.ndim - contracted])
