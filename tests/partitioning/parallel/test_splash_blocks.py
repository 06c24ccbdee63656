"""Rows that `context` splits, by the kernel for TPUs, interpreted, beside attention in blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import fused_attention
from partitioning.parallel.attention_blocks import Blocks, Scores
from partitioning.parallel.ring_attention import ring_attention, zigzag_order
from partitioning.parallel.splash_kernel import SplashBlocks
from partitioning.rules import Dim
from tests.helpers.jobs import first_state, host_batch, make_job, place

B, T, N, K, H, U = 2, 512, 4, 2, 8, 6
RANDOM = np.random.default_rng(0)
SHAPES = ((N, H), (K, H), (K, U), (N, U))
*ARRAYS, D_OUT = (RANDOM.standard_normal((B, T, *x)).astype(np.float32) for x in SHAPES)
SINKS = RANDOM.standard_normal(N).astype(np.float32)
SEGMENTS = np.stack([np.arange(T) >= 70, np.arange(T) >= 300]).astype(np.int32)
SLOTS = np.arange(T, dtype=np.int32)
PLAIN = {"windows": (None,), "cap": 0.0}
WINDOW = {"windows": (150,), "cap": 2.0}
KINDS = {"windows": (None, 150), "cap": 0.0}


def around_the_ring(count, how, kind, segments, q, k, v, sinks):
  """Returns ring attention of arrays in the order of the rows."""
  order = zigzag_order(T, count)
  back = np.argsort(order)
  told = None if segments is None else segments[:, order]
  blocks = SplashBlocks(H**-0.5, how["cap"], how["windows"], 128)
  ordered = (q[:, order], k[:, order], v[:, order])
  letters = ("BTNH", "BTKH", "BTKU")
  given = {"blocks": blocks, "letters": letters, "sinks_N": sinks}
  return ring_attention(*ordered, told, kind, **given)[:, back]


def gathered(how, kind, segments, q, k, v, sinks):
  """Returns attention of each device's queries over all keys."""
  told = None if segments is None else (segments, segments)
  blocks = SplashBlocks(H**-0.5, how["cap"], how["windows"], 128)
  given = {"kind": kind, "sinks_N": sinks, "value_head": "U"}
  return fused_attention.attention(blocks, q, k, v, jnp.asarray(SLOTS)[None], told, **given)


def in_blocks(how, kind, segments, q, k, v, sinks):
  """Returns the same on one device, in plain JAX."""
  told = None if segments is None else (segments, segments)
  scores = Scores(H**-0.5, q.dtype, how["cap"])
  blocks = Blocks(scores, T, T, complete=True, windows=how["windows"])
  given = {"kind": kind, "sinks_N": sinks, "value_head": "U"}
  return fused_attention.attention(blocks, q, k, v, jnp.asarray(SLOTS)[None], told, **given)


def results(function, mesh, how, *, kind=None, extras=False):
  """Returns the result and the gradients of queries, keys, values and sinks.

  Args:
    function: one of the above.
    mesh: axis -> size.
    how: windows and soft cap.
    kind: of the layer.
    extras: with documents and sinks.
  """
  job = make_job("single", "lm", **{f"mesh.{axis}": size for axis, size in mesh.items()})
  job.legend.update({"N": Dim("heads", N), "H": Dim("head", H), "U": Dim("head", U)})
  job.legend["K"] = Dim("kv_heads", K, may_replicate=True)
  segments = jnp.asarray(SEGMENTS) if extras else None
  kind = None if kind is None else jnp.int32(kind)

  @jax.jit
  def both(d_out, *arrays):
    attend = functools.partial(function, how, kind, segments)
    if len(arrays) == 3:
      attend = functools.partial(attend, sinks=None)
    out, back = jax.vjp(attend, *arrays)
    return out, *back(d_out)

  arrays = [*ARRAYS, SINKS] if extras else ARRAYS
  with job.tracing(), jax.default_matmul_precision("highest"):
    return [np.asarray(x) for x in both(D_OUT, *arrays)]


def assert_close(found, wanted):
  for ours, theirs in zip(found, wanted, strict=True):
    far = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert far < 2e-5, far


# With tensor=4, which does not divide two key/value heads, every device has both of them.
@pytest.mark.long
@pytest.mark.parametrize(
  ("mesh", "how", "extras"),
  [({"context": 2, "tensor": 4}, PLAIN, True), ({"context": 2, "tensor": 2}, WINDOW, True)],
)
def test_a_ring_gives_the_results_and_gradients_of_one_device(mesh, how, extras):
  ring = functools.partial(around_the_ring, mesh["context"])
  found = results(ring, mesh, how, extras=extras)
  assert_close(found, results(in_blocks, {}, how, extras=extras))


@pytest.mark.parametrize(
  ("mesh", "kind", "extras"),
  [
    ({"context": 4, "tensor": 2}, 0, False),
    pytest.param({"context": 4}, 1, True, marks=pytest.mark.long),
  ],
)
def test_gathered_keys_give_the_results_and_gradients_of_one_device(mesh, kind, extras):
  found = results(gathered, mesh, KINDS, kind=kind, extras=extras)
  assert_close(found, results(in_blocks, {}, KINDS, kind=kind, extras=extras))


@pytest.mark.parametrize(
  "context_attention", ["ring", pytest.param("gather", marks=pytest.mark.long)]
)
def test_a_decoder_has_the_loss_of_one_device(context_attention):
  sizes = {"data.sequence_length": 512, "data.global_batch_size": 2, "model.layers": 2}
  options = {"model.attention_sinks": True, "model.attention_soft_cap": 3.0}
  given = {**sizes, **options, "model.context_attention": context_attention}

  def loss(**how):
    job = make_job("single", "lm", **given, **how)
    params = first_state(job).params
    found = job.compile_eval_step().function(params, place(job, host_batch(job)))
    return float(found["loss"] / found["weight"])

  split = loss(**{"mesh.context": 2, "training.attention_kernel": "splash"})
  assert split == pytest.approx(loss(), rel=1e-6)
