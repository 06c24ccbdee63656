"""Linear recurrences with a matrix as state, in chunks: the core of mixers such as Gated DeltaNet.

A head's state S, H x U, is read by queries and written by keys and values, token after token (G
heads of queries and keys serve N / G of the N heads each):

  S_t = a_t S_{t-1};  S_t = S_t + b_t k_t (v_t - S_t' k_t)';  o_t = S_t' q_t

with a decay a_t of the head or of each of its H rows, and a strength b_t. Without the delta rule
v_t alone is written. A decay of 0 begins anew: so does the first token of a document.

Within a chunk all tokens are computed at once, by matmuls and one triangular matrix (the UT
transform, arXiv:2406.06484 and 2412.06464); chunks follow one another in a scan. Every decay
between two tokens is the exponential of a sum of logarithms that are at most 0, so nothing
overflows. The backward pass computes the states at the beginning of chunks again, and one chunk's
matrices at a time. Where a sequence is split over devices, each summarizes its piece as what it
does to any state, S -> A S + B; an associative scan over these pairs gives all first states.

Names carry their dims: `q_BTGH` is batch, sequence, heads, rows of the state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64  # tokens, where a head has one decay
ROWS_CHUNK = 16  # where each row has its own: a chunk has a decay of each row for all its pairs
MASKED = 8  # tokens of the first blocks of `_inverse`

Inputs = tuple[Array | None, Array, Array, Array, Array]  # queries, keys, values, decays, strengths


def recurrence(
  q_BTGH: Float[Array, "B T G H"] | None,
  k_BTGH: Float[Array, "B T G H"],
  v_BTNU: Float[Array, "B T N U"],
  log_decay: Float[Array, "B T N *H"],
  strength_BTN: Float[Array, "B T N"],
  start_BNHU: Float[Array, "B N H U"],
  *,
  delta: bool,
) -> tuple[Float[Array, "B T N U"] | None, Float[Array, "B N H U"]]:
  """Returns the outputs of all tokens, and the state after the last.

  Args:
    q_BTGH: queries, each of N / G heads; None: no outputs are wanted.
    k_BTGH: keys, likewise.
    v_BTNU: values.
    log_decay: logarithms of the decays, at most 0; -inf begins anew. Of a head, or of each row.
    strength_BTN: of what is written; 0 of a token that writes nothing.
    start_BNHU: the state before the first token.
    delta: whether what a key reads is replaced, or values are added (linear attention, Mamba-2).
  """
  length, most = v_BTNU.shape[1], CHUNK if log_decay.ndim == 3 else ROWS_CHUNK
  size = min(most, length)
  count = -(-length // size)

  def chunks(x: Array | None) -> Array | None:
    """Returns [chunks, B, N, tokens, ...]; tokens behind the last write nothing."""
    if x is None:
      return None
    x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(x.shape[0], count, size, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

  inputs = tuple(map(chunks, (q_BTGH, k_BTGH, v_BTNU, log_decay, strength_BTN)))
  out, end_BNHU = _over_chunks(delta, inputs, start_BNHU)
  if out is None:
    return None, end_BNHU
  out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)
  return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :length], end_BNHU


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_chunks(delta: bool, inputs: Inputs, start: Array) -> tuple[Array | None, Array]:
  def step(state: Array, inputs: Inputs) -> tuple[Array, Array | None]:
    out, state = _chunk(state, inputs, delta=delta)
    return state, out

  end, out = jax.lax.scan(step, start, inputs)
  return out, end


def _forward(delta: bool, inputs: Inputs, start: Array) -> tuple[Any, Any]:
  return _over_chunks(delta, inputs, start), (inputs, start)


def _backward(delta: bool, saved: tuple[Inputs, Array], gradients: Any) -> tuple[Inputs, Array]:
  inputs, start = saved

  def again(state: Array, inputs: Inputs) -> tuple[Array, Array]:
    return _chunk(state, (None, *inputs[1:]), delta=delta)[1], state

  _, starts = jax.lax.scan(again, start, inputs)

  def step(d_end: Array, given: Any) -> tuple[Array, Inputs]:
    inputs, state, d_out = given
    _, transpose = jax.vjp(functools.partial(_chunk, delta=delta), state, inputs)
    return transpose((d_out, d_end))

  d_out, d_end = gradients
  d_start, d_inputs = jax.lax.scan(step, d_end, (inputs, starts, d_out), reverse=True)
  return d_inputs, d_start


_over_chunks.defvjp(_forward, _backward)


def _chunk(
  state: Float[Array, "B N H U"], inputs: Inputs, *, delta: bool
) -> tuple[Array | None, Array]:
  """Returns the outputs of one chunk's tokens, [B, N, tokens, U], and the state after them."""
  q, k, v, log_decay, strength = inputs
  b = strength[..., None]
  between, since = _decays(log_decay)  # of each pair of tokens; since the chunk began
  rows = log_decay.ndim > strength.ndim
  of_rows = since if rows else since[..., None]
  of_heads = functools.partial(jnp.repeat, repeats=v.shape[1] // k.shape[1], axis=1)

  def scores(x: Array) -> Array:
    """Returns x_i . k_j of each head, decayed between j and i, 0 where j is later."""
    if rows:
      return jnp.einsum("...ih,...jh,...ijh->...ij", of_heads(x), of_heads(k), between)
    return of_heads(jnp.einsum("...ih,...jh->...ij", x, k)) * between

  written = b * v
  if delta:
    written -= b * ((of_heads(k) * of_rows) @ state)
    written = _solved(jnp.tril(b * scores(k), -1), written)
  last = between[..., -1, :, :] if rows else between[..., -1, :, None]
  end = of_rows[..., -1, :, None] * state + jnp.swapaxes(of_heads(k) * last, -1, -2) @ written
  out = None if q is None else (of_heads(q) * of_rows) @ state + scores(q) @ written
  return out, end


@jax.custom_vjp
def _solved(
  strictly_lower: Float[Array, "*B C C"], right: Float[Array, "*B C U"]
) -> Float[Array, "*B C U"]:
  """Returns X of (I + L) X = R, by matmuls.

  Compilers for GPUs and TPUs solve a triangular system row after row. On CPUs jaxlib calls LAPACK
  for each matrix of a batch in threads of the pool whose thread waits for them: two layers that
  solve at a time on two cores wait for ever.
  """
  return _inverse(strictly_lower) @ right


def _solved_forward(strictly_lower: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
  inverse = _inverse(strictly_lower)
  found = inverse @ right
  return found, (inverse, found)


def _solved_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
  inverse, found = saved
  d_right = jnp.swapaxes(inverse, -1, -2) @ gradient
  return jnp.tril(-d_right @ jnp.swapaxes(found, -1, -2), -1), d_right


_solved.defvjp(_solved_forward, _solved_backward)


def _inverse(strictly_lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
  """Returns the inverse of I + L: of blocks twice as large in each turn, from those that they have.

  The inverse of [[A, 0], [L, D]] is [[A', 0], [-D' L A', D']] with the inverses A' and D'. Unlike
  those of a sum of powers of L its parts do not grow where keys are near to one another. Parts of
  the first blocks are not cut out but masked: compilers take long over many small slices.
  """
  given, outer = strictly_lower.shape[-1], strictly_lower.shape[:-2]
  size = 1 << (given - 1).bit_length()
  block = min(size, MASKED)
  behind = [(0, 0)] * len(outer) + [(0, size - given)] * 2
  lower = jnp.pad(strictly_lower, behind)
  multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  own = jnp.stack(
    [lower[..., at : at + block, at : at + block] for at in range(0, size, block)], -3
  )
  i = jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
  j = jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)
  inverse, half = jnp.broadcast_to(jnp.eye(block, dtype=lower.dtype), own.shape), 1
  while half < block:
    below = jnp.where((i // half % 2 == 1) & (i // half - 1 == j // half), own, 0)
    inverse -= multiply(inverse, multiply(below, inverse))
    half *= 2

  while half < size:
    starts = range(half, size, 2 * half)
    below = jnp.stack([lower[..., at : at + half, at - half : at] for at in starts], axis=-3)
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    corner = -multiply(second, multiply(below, first))
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    half *= 2
  return inverse[..., 0, :given, :given]


def _decays(log_decay: Float[Array, "B N C *H"]) -> tuple[Array, Array]:
  """Returns the decay between each pair of tokens, [B, N, C, C, *H], and since the beginning.

  The sums are over the tokens between, not differences of sums from the beginning: behind a strong
  decay those would have lost the weak ones.
  """
  tokens = 2  # the dim
  size = log_decay.shape[tokens]
  anew = jnp.isneginf(log_decay)
  log_decay = jnp.where(anew, jnp.zeros_like(log_decay), log_decay)
  begun = jnp.cumsum(anew, axis=tokens, dtype=jnp.int32)
  since = jnp.where(begun == 0, jnp.exp(jnp.cumsum(log_decay, axis=tokens)), 0 * log_decay)

  i = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
  j = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
  more = (1,) * (log_decay.ndim - 3)
  later = (i > j).reshape(1, 1, size, size, *more)
  repeated = jnp.broadcast_to(
    jnp.expand_dims(log_decay, tokens + 1), (*log_decay.shape[:3], size, *log_decay.shape[3:])
  )
  sums = jnp.cumsum(jnp.where(later, repeated, jnp.zeros_like(repeated)), axis=tokens)
  same = jnp.expand_dims(begun, tokens + 1) == jnp.expand_dims(begun, tokens)
  seen = same & (i >= j).reshape(1, 1, size, size, *more)
  return jnp.where(seen, jnp.exp(sums), jnp.zeros_like(sums)), since


# ------------------------------ pieces of a sequence ------------------------------


def summary(
  k_BTGH: Float[Array, "B T G H"],
  v_BTNU: Float[Array, "B T N U"],
  log_decay: Float[Array, "B T N *H"],
  strength_BTN: Float[Array, "B T N"],
  *,
  delta: bool,
) -> tuple[Array, Float[Array, "B N H U"]]:
  """Returns what a piece does to the state before it, S -> A S + B, as (A, B).

  A is a matrix [B, N, H, H] with the delta rule, else the decay over the piece, [B, N, *H].
  """
  (batch, length, heads, values), size = v_BTNU.shape, k_BTGH.shape[-1]
  shape = (batch, heads, size, values)
  start = jnp.zeros(shape, v_BTNU.dtype)
  if not delta:
    _, end = recurrence(None, k_BTGH, v_BTNU, log_decay, strength_BTN, start, delta=delta)
    return jnp.exp(jnp.sum(log_decay, axis=1)), end
  # The state is linear in the first one: with the identity in its place, columns become A's.
  eye = jnp.broadcast_to(jnp.eye(size, dtype=start.dtype), (*shape[:3], size))
  more = jnp.zeros((batch, length, heads, size), v_BTNU.dtype)
  start, v = (jnp.concatenate(pair, axis=-1) for pair in ((eye, start), (more, v_BTNU)))
  _, end = recurrence(None, k_BTGH, v, log_decay, strength_BTN, start, delta=delta)
  return end[..., :size], end[..., size:]


def first_states(a: Array, b: Array, *, delta: bool) -> Array:
  """Returns the state before each piece, [pieces, ...], of the summaries of all in their order."""

  def apply(a: Array, x: Array) -> Array:
    return a @ x if delta else a.reshape(*a.shape, *(1,) * (x.ndim - a.ndim)) * x

  def joined(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    return apply(second[0], first[0]), apply(second[0], first[1]) + second[1]

  _, after = jax.lax.associative_scan(joined, (a, b))
  return jnp.concatenate([jnp.zeros_like(after[:1]), after[:-1]])
