"""Fused attention in traced programs: what it computes, reads and writes, beside counts by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from planning import activation_memory, attention_kernels, traced_cost

B, T, N, K, H, U = 2, 24, 4, 2, 8, 6  # rows, tokens, heads, key/value heads, their sizes


def kernels(window):
  """Returns attention whose passes are jitted functions of the names of JAX's primitives."""
  name = "dot_product_attention_{}" + (f"_window{window}" if window else "")

  def named(function, way):
    function.__name__ = name.format(way)
    return jax.jit(function)

  def forward(q, k, v):
    ahead = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen = (ahead >= 0) & (ahead < (window or T))
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k)
    scores = jnp.where(seen, scores, -jnp.inf)
    out = jnp.einsum("bkgts,bsku->btkgu", jax.nn.softmax(scores), v)
    return out.reshape(B, T, N, U), jax.nn.logsumexp(scores, -1).reshape(B, N, T)

  def backward(q, k, v, out, d_out, normalizer):
    sums = sum(x.sum() for x in (q, k, v, out, d_out, normalizer))  # each of them is read
    return q + sums, k + sums, v + sums

  forward, backward = named(forward, "fwd"), named(backward, "bwd")

  @jax.custom_vjp
  def attention(q, k, v):
    return forward(q, k, v)[0]

  def saving(q, k, v):
    out, normalizer = (checkpoint_name(x, "attention_output") for x in forward(q, k, v))
    return out, (q, k, v, out, normalizer)

  def gradients(saved, d_out):
    q, k, v, out, normalizer = saved
    return backward(q, k, v, out, d_out, normalizer)

  attention.defvjp(saving, gradients)
  return attention


def jaxpr_of(function):
  shapes = (B, T, N, H), (B, T, K, H), (B, T, K, U)
  return jax.make_jaxpr(function)(*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)).jaxpr


def found_in(jaxpr):
  """Returns the work of the kernels of a program."""
  tracer = traced_cost._Tracer(1.0)
  tracer.close(jaxpr, tracer.walk(jaxpr, {x: tracer.fresh(x) for x in jaxpr.invars}, 1), 1)
  return [work for work, _, _ in tracer.found if work.attention]


def trained(window, policy=None):
  """Returns the jaxpr of the gradients of attention, computed again in the backward pass or not."""
  attention = kernels(window)

  def loss(q, k, v):
    return attention(q, k, v).astype(jnp.float32).sum()

  again = functools.partial(jax.checkpoint, policy=policy) if policy else lambda function: function
  return jaxpr_of(jax.grad(again(loss), argnums=(0, 1, 2)))


@pytest.mark.parametrize("window", [None, 5, T, 3 * T])
def test_only_what_the_mask_leaves_is_computed(window):
  slots = np.arange(T)
  ahead = slots[:, None] - slots[None]
  pairs = int(((ahead >= 0) & (ahead < (window or T))).sum())
  forward, backward = found_in(trained(window))
  each = 2 * B * N * pairs
  assert forward.flops == forward.attention == each * (H + U)
  # The scores again, the gradients of queries and of keys; those of weights and of values.
  assert backward.flops == backward.attention == each * (3 * H + 2 * U)


def test_scores_are_neither_written_nor_read():
  forward, backward = found_in(trained(None))
  of = {"q": B * T * N * H, "k": B * T * K * H, "v": B * T * K * U, "out": B * T * N * U}
  normalizer = 2 * B * N * T  # in bfloat16, as all arrays here
  assert forward.bytes == 2 * sum(of.values()) + normalizer
  given = 2 * (sum(of.values()) + of["out"]) + normalizer
  assert backward.bytes == given + 2 * (of["q"] + of["k"] + of["v"])


def test_with_its_output_saved_it_is_not_computed_again():
  save = jax.checkpoint_policies.save_only_these_names("attention_output")
  assert len(found_in(trained(None, save))) == 2
  again = found_in(trained(None, jax.checkpoint_policies.nothing_saveable))
  assert len(again) == 3
  assert again[0].attention == again[1].attention


def test_its_results_are_in_memory_and_its_scores_are_not():
  jaxpr = jaxpr_of(lambda q, k, v: kernels(None)(q, k, v) * 2)
  out, normalizer = 2 * B * T * N * U, 2 * B * N * T
  assert activation_memory._most_at_once(jaxpr, 0, 0, 0) == out + normalizer


def test_other_functions_are_no_kernels():
  @jax.jit
  def dot_product_attention(q, k, v):
    return q + k.sum() + v.sum()

  [equation] = jaxpr_of(dot_product_attention).eqns
  assert not attention_kernels.is_kernel(equation)
  assert attention_kernels.flops(equation) == 0
