"""Fused attention in traced programs: what it computes, reads and writes, beside counts by hand."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import fused_attention
from planning import traced_step
from tests.helpers.jobs import make_job

B, T, N, K, H = 2, 2048, 4, 2, 8  # rows, tokens, heads, key/value heads, their size
TILE = 512  # tokens of a block of the stand-in
Q, KV, NORMALIZER = 2 * B * T * N * H, 2 * B * T * K * H, 4 * B * T * N  # bytes: bfloat16, float32
SLOTS = 4 * T  # of the queries, which are read and kept as well


def visible(tile, window):
  """Returns how many pairs of a query and a key are in tiles of which the mask leaves some."""
  slots = np.arange(T)
  ahead = slots[:, None] - slots[None]
  mask = (ahead >= 0) & (ahead < (window or T))
  tiles = mask.reshape(T // tile, tile, T // tile, tile).any((1, 3))
  return int(tiles.sum()) * tile**2


@functools.cache
def trained(window, policy=None):
  """Returns the jaxpr of the gradients of attention, computed again in the backward pass or not."""

  def loss(q, k, v):
    slots = jnp.arange(T)[None]
    out = fused_attention.cudnn_attention(q, k, v, slots, windows=(window,))
    return out.astype(jnp.float32).sum()

  again = functools.partial(jax.checkpoint, policy=policy) if policy else lambda function: function
  gradients = jax.grad(again(loss), argnums=(0, 1, 2))
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H)
  given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
  with make_job("single", "lm", **{"model.heads": N, "model.kv_heads": K}).tracing():
    return jax.make_jaxpr(gradients)(*given).jaxpr


def found_in(jaxpr):
  """Returns the work of the kernels of a program."""
  tracer = traced_step._Tracer(1.0)
  tracer.close(jaxpr, tracer.walk(jaxpr, {x: tracer.fresh(x) for x in jaxpr.invars}, 1), 1)
  return [work for work, _, _ in tracer.found if work.attention]


@pytest.mark.parametrize("window", [None, TILE, 3 * T])
def test_only_what_the_mask_leaves_is_computed(window):
  forward, backward = found_in(trained(window))
  each = 2 * B * N * H * visible(TILE, window)
  assert forward.flops == forward.attention == 2 * each
  # The scores again, and the gradients of weights, values, queries and keys; and the products of
  # the output with its gradient.
  assert backward.flops == backward.attention
  assert backward.flops == pytest.approx(5 * each, rel=2 / T)


def test_scores_are_neither_written_nor_read():
  forward, backward = found_in(trained(None))
  assert forward.bytes == pytest.approx(2 * Q + 2 * KV + NORMALIZER, abs=2 * SLOTS)
  # Beside what forward has: the gradient of the output, and three gradients.
  wanted = 3 * Q + 2 * KV + NORMALIZER + Q + 2 * KV
  assert backward.bytes == pytest.approx(wanted, abs=2 * SLOTS)


def test_with_its_output_saved_it_is_not_computed_again():
  save = jax.checkpoint_policies.save_only_these_names("attention_output")
  assert len(found_in(trained(None, save))) == 2
  again = found_in(trained(None, jax.checkpoint_policies.nothing_saveable))
  assert [round(work.attention / again[0].attention, 1) for work in again] == [1, 1, 2.5]


def test_its_results_are_in_memory_and_its_scores_are_not():
  most = traced_step._most_at_once(trained(None), 0, 0, 0)
  # Of both passes; the gradient of the output is made where it is read.
  assert most == pytest.approx(Q + NORMALIZER + Q + 2 * KV, abs=2 * SLOTS)


@pytest.mark.parametrize("window", [None, 100])
def test_jax_s_primitives_compute_what_the_mask_leaves_of_each_row(window):
  def loss(q, k, v):
    past = window and (window - 1, 0)
    how = {"is_causal": True, "local_window_size": past, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **how).astype(jnp.float32).sum()

  shapes = (B, T, N, 64), (B, T, K, 64), (B, T, K, 64)
  given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
  # Without cuDNN on this machine JAX does not know its version.
  version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
  with mock.patch(version, return_value=91000):
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*given)
  flops = [*map(traced_step.kernel_flops, traced_step.equations(traced.jaxpr.jaxpr))]
  each = 2 * B * N * 64 * visible(1, window)
  assert [x for x in flops if x] == [2 * each, 5 * each]
