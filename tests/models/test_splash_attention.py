"""The attention kernel, interpreted, beside attention that has all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, dp8
from configs.schema import finalize, validate
from models import splash_attention
from models.attention import causal_attention
from partitioning.constraints import activation_layout
from tests.helpers.jobs import make_job

B, T, N, H = 2, 256, 2, 128


def arrays():
  random = np.random.default_rng(0)
  return [jnp.asarray(random.standard_normal((B, T, N, H)), jnp.float32) for _ in range(4)]


def documents():
  ends_BT = jnp.arange(T, dtype=jnp.int32)[None] >= jnp.array([[50], [200]])
  segments_BT = ends_BT.astype(jnp.int32)
  return segments_BT, segments_BT


@pytest.mark.parametrize(
  ("mesh", "cap", "segments", "backward"),
  [
    ({}, 0.0, False, False),
    ({"mesh.data": 2, "mesh.tensor": 2}, 5.0, True, True),
  ],
)
def test_results_and_gradients_are_those_of_all_scores(mesh, cap, segments, backward, monkeypatch):
  monkeypatch.setattr(splash_attention, "_BLOCKS", (128,))
  q_BTNH, k_BSNH, v_BSNH, out_BTNH = arrays()
  told = documents() if segments else None
  job = make_job("single", "lm", **mesh)
  slots_BT = jnp.arange(T, dtype=jnp.int32)[None]

  def plain(q, k, v):
    return causal_attention(q, k, v, slots_BT, told, cap=cap)

  def kernel(q, k, v):
    return splash_attention.attention(q, k, v, told, cap=cap)

  # Arguments, not constants: XLA would compute with those while it compiles.
  def both(function, inputs, out_BTNH):
    if not backward:
      return (function(*inputs),)
    result, transpose = jax.vjp(function, *inputs)
    return result, *transpose(out_BTNH)

  tables = job.config.partitioning
  with (
    jax.set_mesh(job.mesh),
    activation_layout(job.legend, tables.activations, parameters=tables.parameters),
    jax.default_matmul_precision("highest"),
  ):
    found, wanted = (
      jax.jit(both, static_argnums=0)(function, (q_BTNH, k_BSNH, v_BSNH), out_BTNH)
      for function in (kernel, plain)
    )
  for ours, theirs in zip(found, wanted, strict=True):
    far = np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs)
    assert far < 2e-5, far


@pytest.mark.parametrize(
  ("platform", "changes", "kernel"),
  [
    ("tpu", {}, "splash"),
    ("cpu", {}, "xla"),
    ("tpu", {"training.attention_kernel": "xla"}, "xla"),
    ("tpu", {"model.window": 64}, "xla"),
    ("tpu", {"model.head_size": 64}, "xla"),
    ("tpu", {"mesh.context": 2}, "xla"),
  ],
)
def test_tpus_take_the_kernel_where_it_can_be(platform, changes, kernel):
  config = dp8.get_config("lm")
  config.update_from_flattened_dict({"model.head_size": 128, **changes})
  assert finalize.finalize(config, platform).training.attention_kernel == kernel


def test_it_is_refused_where_it_cannot_be():
  config = dp8.get_config("lm")
  config.training.attention_kernel = "splash"
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match=r"attention_kernel=splash: model.head_size=16 is no"):
    validate.check(config, {**base.MESH, "data": 8})
