"""Blockwise attention beside NumPy and beside a plain softmax, with its gradients and memory."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, fused_attention
from models.attention import soft_cap
from partitioning.parallel.attention_blocks import Blocks, Scores
from tests.parity.comparison import assert_equal, train

B, T, N, K, H = 2, 37, 6, 3, 4
U = 5  # the size of the heads of values
SLOTS = np.arange(T, dtype=np.int32)[None]
RANDOM = np.random.default_rng(0)
SHAPES = ((N, H), (K, H), (K, U), (N, U))  # queries, keys, values, the gradient of the output
ARRAYS = [RANDOM.standard_normal((B, T, *shape)) for shape in SHAPES]
SEGMENTS = np.cumsum(RANDOM.random((B, T)) < 0.1, axis=1).astype(np.int32)
SINKS = RANDOM.standard_normal(N)
# Options, and block sizes: one block for all, or several, of which the last are padded.
CASES = [
  ({}, (37, 37)),
  ({"cap": 1.5, "scale": 0.3}, (16, 5)),
  ({"windows": (None, 7), "kind": 1}, (8, 8)),
  ({"windows": (9,), "segments": True}, (5, 16)),
  ({"segments": True, "sinks": True, "cap": 2.0}, (8, 8)),
]


def blockwise(how, *arrays, **given):
  """Returns attention in blocks, without a mesh."""
  with mock.patch.object(fused_attention, "on_shards", lambda f, given, out, *x: f(*x)):
    return fused_attention.attention(how, *arrays, **given)


def ours(
  q,
  k,
  v,
  sinks,
  segments,
  *,
  complete=True,
  sizes=(8, 8),
  kind=None,
  cap=0.0,
  scale=H**-0.5,
  windows=(None,),
):
  """Returns blockwise attention of all slots."""
  kind = None if kind is None else jnp.int32(kind)
  found = (jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS)) if segments else None
  how = Blocks(Scores(scale, q.dtype, cap), *sizes, complete=complete, windows=windows)
  return blockwise(how, q, k, v, jnp.asarray(SLOTS), found, sinks_N=sinks, kind=kind)


def plain(q, k, v, sinks, segments, *, cap=0.0, scale=H**-0.5, windows=(None,), kind=0):
  """Returns the same with a softmax over all scores and, for a sink, one key without a value."""
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  scores = soft_cap(scale * jnp.einsum("btnh,bsnh->bnts", q, k), cap)
  scores = jnp.where(seen(windows[kind], segments)[:, None], scores, -jnp.inf)
  if sinks is not None:
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    scores = jnp.concatenate([scores, column], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1)[..., :T]
  return jnp.einsum("bnts,bsnh->btnh", weights, v)


def seen(window, segments):
  """Returns bool [B, T, S]."""
  t, s = np.mgrid[:T, :T]
  allowed = (s <= t) & (t - s < (window or T))
  same = SEGMENTS[:, :, None] == SEGMENTS[:, None]
  return allowed & same if segments else np.broadcast_to(allowed, same.shape)


def with_gradients(function, sinks):
  """Returns the result and the gradients of queries, keys, values and sinks."""
  *arrays, d_out = map(jnp.asarray, ARRAYS)
  if not sinks:
    out, back = jax.vjp(lambda *x: function(*x, None), *arrays)
  else:
    out, back = jax.vjp(function, *arrays, jnp.asarray(SINKS))
  return out, *back(d_out)


@pytest.mark.parametrize(
  ("given", "sizes", "complete"),
  [*((*case, True) for case in CASES), *((*case, False) for case in CASES[2:4])],
)
def test_results_and_gradients_are_those_of_all_scores(given, sizes, complete):
  given = dict(given)
  segments, sinks = given.pop("segments", False), given.pop("sinks", False)
  with jax.enable_x64(True):
    run = jax.jit(with_gradients, static_argnums=(0, 1))
    wanted = run(functools.partial(plain, segments=segments, **given), sinks)
    how = {"complete": complete, "sizes": sizes, **given}
    found = run(functools.partial(ours, segments=segments, **how), sinks)
    for x, y in zip(found, wanted, strict=True):
      assert np.linalg.norm(x - y) <= 1e-12 * np.linalg.norm(y)


def test_results_are_those_of_numpy():
  q, k, v, d_out = ARRAYS
  wanted = np.zeros_like(d_out)
  allowed = seen(7, segments=True)
  for b, t, n in np.ndindex(B, T, N):
    keys = np.flatnonzero(allowed[b, t])
    weights = np.exp(k[b, keys, n // (N // K)] @ q[b, t, n] / 2)
    total = weights.sum() + np.exp(SINKS[n])
    wanted[b, t, n] = weights @ v[b, keys, n // (N // K)] / total
  with jax.enable_x64(True):
    given = {"segments": True, "windows": (7,)}
    found = np.asarray(ours(*map(jnp.asarray, (q, k, v, SINKS)), **given))
  assert np.linalg.norm(found - wanted) <= 1e-12 * np.linalg.norm(wanted)


def test_masked_blocks_are_not_computed():
  """A number that is none would show in whatever is computed with it, masked or not."""
  q, k, v = (jnp.asarray(x[:1, :32], jnp.float32) for x in ARRAYS[:3])
  broken = k.at[:, :8].set(jnp.nan)
  slots, segments = jnp.asarray(SLOTS[:, :32]), jnp.asarray([[0] * 8 + [1] * 24], jnp.int32)
  for more, complete in (({"windows": (8,)}, True), ({"windows": (8,)}, False), ({}, True)):
    told = None if more else (segments, segments)
    how = Blocks(Scores(H**-0.5, q.dtype), 8, 8, complete=complete, **more)
    found = blockwise(how, q, broken, v, slots, told)
    first = 16 if more else 8  # of the second block a window still sees the first
    assert np.isnan(found[:, :first]).all()
    assert np.isfinite(found[:, first:]).all()


def temporary_bytes(length):
  """Returns the temporary memory of compiled attention, forward and backward."""
  shapes = [jax.ShapeDtypeStruct((1, length, *shape), jnp.float32) for shape in SHAPES]
  slots = jnp.arange(length, dtype=jnp.int32)[None]

  def both(q, k, v, d_out):
    with mock.patch.dict(globals(), SLOTS=slots):
      attend = functools.partial(ours, sinks=None, segments=False, sizes=(64, 64))
      out, back = jax.vjp(attend, q, k, v)
    return out, back(d_out)

  return jax.jit(both).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_length():
  short, long = (temporary_bytes(length) for length in (2048, 8192))
  assert long == pytest.approx(4 * short, rel=0.1)
  assert long < 8192 * 8192 * 4 / 20  # the scores of one head


BLOCKWISE = {"training.attention_kernel": "blockwise"}
OTHERS = {
  "model.window": 5,
  "model.global_every": 2,
  "model.attention_soft_cap": 0.5,
  "model.attention_sinks": True,
  "model.separate_documents": True,
  "model.kv_heads": 1,
}


def test_trains_as_one_device_with_plain_attention(monkeypatch):
  mesh = {"mesh.context": 2, "mesh.tensor": 2, "model.context_attention": "gather"}
  monkeypatch.setitem(attention.TILES, "cpu", attention.Tiles((4, 5), 128, ""))
  ours = train("lm", "float64", {**OTHERS, **BLOCKWISE, **mesh})
  assert_equal(ours, train("lm", "float64", OTHERS), "float64")
