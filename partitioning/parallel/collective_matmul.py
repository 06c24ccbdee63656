"""Collective matmuls: all-gather and matmul, or matmul and reduce-scatter, as rings of permutes.

A device multiplies one chunk of the sequence while the next one is on its way, so that the
transfer takes no time of its own where a chunk's matmul takes as long. Half of each chunk goes
around the ring in each direction, since a link sends both ways at once. Source: Wang et al.,
"Overlap communication with dependent computation via decomposition in large deep learning models",
ASPLOS 2023 (dl.acm.org/doi/10.1145/3567955.3567959), sections 3 and 4.

- `gathered`: a chunk is passed on n - 1 times, and multiplied wherever it is.
- `scattered`: a sum for each chunk is passed on n - 1 times, and each device adds its own part.

Each is the other's transpose. In the backward pass the gathered array is passed around once more,
for the gradients of the other operands: those are one matmul over all tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from partitioning.parallel.sharded_function import SEQUENCE_DIM
from partitioning.rules import Axes

# Takes an activation (batch, sequence, ...) and further operands, and returns a tuple of such
# activations; linear in the activation, and each token of the result follows from the same token.
Function = Callable[..., tuple[jax.Array, ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(
  function: Function, axes: Axes, x: jax.Array, *operands: jax.Array
) -> tuple[jax.Array, ...]:
  """Returns `function(all_gather(x), *operands)`, the gather along the sequence.

  Args:
    function: see `Function`; without operands that are traced outside of it.
    axes: of the mesh, manual here.
    x: a device's part of the sequence.
    *operands: the same for all tokens.
  """
  return pass_around(axes, (x,), lambda part: function(*part, *operands))


def _gathered_forward(function: Function, axes: Axes, x: jax.Array, *operands: jax.Array):
  return gathered(function, axes, x, *operands), (x, operands)


def _gathered_backward(function: Function, axes: Axes, saved, gradients: tuple[jax.Array, ...]):
  x, operands = saved

  def of_x(gradients: tuple[jax.Array, ...]) -> jax.Array:
    return _transposed(function, gradients, x, operands)

  d_x = add_around(axes, gradients, of_x)
  [whole] = pass_around(axes, (x,), lambda part: part)
  return (d_x, *_of_operands(function, whole, operands, gradients))


gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scattered(function: Function, axes: Axes, x: jax.Array, *operands: jax.Array) -> jax.Array:
  """Returns `reduce_scatter(function(x, *operands))`, along the sequence, for one result.

  Args:
    function: see `Function`; its result is a device's partial sum.
    axes: of the mesh, manual here; the number of their devices divides the sequence.
    x: of all tokens.
    *operands: the same for all tokens.
  """
  return add_around(axes, (x,), lambda part: function(*part, *operands)[0])


def _scattered_forward(function: Function, axes: Axes, x: jax.Array, *operands: jax.Array):
  return scattered(function, axes, x, *operands), (x, operands)


def _scattered_backward(function: Function, axes: Axes, saved, gradient: jax.Array):
  x, operands = saved

  def of_x(part: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _transposed(function, part, x, operands), *part

  d_x, whole = pass_around(axes, (gradient,), of_x)
  return (d_x, *_of_operands(function, x, operands, (whole,)))


scattered.defvjp(_scattered_forward, _scattered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def through(
  function: Callable[..., jax.Array], axes: Axes, x: jax.Array, *operands: jax.Array
) -> jax.Array:
  """Returns `reduce_scatter(function(all_gather(x), *operands))`, both along the sequence.

  Parts of the sequence and sums of their results go around together, and no array is ever of all
  tokens. The backward pass computes the function again.

  Args:
    function: of an activation and further operands, token by token, but linear in nothing;
      returns a device's partial sum. Without operands that are traced outside of it.
    axes: of the mesh, manual here.
    x: a device's part of the sequence.
    *operands: the same for all tokens.
  """
  return _pass_and_add(axes, (x,), lambda part: function(*part, *operands), parts_first=True)


def _through_forward(function, axes: Axes, x: jax.Array, *operands: jax.Array):
  return through(function, axes, x, *operands), (x, operands)


def _through_backward(function, axes: Axes, saved, gradient: jax.Array):
  x, operands = saved
  # A sum of as many terms as there are parts: in float32 or wider.
  wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
  sums = [jnp.zeros(one.shape, wide) for one in operands]

  def of_part(parts: tuple[jax.Array, ...]) -> jax.Array:
    part, d_part = parts
    d_x, *d_operands = jax.vjp(function, part, *operands)[1](d_part)
    sums[:] = [total + one.astype(total.dtype) for total, one in zip(sums, d_operands, strict=True)]
    return d_x

  d_x = _pass_and_add(axes, (x, gradient), of_part)
  return (d_x, *(total.astype(one.dtype) for total, one in zip(sums, operands, strict=True)))


through.defvjp(_through_forward, _through_backward)


def _transposed(
  function: Function, gradients: tuple[jax.Array, ...], like: jax.Array, operands
) -> jax.Array:
  """Returns the gradient of the tokens whose results have these gradients.

  Args:
    function: of the tokens.
    gradients: of its results.
    like: an array of other tokens.
    operands: of the function.
  """
  shape = (*gradients[0].shape[: SEQUENCE_DIM + 1], *like.shape[SEQUENCE_DIM + 1 :])
  tokens = jax.ShapeDtypeStruct(shape, like.dtype)
  [result] = jax.linear_transpose(lambda x: function(x, *operands), tokens)(gradients)
  return result


def _of_operands(
  function: Function, x: jax.Array, operands, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Returns the gradients of the operands, from all tokens at once."""
  return jax.vjp(lambda *operands: function(x, *operands), *operands)[1](gradients)


def pass_around(
  axes: Axes,
  x: tuple[jax.Array, ...],
  use: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
  """Passes the devices' parts of a sequence around the ring.

  Args:
    axes: of the ring.
    x: activations, the device's part of each.
    use: called with the same part of each activation, of each device, token by token.

  Returns:
    Its results for all tokens, in the order of the sequence.
  """
  count, here = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
  length = x[0].shape[SEQUENCE_DIM]
  results: list[jax.Array] = []
  moving = [
    (way, first, tuple(_cut(one, first, size) for one in x))
    for way, first, size in _ways(length, count)
  ]
  for step in range(count):
    arrived, moving = moving, []
    for way, first, part in arrived:
      if step < count - 1:
        moving.append((way, first, tuple(_sent(one, axes, way) for one in part)))
      new = use(part)
      results = results or [_room(one, length * count) for one in new]
      start = (here - step * way) % count * length + first
      results = [
        jax.lax.dynamic_update_slice_in_dim(whole, one, start, SEQUENCE_DIM)
        for whole, one in zip(results, new, strict=True)
      ]
  return tuple(results)


def add_around(
  axes: Axes,
  x: tuple[jax.Array, ...],
  use: Callable[[tuple[jax.Array, ...]], jax.Array],
) -> jax.Array:
  """Sums what the devices compute of each part of a sequence, passing the sums around the ring.

  Args:
    axes: of the ring.
    x: activations of all tokens.
    use: called with each part of them, token by token; returns the summand.

  Returns:
    The device's own part of the sums.
  """
  count, here = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
  length = x[0].shape[SEQUENCE_DIM] // count
  ways = _ways(length, count)
  totals: list[jax.Array] = []
  for step in range(count):
    moved = [_sent(total, axes, way) for total, (way, _, _) in zip(totals, ways, strict=False)]
    totals = []
    for number, (way, first, size) in enumerate(ways):
      start = (here - (step + 1) * way) % count * length + first
      part = use(tuple(_cut(one, start, size) for one in x))
      totals.append(moved[number] + part if moved else part)
  return jnp.concatenate(totals, SEQUENCE_DIM) if len(totals) > 1 else totals[0]


def _pass_and_add(
  axes: Axes,
  x: tuple[jax.Array, ...],
  use: Callable[[tuple[jax.Array, ...]], jax.Array],
  *,
  parts_first: bool = False,
) -> jax.Array:
  """Passes parts of a sequence around the ring, and sums of what is computed of them behind them.

  Args:
    axes: of the ring.
    x: activations, the device's part of each.
    use: called with the same part of each activation, token by token; returns the summand.
    parts_first: sends a sum only when the next part has arrived, since that is needed sooner. Both
      take the same link, and XLA's scheduler would start the sum first.

  Returns:
    The device's own part of the sums.
  """
  count = jax.lax.axis_size(axes)
  moving = [
    (way, tuple(_cut(one, first, size) for one in x))
    for way, first, size in _ways(x[0].shape[SEQUENCE_DIM], count)
  ]
  own: list[jax.Array] = []
  totals: list[jax.Array] = []
  for step in range(count):
    arrived = moving
    if step < count - 1:
      moving = [(way, tuple(_sent(one, axes, way) for one in part)) for way, part in arrived]
    moved = [_sent(total, axes, way) for total, (way, _) in zip(totals, arrived, strict=False)]
    new = [use(part) for _, part in arrived]
    if step == 0:  # the sum of a device's own part ends here
      own = new
      continue
    totals = [total + one for total, one in zip(moved, new, strict=True)] if moved else new
    if step < count - 1 and parts_first:
      totals = [
        jax.lax.optimization_barrier((total, part))[0]
        for total, (_, part) in zip(totals, moving, strict=True)
      ]
  if totals:
    moved = [_sent(total, axes, way) for total, (way, _) in zip(totals, arrived, strict=True)]
    own = [total + one for total, one in zip(moved, own, strict=True)]
  return jnp.concatenate(own, SEQUENCE_DIM) if len(own) > 1 else own[0]


def _ways(length: int, count: int) -> list[tuple[int, int, int]]:
  """Returns (direction, first token, tokens) of the pieces of each chunk of the sequence.

  One piece, if it cannot be halved, or if the ring has two devices: both directions lead to the
  other one then.
  """
  if count == 2 or length % 2:
    return [(1, 0, length)]
  return [(1, 0, length // 2), (-1, length // 2, length // 2)]


def _cut(x: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x, start, size, SEQUENCE_DIM)


def _sent(x: jax.Array, axes: Axes, way: int) -> jax.Array:
  """Returns what the neighbour in the other direction has sent; `way` is 1 or -1."""
  count = jax.lax.axis_size(axes)
  return jax.lax.ppermute(x, axes, [(i, (i + way) % count) for i in range(count)])


def _room(part: jax.Array, length: int) -> jax.Array:
  """Returns an array for as many tokens, all of which will be overwritten."""
  shape = (*part.shape[:SEQUENCE_DIM], length, *part.shape[SEQUENCE_DIM + 1 :])
  return jax.lax.empty(shape, part.dtype)
