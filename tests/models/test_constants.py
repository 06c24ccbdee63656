"""Constants of bfloat16 arrays are not themselves rounded to bfloat16: beside NumPy in float64.

The rounding of many results averages out, that of a constant does not: a line fitted to what is
found over what it should be has a slope of 1 but for the error of the constant.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import (
  attention,
  fused_attention,
  latent_attention,
  layer_stack,
  layers,
  model_spec,
)
from models.positions import Layer, Rows
from partitioning.parallel.ring_attention import zigzag_order
from tests.helpers.jobs import make_job
from tests.parity.latents import LATENTS
from training.optimizers import muon

SLOPE = 6e-4  # what thousands of rounded results leave of 2**-9
# 192 dims and YaRN's factor for 40 times longer rows: 0.35 % less in bfloat16.
DEEPSEEK_V3 = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
B, T, N, H = 2, 512, 4, 32  # in a ring of 2, pieces are as long as a block of splash attention


def narrow(*shape, seed=0, size=1.0):
  """Returns normal numbers that bfloat16 holds, as NumPy has them in float64 and as JAX does."""
  x = jnp.asarray(size * np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)
  return np.asarray(x, np.float64), x


def slope(found, wanted):
  """Returns the slope of what is found over what it should be."""
  assert found.dtype == jnp.bfloat16
  found = np.asarray(found, np.float64)
  return np.sum(found * wanted) / np.sum(wanted**2)


# ---- The scale of scores ----


def inputs(size=H):
  """Returns (q, first key), (q, k, v): keys but for the first, and their values, are 0.

  So the share of the first key, which is the output, says what the score of each query is.
  """
  q, narrow_q = narrow(B, T, N, size)
  first, narrow_first = narrow(B, 1, size, seed=1, size=1.5)  # of all heads
  k = jnp.zeros((B, T, N, size), jnp.bfloat16).at[:, 0].set(narrow_first)
  v = jnp.zeros((B, T, N, size), jnp.bfloat16).at[:, 0].set(1)
  return (q, first), (narrow_q, k, v)


def assert_scores(attend, scale, size=H, others=None):
  """Asserts that scores and the gradient of the queries are those of the scale.

  Args:
    attend: (q, k, v) -> the output.
    scale: as it should be.
    size: of the heads.
    others: how many keys with a score of 0 each query sees; None: those before it.
  """
  (q, first), arrays = inputs(size)
  others = np.arange(T)[None, :, None] if others is None else others
  scores_BTN = scale * np.einsum("BTNH,BOH->BTN", q, first)
  shares_BTN = np.exp(scores_BTN) / (np.exp(scores_BTN) + others)

  @jax.jit
  def both(q, k, v):
    out, back = jax.vjp(lambda q: attend(q, k, v)[..., 0], q)
    return out, back(jnp.ones_like(out))[0]

  out, d_q = both(*arrays)
  assert out.dtype == jnp.bfloat16
  share, of = np.asarray(out, np.float64), np.broadcast_to(others > 0, scores_BTN.shape)
  with np.errstate(divide="ignore", invalid="ignore"):
    found = np.log(share / (1 - share)) + np.log(others)
  of = of & (share < 0.9)  # nearer to 1 the rounding of the share is large
  assert of.mean() > 0.5
  ratio = np.sum(found[of] * scores_BTN[of]) / np.sum(scores_BTN[of] ** 2)
  assert ratio == pytest.approx(1, abs=SLOPE)
  wanted = scale * (shares_BTN * (1 - shares_BTN))[..., None] * first[:, None]
  assert slope(d_q, wanted) == pytest.approx(1, abs=SLOPE)


@pytest.mark.parametrize(
  ("kernel", "context"),
  [
    *((kernel, 1) for kernel in ("xla", "blockwise", "splash", "cudnn")),
    *((kernel, 2) for kernel in ("xla", "blockwise", "splash")),  # in a ring
  ],
)
def test_every_kernel_scales_by_the_scale(kernel, context):
  sizes = {"model.heads": N, "model.kv_heads": N, "model.head_size": H, "data.sequence_length": T}
  job = make_job("single", "lm", **{**sizes, "mesh.context": context, "data.global_batch_size": B})
  attend = attention.Attend(kernel, DEEPSEEK_V3, 0.0, (None,), False, 1, "H")
  order_T = zigzag_order(T, context) if context > 1 else np.arange(T, dtype=np.int32)
  slots_BT = jnp.asarray(order_T)[None]

  def in_order(q, k, v):
    rows = Rows(slots_BT, slots_BT, None, way="ring" if context > 1 else "")
    ordered = (x[:, order_T] for x in (q, k, v))
    return attend(*ordered, Layer(), rows)[:, np.argsort(order_T)]

  with job.tracing():
    assert_scores(in_order, DEEPSEEK_V3)


def test_jax_s_attention_for_gpus_scales_by_the_scale():
  slots_BT = jnp.arange(T, dtype=jnp.int32)[None]
  how = {"scale": DEEPSEEK_V3, "implementation": "xla"}
  with make_job("single", "lm").tracing(), jax.numpy_dtype_promotion("standard"):
    assert_scores(lambda *x: fused_attention.cudnn_attention(*x, slots_BT, **how), DEEPSEEK_V3)


def test_scores_of_images_are_scaled_by_the_scale():
  assert_scores(
    attention.bidirectional_attention, 58**-0.5, size=58, others=T - 1
  )  # 0.34 % less in bfloat16


def test_scores_of_latent_vectors_are_scaled_by_the_scale():
  own = types.SimpleNamespace(
    unrotated_size=H,
    # Of H + 1 latent numbers, the first H are the key of every head, the last is the value.
    key_value=types.SimpleNamespace(
      effective_kernel=lambda: jnp.tile(jnp.eye(H + 1, dtype=jnp.float32)[:, None], (1, N, 1))
    ),
    attend=types.SimpleNamespace(scale=DEEPSEEK_V3, cap=0.0),
  )

  def attend(q, k, v):
    slots_BT = jnp.tile(jnp.arange(T, dtype=jnp.int32)[None], (B, 1))
    latents = jnp.concatenate([k[:, :, 0], v[:, :, 0, :1]], axis=-1)
    cache = {"latents": latents, "rotary_keys": k[:, :, 0, :0]}
    return latent_attention.LatentAttention._absorbed(own, q, None, slots_BT, cache)

  sizes = {"model.heads": N, "model.kv_heads": N, "data.global_batch_size": B}
  latent = {"model.latent_size": H + 1, "model.head_size": H + 2, "model.rotary_size": 2}
  job = make_job("single", "lm", **{**LATENTS, **sizes, **latent, "model.value_head_size": 1})
  with job.tracing():
    assert_scores(attend, DEEPSEEK_V3)


# ---- Other constants ----

DROPPED = 0.1


def dropped(x):
  slots_R = jnp.arange(x.shape[1], dtype=jnp.int32)
  return layers.dropout(x, DROPPED, jax.random.key(0), slots_R)


GRANITE = types.SimpleNamespace(residual_multiplier=0.22)


@pytest.mark.parametrize(
  ("function", "constant"),
  [
    # Granite's multiplier.
    (functools.partial(layer_stack.Block._scaled, types.SimpleNamespace(spec=GRANITE)), 0.22),
    (dropped, 1 / (1 - DROPPED)),
  ],
)
def test_constants_of_a_layer(function, constant):
  x, narrow_x = narrow(16, 100, 40)
  with make_job("single", "lm").tracing():
    found = jax.jit(function)(narrow_x)
  kept = np.asarray(found) != 0
  assert 0.89 < kept.mean() < 0.91 or function is not dropped
  assert slope(found, constant * x * kept) == pytest.approx(1, abs=3e-4)


@pytest.mark.parametrize(
  ("changes", "scale"),
  [
    ({"model.embedding_multiplier": 12.7}, 12.7),
    # Gemma's is rounded: so its weights were trained, in its authors' code and in transformers'.
    ({"model.scaled_embeddings": True, "model.model_size": 3584}, 59.75),
  ],
)
def test_embeddings_are_scaled_as_published(changes, scale):
  job = make_job("single", "lm", **{"training.compute_dtype": "bfloat16", **changes})
  tokens_BT = jnp.arange(60, dtype=jnp.int32)[None]
  embed = layers.Embedding(model_spec(job.config), rngs=nnx.Rngs(params=0))
  with job.tracing():
    found = jax.jit(lambda: embed(tokens_BT))()
  rows = np.asarray(embed.table[...][:60].astype(jnp.bfloat16), np.float64)
  assert slope(found[0], scale * rows) == pytest.approx(1, abs=3e-4)


def test_the_scale_of_an_adapter():
  keys = {"lora.rank": 8, "lora.alpha": 25.0, "lora.rs": True}
  job = make_job("single", "lm", **keys, **{"training.parameter_dtype": "bfloat16"})
  layer = layers.Linear("layers/mlp/up", model_spec(job.config), rngs=nnx.Rngs(params=0))
  layer.lora_a = nnx.Param(layer.lora_a[...].astype(jnp.bfloat16))  # as an init stores it
  wanted = 25 / math.sqrt(8) * np.asarray(layer.lora_a[...], np.float64)
  assert slope(layer.low_rank().a, wanted) == pytest.approx(1, abs=SLOPE)


def test_the_coefficients_of_newton_schulz():
  x = 2.0**-20 * np.random.default_rng(0).standard_normal((1, 40, 500))
  x[0, 0, 0] = 1.0  # beside which the others are so small that a step multiplies them by a
  found = muon.newton_schulz(jnp.asarray(x, jnp.bfloat16), 1)
  x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
  assert slope(found[0, 1:, 1:], muon.COEFFICIENTS[0] * x[0, 1:, 1:]) == pytest.approx(1, abs=SLOPE)
