"""The decoder's values beside NumPy in float64: in float32 and bfloat16, whole and in parts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, layers, positions
from models import losses as model_losses
from partitioning import dtypes
from tests.models import numpy_decoder
from tests.models.families import LENGTH, ROWS, drawn, job_of, tokens, tree_of

FLOAT64 = {"training.parameter_dtype": "float64"}


def batch():
  """Returns rows of several documents each, and weights that differ."""
  tokens_BT = tokens()
  targets_BT = np.random.RandomState(8).randint(0, 61, (ROWS, LENGTH)).astype(np.int32)
  weights_BT = (np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 3).astype(np.float32)
  segments_BT = np.zeros_like(tokens_BT)
  segments_BT[0, 4:], segments_BT[0, 5:], segments_BT[0, 16:] = 1, 2, 3
  segments_BT[1, 3:], segments_BT[1, 8:], segments_BT[1, 12:] = 1, 2, 3
  given = {"tokens": tokens_BT, "targets": targets_BT, "weights": weights_BT}
  return {**given, "segments": segments_BT}


def losses(family, dtype, **overrides):
  """Returns the mean loss of a family's decoder and NumPy's, of the same parameters."""
  changes = {"training.compute_dtype": dtype, "model.separate_documents": True, **overrides}
  job = job_of(family, **changes)
  arrays, given = drawn(job), batch()
  function = job.compile(job.program.sums, job.state.params, job.batch).function
  sums = function(tree_of(job, arrays), given)
  assert sums["loss"].dtype == dtypes.wide_dtype(jnp.dtype(dtype))
  wanted = numpy_decoder.loss(job.config, arrays, *given.values())
  return float(sums["loss"] / sums["weight"]), wanted


# Between them all options; tests/models/test_families.py compares every family's logits.
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_the_loss_is_numpys(family):
  sinks = family == "gemma2"  # with windows and soft caps
  found, wanted = losses(family, "float32", **{"model.attention_sinks": sinks})
  assert found == pytest.approx(wanted, rel=1e-6)


# What the families above do not have.
OPTIONS = {
  "llama2": {"model.clip_qkv": 0.4, "model.query_key_norm": True},
  "gpt2": {"model.attention_scale_by_inverse_layer": True},
}


@pytest.mark.parametrize("family", OPTIONS)
def test_the_loss_with_an_option_is_numpys(family):
  with jax.enable_x64(True):
    found, wanted = losses(family, "float64", **FLOAT64, **OPTIONS[family])
  assert found == pytest.approx(wanted, rel=1e-12)


def test_the_loss_in_bfloat16_is_numpys_up_to_rounding_of_matmuls():
  found, wanted = losses("gemma3", "bfloat16")
  assert found == pytest.approx(wanted, rel=2e-3)


# ---- Function by function: in bfloat16, values are those of float64, rounded at the end ----


def normal(*shape, size=1.0, seed=0):
  """Returns random numbers that bfloat16 holds exactly, as NumPy has them and as JAX does."""
  random = np.random.default_rng(seed)
  narrow = jnp.asarray(size * random.standard_normal(shape), jnp.bfloat16)
  return np.asarray(narrow, np.float64), narrow


def share_rounded_otherwise(found, wanted):
  """Returns the share of values that are not the float64 ones rounded to bfloat16."""
  assert found.dtype == jnp.bfloat16
  rounded = np.asarray(jnp.asarray(wanted, jnp.bfloat16), np.float64)
  return float(np.mean(np.asarray(found, np.float64) != rounded))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_round_once(kind):
  x, narrow_x = normal(6, 50, 300, size=3.0)
  (scale, narrow_scale), (bias, narrow_bias) = normal(300, seed=1), normal(300, seed=2)
  if kind == "rms":
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    found = layers.rms_norm(narrow_x, narrow_scale.astype(jnp.float32), epsilon=1e-6)
  else:
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias
    given = narrow_scale.astype(jnp.float32), narrow_bias.astype(jnp.float32)
    found = layers.layer_norm(narrow_x, *given, epsilon=1e-6)
  assert share_rounded_otherwise(found, wanted) < 1e-3


@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_the_softmax_of_scores_is_not_in_bfloat16(cap):
  # Scores of some tens: in bfloat16 they are off by some tenths, and so are the logs of the shares.
  (q, narrow_q), (k, narrow_k), (v, narrow_v) = (
    normal(2, 64, 3, 16, size=3.0, seed=seed) for seed in range(3)
  )
  slots = jnp.arange(64, dtype=jnp.int32)[None]
  found = attention.causal_attention(narrow_q, narrow_k, narrow_v, slots, cap=cap)
  scores = numpy_decoder.capped(np.einsum("BTNH,BSNH->BNTS", q, k) / 4, cap)
  seen = np.tril(np.ones((64, 64), bool))
  shares = numpy_decoder.softmax(np.where(seen, scores, -np.inf))
  wanted = np.einsum("BNTS,BSNH->BTNH", shares, v)
  far = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
  assert far < 2**-8  # the shares are rounded, and the result


def test_a_clamped_gate_is_gpt_oss_hidden_layer():
  gate, up = 6 * np.random.default_rng(0).standard_normal((2, 50, 7))
  given = jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32)
  low, high = np.minimum(gate, 7), np.clip(up, -7, 7)
  assert all(one.any() for one in (low < gate, low < -7, high < up, high > up))
  found = layers.clamped_gate(*given, "gelu_sigmoid", limit=7.0, offset=1.0)
  wanted = (high + 1) * low / (1 + np.exp(-1.702 * low))
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
  plain = layers.clamped_gate(*given, "silu")
  np.testing.assert_allclose(plain, up * gate / (1 + np.exp(-gate)), rtol=1e-4, atol=1e-6)


def test_rotary_positions_round_once():
  (x, narrow_x), places = normal(2, 512, 3, 16), np.arange(512)
  frequency = positions.rotary_frequencies(16, 1e4, dtype=jnp.dtype("float32"))
  table = positions.rope_table(jnp.asarray(places, jnp.int32)[None], frequency)
  found = positions.apply_rope(narrow_x, table)
  model = job_of("llama2", **{"model.head_size": 16}).config.model
  wanted = np.stack([numpy_decoder.rotated(model, row, places, sees_all=True) for row in x])
  assert share_rounded_otherwise(found, wanted) < 1e-2  # of sums near zero, more than once


def test_the_cross_entropy_of_bfloat16_logits_is_in_float32():
  logits, narrow = normal(40, 200, size=10.0)
  targets = np.random.default_rng(1).integers(0, 200, 40, np.int32)
  found = model_losses.cross_entropy(narrow, jnp.asarray(targets))
  wanted = -np.log(numpy_decoder.softmax(logits)[np.arange(40), targets])
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)


# ---- What these tests must catch ----


GELUS = [
  ("gelu_erf", lambda x: math.erf(math.sqrt(0.5) * x)),
  ("gelu", lambda x: math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
]


@pytest.mark.parametrize("on_cpus", [True, False])
def test_the_gradients_of_a_layer_norm_are_numpys(on_cpus, monkeypatch):
  monkeypatch.setattr(layers, "on_cpus", lambda: on_cpus)
  random = np.random.default_rng(0)
  x, scale, bias, dy = (random.standard_normal(size) for size in ((5, 7, 16), 16, 16, (5, 7, 16)))
  x = 3 * x + 2
  deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-3)
  normed, along = (x - x.mean(-1, keepdims=True)) / deviation, dy * scale
  means = [np.mean(along * of, -1, keepdims=True) for of in (1, normed)]
  wanted = (
    (along - means[0] - normed * means[1]) / deviation,
    np.sum(dy * normed, (0, 1)),
    np.sum(dy, (0, 1)),
  )
  with jax.enable_x64(True):
    function = functools.partial(layers.layer_norm, epsilon=1e-3)
    found = jax.vjp(function, *map(jnp.asarray, (x, scale, bias)))[1](jnp.asarray(dy))
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("on_cpus", [True, False])
@pytest.mark.parametrize(("name", "inner"), GELUS)
def test_gelu_keeps_one_array_for_the_backward_pass(name, inner, on_cpus, monkeypatch):
  monkeypatch.setattr(layers, "on_cpus", lambda: on_cpus)

  def gelu(values):
    return np.array([0.5 * v * (1 + inner(v)) for v in values])

  x = np.linspace(-6, 6, 49)
  with jax.enable_x64():
    y, backward = jax.vjp(layers.ACTIVATIONS[name], jnp.asarray(x))
    [kept] = jax.tree.leaves(backward)
    [derivative] = backward(jnp.ones_like(y))
  assert kept.shape == x.shape
  np.testing.assert_allclose(kept, derivative if on_cpus else x, rtol=0, atol=1e-15)
  np.testing.assert_allclose(y, gelu(x), rtol=0, atol=1e-15)
  slope = (gelu(x + 1e-4) - gelu(x - 1e-4)) / 2e-4
  np.testing.assert_allclose(derivative, slope, rtol=0, atol=1e-8)
