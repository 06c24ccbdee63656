"""Attention by `jax.nn.dot_product_attention`, as cuDNN is called, beside attention in blocks.

cuDNN itself is only lowered here: what it computes, tests on a GPU show.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import fused_attention
from partitioning.parallel.attention_blocks import Blocks, Scores
from planning import traced_step
from planning.step_facts import of_job
from tests.helpers.jobs import make_job

B, T, N, K, H = 4, 24, 4, 2, 16
RANDOM = np.random.default_rng(0)
ARRAYS = [RANDOM.standard_normal((B, T, n, H)) for n in (N, K, K, N)]
SLOTS = np.arange(T, dtype=np.int32)[None]


def both(function, kind, q, k, v, d_out):
  """Returns the result and the gradients of queries, keys and values."""
  out, back = jax.vjp(lambda *x: function(*x, jnp.asarray(SLOTS), kind=kind), q, k, v)
  return out, *back(d_out)


@pytest.mark.parametrize(
  ("mesh", "given", "kind"),
  [
    ({}, {"windows": (7,), "scale": 0.3}, None),
    ({"mesh.data": 2, "mesh.tensor": 2}, {"windows": (None, 5, 99)}, 1),
  ],
)
def test_results_and_gradients_are_those_of_blocks(mesh, given, kind):
  sizes = {"model.heads": N, "model.kv_heads": K, "model.head_size": H}
  job = make_job("single", "lm", **sizes, **mesh)
  scores = Scores(given.get("scale", H**-0.5), jnp.float32)
  how = Blocks(scores, T, T, complete=True, windows=given["windows"])
  in_blocks = functools.partial(fused_attention.attention, how)
  ways = (
    functools.partial(fused_attention.cudnn_attention, implementation="xla", **given),
    in_blocks,
  )
  inputs = [jnp.asarray(x, jnp.float32) for x in ARRAYS]
  kind = None if kind is None else jnp.int32(kind)
  with job.tracing(), jax.default_matmul_precision("highest"):
    found, wanted = (
      [np.asarray(x) for x in jax.jit(both, static_argnums=0)(way, kind, *inputs)] for way in ways
    )
  for x, y in zip(found, wanted, strict=True):
    assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y)


def test_results_are_those_of_numpy():
  q, k, v, _ = ARRAYS
  wanted = np.zeros_like(q)
  for b, t, n in np.ndindex(B, T, N):
    keys = slice(max(0, t - 6), t + 1)
    weights = np.exp(k[b, keys, n // 2] @ q[b, t, n] / 4)
    wanted[b, t, n] = weights @ v[b, keys, n // 2] / weights.sum()
  attend = functools.partial(fused_attention._cudnn_on_device, "xla", None, (7,), kind=None)
  found = attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
  np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_gpus_program_calls_cudnn_with_the_causal_mask_and_the_window():
  arrays = [jax.ShapeDtypeStruct((B, 128, n, 64), jnp.bfloat16) for n in (N, K, K)]

  def gradients(q, k, v):
    return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

  attend = functools.partial(fused_attention._cudnn_on_device, "cudnn", None, (7,), kind=None)
  # Without cuDNN on this machine JAX does not know its version.
  version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
  with mock.patch(version, return_value=91000):
    traced = jax.jit(gradients).trace(*arrays)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "__cudnn$fmhaSoftmax" in text
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert text.count("CAUSAL") == 2
  assert "sliding_window_length" in text
  assert not any(f"{T}x{T}" in line for line in text.splitlines())


@pytest.mark.parametrize(("rematerialization", "times"), [("none", 2), ("full", 3)])
def test_a_plan_sees_one_kernel_that_reads_and_writes_no_scores(rematerialization, times):
  sizes = {"data.sequence_length": 1024, "training.compute_dtype": "bfloat16", "model.head_size": 8}
  how = {"training.attention_kernel": "cudnn", "training.rematerialization": rematerialization}
  job = make_job("single", "lm", **sizes, **how)
  found = traced_step.equations(
    traced_step.gradients(traced_step.DevicePart(of_job(job), job.config, 1.0))
  )
  kernels = [x for x in found if x.params.get("name") == fused_attention.CUDNN_KERNEL and x.invars]
  # Forward, perhaps again, and backward.
  assert len(kernels) == times
  arrays = [x.aval.shape for one in kernels for x in (*one.invars, *one.outvars)]
  assert not any(shape[-2:] == (1024, 1024) for shape in arrays)
  *_, backward = kernels
  # Queries, keys, values, the output and its gradient; of the normalizer one number for a query.
  read = sorted(x.aval.size for x in backward.invars if x.aval.dtype.kind == "f" or x.aval.ndim > 1)
  q, k = 16 * 1024 * 8 * 8, 16 * 1024 * 4 * 8
  assert read == sorted([q, k, k, q, q, 16 * 8 * 1024])
  assert sorted(x.aval.size for x in backward.outvars) == sorted([q, k, k])


def test_a_plan_sees_the_kernel_where_heads_are_exchanged_for_the_sequence():
  sizes = {"data.sequence_length": 1024, "training.compute_dtype": "bfloat16", "model.head_size": 8}
  mesh = {"mesh.context": 2, "training.attention_kernel": "cudnn"}
  part = traced_step.part_of(of_job(make_job("single", "lm", **sizes, **mesh)), at_once=False)
  found = traced_step.equations(traced_step.gradients(part))
  kernels = [x for x in found if x.params.get("name") == fused_attention.CUDNN_KERNEL and x.invars]
  assert len(kernels) == 2
  # Complete rows of half of the heads, as half of the rows of all heads: the same work.
  assert kernels[0].invars[0].aval.shape == (8, 1024, 8, 8)
