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
from partitioning.dtypes import MAGNITUDES
from partitioning.parallel import collective_matmul, collectives
from partitioning.parallel.sharded_function import GATHERED, SEQUENCE_DIM, Stored
from partitioning.rules import Axes

# ------------------------------ numbers and their scales ------------------------------

TOKENS = 2  # batch and sequence, the first dims of an activation
_LARGEST = {jnp.int8: 127.0, jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}


class Rounded(NamedTuple):
  """Numbers in 8 bits, and their scale, of as many dims; of size 1 where numbers share one."""

  values: jax.Array
  scale: jax.Array


def scale_dtype(x: jax.Array) -> jnp.dtype:
  """Returns float32, or the dtype of x if that is wider."""
  return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def rounded_to_8_bits(
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
  x = x.astype(scale_dtype(x))
  largest, dtype = _LARGEST[to], x.dtype

  def here() -> jax.Array:
    return jnp.max(jnp.abs(x), axis=tuple(shared), keepdims=True)

  if known:
    [before] = known
    before_wide = before.astype(dtype).reshape((1,) * x.ndim)

    def reduced_where_needed() -> jax.Array:
      return jax.lax.cond(before > 0, lambda: before_wide, lambda: largest_over(here(), over))

    def reduced() -> jax.Array:  # no collective inside a conditional: see `collectives.in_turn`
      return largest_over(jax.lax.cond(before > 0, lambda: before_wide, here), over)

    magnitude = jax.lax.platform_dependent(cpu=reduced, default=reduced_where_needed)
  else:
    magnitude = largest_over(here(), over)
  # At least the smallest normal number, for arrays of zeros. NaN stays NaN, and what is not finite
  # makes the scale so, and with it the result.
  scale = jnp.maximum(magnitude / largest, jnp.finfo(dtype).tiny)
  values = jnp.clip(x * (1 / scale), -largest, largest)
  return Rounded((jnp.round(values) if to == jnp.int8 else values).astype(to), scale)


def largest_over(magnitude: jax.Array, axes: Axes) -> jax.Array:
  """Returns the largest magnitude on the devices along the axes; infinity if one of them is NaN."""
  if not axes:
    return magnitude
  # On CPUs the maximum over devices leaves NaN out.
  return jax.lax.pmax(jnp.where(jnp.isnan(magnitude), jnp.inf, magnitude), axes)


def gathered_in_8_bits(one: Rounded, moves: Sequence[tuple[int, Axes]], shared: range) -> Rounded:
  """All-gathers the numbers, and the scales along the dims in which they differ."""
  values, scale = one
  # As integers: XLA for CPUs would send float8 as float16 (jax 0.10.2).
  bits = jax.lax.bitcast_convert_type(values, jnp.int8)
  for dim, axes in moves:
    bits = collectives.all_gather(bits, axes, dim)
    if dim not in shared:
      scale = collectives.all_gather(scale, axes, dim)
  return Rounded(jax.lax.bitcast_convert_type(bits, values.dtype), scale)


def contracted_in_8_bits(
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


def scale_of_tokens(scale: jax.Array, ndim: int) -> jax.Array:
  """Returns the scale of an activation, for an array of the same tokens with `ndim` dims."""
  return scale.reshape(*scale.shape[:TOKENS], *(1,) * (ndim - TOKENS))


def scale_of_outputs(scale: jax.Array, contracted: int) -> jax.Array:
  """Returns the scale of a kernel for its products: after tokens, and without contracted dims."""
  return scale.reshape(*(1,) * TOKENS, *scale.shape[: scale.ndim - contracted])


# ------------------------------ products ------------------------------

INT8, FLOAT8 = "int8", "float8"
# Of operands in the forward pass, and of gradients.
_FORMATS = {
  INT8: (jnp.int8, jnp.int8),
  FLOAT8: (jnp.float8_e4m3fn, jnp.float8_e5m2),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
  """The products of an activation with some kernels, in 8 bits.

  Attributes:
    by_token: whether tokens and outputs have scales of their own (int8), or an array has one.
    formats: of operands in the forward pass, and of gradients.
    contracted: the number of dims.
    over_x: the axes that split what shares a scale of the activation.
    over_outputs: likewise of the gradient of each product.
    copies: of each product, on devices along other axes.
    manual: whether this is inside a manual region; from here on, of a call.
    ways: the kernels without their arrays.
    delayed: whether scales are those of earlier steps.
    gathered: the axes along which the sequence is gathered before the products.
    scattered: those along which sums are reduce-scattered after it, in a ring.
    ring: whether the gather is a ring too.
  """

  by_token: bool
  formats: tuple[type, type]
  contracted: int
  over_x: Axes
  over_outputs: Sequence[Axes]
  copies: Sequence[int]
  manual: bool = False
  ways: Sequence[Stored] = ()
  delayed: bool = False
  gathered: Axes = ()
  scattered: Axes = ()
  ring: bool = False

  @classmethod
  def of(cls, dtype: str, x: str, stored_x: str, outputs: Sequence[str]) -> "Products":
    """Takes letters. Not inside a manual region, where no axis is left to split them.

    Args:
      dtype: int8 or float8.
      x: of the activation as it is multiplied: batch, sequence, then the contracted dims.
      stored_x: of the activation as it is given.
      outputs: of each product: batch, sequence, then the kernel's other dims.
    """
    by_token, contracted = dtype == INT8, _split(x[TOKENS:])
    skipped = TOKENS if by_token else 0
    # `jax.shard_map` divides the gradient of a result by the number of its copies, see
    # `collectives.total`, which multiplies it back.
    sizes = automatic_layout()[1]
    left = ({*sizes} - manual_axes() - {*contracted, *_split(letters)} for letters in outputs)
    return cls(
      by_token,
      _FORMATS[dtype],
      len(x) - TOKENS,
      over_x=contracted if by_token else _split(stored_x),
      over_outputs=[_split(letters[skipped:]) for letters in outputs],
      copies=[math.prod(sizes[axis] for axis in axes) for axes in left],
    )

  def __call__(
    self,
    manual: bool,
    x: jax.Array,
    kernels: Sequence[Stored],
    known: Sequence[jax.Array] = (),
    gathered: Axes = (),
    scattered: Axes = (),
    *,
    ring: bool = False,
  ) -> list[jax.Array]:
    """Returns the products in the dtype of x, summed over a device's part of the contracted dims.

    Args:
      manual: whether this is inside a manual region.
      x: the activation.
      kernels: as they are stored, the contracted dims last.
      known: those of `matmuls.EightBit`, of one kernel after the other.
      gathered: the axes along which the sequence of x is to be gathered.
      scattered: those along which the sums of one product are to be reduce-scattered, in a ring.
      ring: whether the gather is a ring too, see `collective_matmul`.
    """
    ways = [dataclasses.replace(kernel, shard=None) for kernel in kernels]
    call = {"gathered": gathered, "scattered": scattered, "ring": ring}
    call = dataclasses.replace(self, manual=manual, ways=ways, delayed=bool(known), **call)
    products = jax.custom_vjp(lambda *given: call.forward(*given)[0])
    products.defvjp(call.forward, call.backward)
    return products(x, [kernel.shard for kernel in kernels], list(known))

  def shared(self, ndim: int, kept: int) -> range:
    """Returns the dims of an array whose numbers share a scale; `kept` dims stand before them."""
    return range(kept if self.by_token else 0, ndim)

  def forward(self, x: jax.Array, shards: list, known: list) -> tuple[list[jax.Array], tuple]:
    """Returns the products, and what the backward pass needs."""
    to = self.formats[0]
    shared = self.shared(x.ndim, TOKENS)
    inputs = rounded_to_8_bits(x, shared, self.over_x if self.manual else (), to, known[:1])
    if self.gathered and not self.ring:
      inputs = gathered_in_8_bits(inputs, [(SEQUENCE_DIM, self.gathered)], shared)
    weights = []
    for number, (shard, way) in enumerate(zip(shards, self.ways, strict=True)):
      shared = self.shared(shard.ndim, shard.ndim - self.contracted)
      over = tuple(axis for dim in shared for axis in way.axes[dim])
      weight = rounded_to_8_bits(shard, shared, over, to, known[MAGNITUDES * number + 1 :][:1])
      weight = gathered_in_8_bits(weight, way.moves, shared)
      weights.append(checkpoint_name(weight, GATHERED) if way.moves else weight)

    def of(part: tuple[jax.Array, ...]) -> list[jax.Array]:
      return self._of_inputs(self._rebuilt(part, inputs), weights, x.dtype)

    own = self._parts(inputs)
    if self.scattered:
      results = [collective_matmul.add_around(self.scattered, own, lambda part: of(part)[0])]
    elif self.gathered and self.ring:
      found = collective_matmul.pass_around(self.gathered, own, lambda part: (*part, *of(part)))
      inputs, results = self._rebuilt(found, inputs), list(found[len(own) :])
    else:
      results = of(own)
    seen = (x, shards, known) if self.delayed else (None, None, known)
    return results, (inputs, weights, seen)

  def backward(self, saved: tuple, gradients: list[jax.Array]) -> tuple[jax.Array, list, list]:
    """Returns the gradients of the activation and of each shard, and the magnitudes seen."""
    inputs, weights, (x, shards, known) = saved
    dtype = gradients[0].dtype
    before = [known[MAGNITUDES * number + 2 :][:1] for number in range(len(weights))]
    given = list(zip(range(len(weights)), weights, gradients, before, strict=True))
    if self.scattered:
      of_x, whole, rounded = self._around(*given[0])
      of_kernels = [self._of_kernel(0, inputs, weights[0], whole, rounded)]
    else:
      rounded = [self._rounded_gradient(*one) for one in given]
      of_x = self._of_all_x(rounded, weights, dtype)
      of_kernels = [
        self._of_kernel(number, inputs, weight, gradient, one)
        for (number, weight, gradient, _), one in zip(given, rounded, strict=True)
      ]
    of_shards, seen = [], []
    for number, of_kernel in enumerate(of_kernels):
      of_shards.append(collectives.scatter(of_kernel, self.ways[number].moves))
      if self.delayed:
        wide = gradients[number].astype(scale_dtype(gradients[number]))
        seen += self._seen(x, shards[number], wide * self._copies(number), known[0].dtype)
    return of_x, of_shards, seen

  def _parts(self, one: Rounded) -> tuple[jax.Array, ...]:
    """Returns what goes around a ring of an activation: integers, see `gathered`, and scales."""
    bits = jax.lax.bitcast_convert_type(one.values, jnp.int8)
    return (bits, one.scale) if self.by_token else (bits,)

  def _rebuilt(self, parts: Sequence[jax.Array], like: Rounded) -> Rounded:
    """Returns the numbers of some tokens from their parts, with the scale that all share if any."""
    scale = parts[1] if self.by_token else like.scale
    return Rounded(jax.lax.bitcast_convert_type(parts[0], like.values.dtype), scale)

  def _of_inputs(
    self, inputs: Rounded, weights: Sequence[Rounded], dtype: jnp.dtype
  ) -> list[jax.Array]:
    """Returns the products of some tokens."""
    contracted, results = self.contracted, []
    for weight in weights:
      last = [range(one.values.ndim - contracted, one.values.ndim) for one in (inputs, weight)]
      product = contracted_in_8_bits(inputs.values, weight.values, last, inputs.scale.dtype)
      scale = scale_of_tokens(inputs.scale, product.ndim) * scale_of_outputs(
        weight.scale, contracted
      )
      results.append((product * scale).astype(dtype))
    return results

  def _copies(self, number: int) -> int:
    return self.copies[number] if self.manual else 1

  def _rounded_gradient(
    self, number: int, weight: Rounded, gradient: jax.Array, before: list, also: Axes = ()
  ) -> Rounded:
    """Returns a product's gradient in 8 bits; `also` split it, besides the axes of its outputs."""
    over = self.over_outputs[number] if self.manual else ()
    given = gradient.astype(scale_dtype(gradient))
    if self.by_token:
      given = given * scale_of_outputs(weight.scale, self.contracted)
    before = [one / self._copies(number) for one in before]
    shared = self.shared(given.ndim, TOKENS)
    return rounded_to_8_bits(given, shared, (*over, *also), self.formats[1], before)

  def _of_all_x(
    self, rounded: Sequence[Rounded], weights: Sequence[Rounded], dtype: jnp.dtype
  ) -> jax.Array:
    """Returns dX of all products, reduce-scattered along the axes of the gather."""
    axes = self.gathered
    if not (axes and self.ring):
      of_x = self._of_x(rounded, weights).astype(dtype)
      return collectives.reduce_scatter(of_x, axes, SEQUENCE_DIM) if axes else of_x
    parts = [self._parts(one) for one in rounded]
    each = len(parts[0])

    def of_part(part: tuple[jax.Array, ...]) -> jax.Array:
      found = [self._rebuilt(part[each * number :], one) for number, one in enumerate(rounded)]
      return self._of_x(found, weights).astype(dtype)

    return collective_matmul.add_around(axes, sum(parts, ()), of_part)

  def _around(
    self, number: int, weight: Rounded, gradient: jax.Array, before: list
  ) -> tuple[jax.Array, jax.Array, Rounded | None]:
    """Returns dX, and the gradient of all tokens: as it is if that is what dW takes, or rounded."""
    axes = self.scattered
    if self.by_token:

      def arrived(part: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        rounded = self._rounded_gradient(number, weight, *part, before)
        return self._of_x([rounded], [weight]).astype(gradient.dtype), *part

      return *collective_matmul.pass_around(axes, (gradient,), arrived), None
    own = self._rounded_gradient(number, weight, gradient, before, also=axes)

    def of_part(part: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      rounded = self._rebuilt(part, own)
      return self._of_x([rounded], [weight]).astype(gradient.dtype), *part

    of_x, *parts = collective_matmul.pass_around(axes, self._parts(own), of_part)
    return of_x, gradient, self._rebuilt(parts, own)

  def _of_x(self, rounded: Sequence[Rounded], weights: Sequence[Rounded]) -> jax.Array:
    """Returns dX of some tokens, of all products, in float32 or wider."""
    of_x = 0.0
    for one, weight in zip(rounded, weights, strict=True):
      outputs, wide = range(TOKENS, one.values.ndim), one.scale.dtype
      part = contracted_in_8_bits(one.values, weight.values, (outputs, range(len(outputs))), wide)
      part = part * scale_of_tokens(one.scale, part.ndim)
      of_x = (part if self.by_token else part * weight.scale.reshape(())) + of_x
    return of_x

  def _of_kernel(
    self,
    number: int,
    inputs: Rounded,
    weight: Rounded,
    gradient: jax.Array,
    rounded: Rounded | None,
  ) -> jax.Array:
    """Returns dW before its reduction over devices.

    Args:
      number: of the product.
      inputs: of all tokens.
      weight: by which they were multiplied.
      gradient: of the product, of all tokens; read where scales are those of tokens.
      rounded: the same in 8 bits, read otherwise.
    """
    to, tokens = self.ways[number].gradient_dtype, [range(TOKENS)] * 2
    if self.by_token:
      dequantized = (inputs.values.astype(inputs.scale.dtype) * inputs.scale).astype(gradient.dtype)
      return contracted_in_8_bits(gradient, dequantized, tokens, to, precise=True)
    of_kernel = contracted_in_8_bits(rounded.values, inputs.values, tokens, rounded.scale.dtype)
    return (of_kernel * (rounded.scale.reshape(()) * inputs.scale.reshape(()))).astype(to)

  def _seen(
    self, x: jax.Array, shard: jax.Array, gradient: jax.Array, dtype: jnp.dtype
  ) -> list[jax.Array]:
    """Returns the magnitudes of this step as cotangents, which the other devices add zeros to."""
    seen = jnp.stack([jnp.max(jnp.abs(array)).astype(dtype) for array in (x, shard, gradient)])
    if self.manual:
      axes = tuple(sorted(manual_axes()))
      seen = largest_over(seen, axes)
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
