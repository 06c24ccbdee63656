"""Ring attention and its gradients, beside NumPy and beside a softmax over all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.parallel.attention_blocks import Blocks, Scores
from partitioning.parallel.ring_attention import ring_attention, zigzag_order
from partitioning.rules import Dim
from tests.helpers.jobs import make_job

B, T, N, K, H, U = 2, 24, 4, 2, 6, 5
RANDOM = np.random.default_rng(0)
ARRAYS = [RANDOM.standard_normal((B, T, *shape)) for shape in ((N, H), (K, H), (K, U), (N, U))]
SINKS = RANDOM.standard_normal(N)
SEGMENTS = np.cumsum(RANDOM.random((B, T)) < 0.2, axis=1).astype(np.int32)
WINDOW = 9


def ring(job, segments, window, d_out, *arrays):
  """Returns the output of ring attention and the gradients, in the order of the rows.

  Args:
    job: with the mesh.
    segments: the document of each token.
    window: tokens that a token attends to.
    d_out: the gradient of the output.
    *arrays: queries, keys, values, and the sinks if there are any.
  """
  order = zigzag_order(T, job.config.mesh.context)
  ordered = [x[:, order] for x in (*arrays[:3], d_out)]
  told = None if segments is None else segments[:, order]

  def attend(q, k, v, sinks=None):
    blocks = Blocks(Scores(H**-0.5, jnp.float64), 4, 5)
    letters = ("BTNH", "BTKH", "BTKU")
    return ring_attention(q, k, v, told, window, blocks=blocks, letters=letters, sinks_N=sinks)

  out, back = jax.vjp(attend, *ordered[:3], *arrays[3:])
  found = out, *back(ordered[3])
  return [*(x[:, np.argsort(order)] for x in found[:4]), *found[4:]]


def softmax(q, k, v, sinks=None, *, segments, window):
  """Returns attention by a softmax over all keys, and over a sink as one key without a value."""
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
  t, s = np.mgrid[:T, :T]
  seen = ((s <= t) & (t - s < window))[None] & (segments[:, :, None] == segments[:, None])
  scores = jnp.where(seen[:, None], scores, -jnp.inf)
  column = jnp.full((B, N, T, 1), -jnp.inf)
  if sinks is not None:
    column = jnp.broadcast_to(sinks[None, :, None, None], column.shape)
  weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :T]
  return jnp.einsum("bnts,bsnu->btnu", weights, v)


def numpy_output(sinks, segments, window):
  """Returns attention query by query."""
  q, k, v, d_out = ARRAYS
  out = np.zeros_like(d_out)
  for b, t, n in np.ndindex(B, T, N):
    keys = [s for s in range(t + 1) if t - s < window and segments[b, s] == segments[b, t]]
    weights = np.exp(k[b, keys, n // (N // K)] @ q[b, t, n] * H**-0.5)
    total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
    out[b, t, n] = weights @ v[b, keys, n // (N // K)] / total
  return out


@pytest.mark.parametrize(
  ("sizes", "documents_and_sinks"),
  [({"context": 4, "tensor": 2}, False), ({"context": 2, "tensor": 4}, True)],
)
def test_values_and_gradients_are_those_of_all_keys(sizes, documents_and_sinks):
  # With tensor=4, which does not divide two key/value heads, every device has both of them.
  segments, window, sinks = (SEGMENTS, WINDOW, SINKS) if documents_and_sinks else (None,) * 3
  arrays = ARRAYS[:3] if sinks is None else [*ARRAYS[:3], sinks]
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{f"mesh.{axis}": size for axis, size in sizes.items()})
    job.legend.update({"N": Dim("heads", N), "H": Dim("head", H), "U": Dim("head", U)})
    job.legend["K"] = Dim("kv_heads", K, may_replicate=True)
    with job.tracing():
      run = jax.jit(functools.partial(ring, job, segments, window))
      found = run(ARRAYS[3], *arrays)
    same = np.zeros((B, T), np.int32) if segments is None else segments
    how = {"segments": same, "window": window or T}
    out, back = jax.vjp(functools.partial(softmax, **how), *map(jnp.asarray, arrays))
    wanted = [numpy_output(sinks, **how), *back(jnp.asarray(ARRAYS[3]))]
  wanted, found = (list(map(np.asarray, one)) for one in (wanted, found))
  assert np.linalg.norm(np.asarray(out) - wanted[0]) <= 1e-14 * np.linalg.norm(wanted[0])
  for x, y in zip(found, wanted, strict=True):
    assert np.linalg.norm(x - y) <= 1e-12 * np.linalg.norm(y)
