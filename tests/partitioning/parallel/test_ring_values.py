"""Ring attention and its gradients, beside NumPy and beside a softmax over all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.dims import Dim
from partitioning.parallel.block_pairs import Blocks, Scores
from partitioning.parallel.ring_attention import ring_attention, zigzag_order
from tests.helpers.jobs import make_job

B, T, N, K, H, U = 2, 24, 4, 2, 6, 5
RANDOM = np.random.default_rng(0)
ARRAYS = [RANDOM.standard_normal((B, T, *shape)) for shape in ((N, H), (K, H), (K, U), (N, U))]
SEGMENTS = np.cumsum(RANDOM.random((B, T)) < 0.2, axis=1).astype(np.int32)
WINDOW = 9


def ring(job, segments, window, d_out, *arrays):
  """Returns the output of ring attention and the gradients, in the order of the rows."""
  order = zigzag_order(T, job.config.mesh.context)
  ordered = [x[:, order] for x in (*arrays[:3], d_out)]
  told = None if segments is None else segments[:, order]

  def attend(q, k, v):
    blocks = Blocks(Scores(H**-0.5, jnp.float64), 4, 5)
    letters = ("BTNH", "BTKH", "BTKU")
    return ring_attention(q, k, v, told, window, blocks=blocks, letters=letters)

  out, back = jax.vjp(attend, *ordered[:3])
  return [x[:, np.argsort(order)] for x in (out, *back(ordered[3]))]


def softmax(q, k, v, *, segments, window):
  """Returns attention by a softmax over all keys."""
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
  t, s = np.mgrid[:T, :T]
  seen = ((s <= t) & (t - s < window))[None] & (segments[:, :, None] == segments[:, None])
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bnts,bsnu->btnu", weights, v)


def numpy_output(segments, window):
  """Returns attention query by query."""
  q, k, v, d_out = ARRAYS
  out = np.zeros_like(d_out)
  for b, t, n in np.ndindex(B, T, N):
    keys = [s for s in range(t + 1) if t - s < window and segments[b, s] == segments[b, t]]
    weights = np.exp(k[b, keys, n // (N // K)] @ q[b, t, n] * H**-0.5)
    out[b, t, n] = weights @ v[b, keys, n // (N // K)] / weights.sum()
  return out


@pytest.mark.parametrize(
  ("sizes", "documents"),
  [({"context": 4, "tensor": 2}, False), ({"context": 2, "tensor": 4}, True)],
)
def test_values_and_gradients_are_those_of_all_keys(sizes, documents):
  # With tensor=4, which does not divide two key/value heads, every device has both of them.
  segments = SEGMENTS if documents else None
  window = WINDOW if documents else None
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{f"mesh.{axis}": size for axis, size in sizes.items()})
    job.legend.update({"N": Dim("heads", N), "H": Dim("head", H), "U": Dim("head", U)})
    job.legend["K"] = Dim("kv_heads", K, may_replicate=True)
    with job.tracing():
      run = jax.jit(functools.partial(ring, job, segments, window))
      found = run(ARRAYS[3], *ARRAYS[:3])
    same = np.zeros((B, T), np.int32) if segments is None else segments
    how = {"segments": same, "window": window or T}
    out, back = jax.vjp(functools.partial(softmax, **how), *map(jnp.asarray, ARRAYS[:3]))
    wanted = [numpy_output(**how), *back(jnp.asarray(ARRAYS[3]))]
  wanted, found = (list(map(np.asarray, one)) for one in (wanted, found))
  assert np.linalg.norm(np.asarray(out) - wanted[0]) <= 1e-14 * np.linalg.norm(wanted[0])
  for x, y in zip(found, wanted, strict=True):
    assert np.linalg.norm(x - y) <= 1e-12 * np.linalg.norm(y)
