"""Which tokens may be drawn, against NumPy, and how often each is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.sample_token import draw, filter_logits


def numpy_filter(logits, temperature, top_k, top_p):
  """Returns one row's filtered logits, token by token from the likeliest down."""
  scaled = (logits - logits.max()) / np.float32(temperature)
  order = np.argsort(-scaled, kind="stable")[: top_k or None]
  weights = np.exp(scaled[order].astype(np.float64))
  kept, reached = [], 0.0
  for token, weight in zip(order, weights / weights.sum(), strict=True):
    if kept and reached >= top_p and top_p < 1:
      break
    kept.append(token)
    reached += weight
  return np.where(np.isin(np.arange(len(logits)), kept), scaled, -np.inf)


def filtered(logits, temperature, top_k, top_p):
  """Calls the function under test."""
  numbers = (np.float32(temperature), np.int32(top_k), np.float32(top_p))
  names = ("temperature", "top_k", "top_p")
  return np.asarray(
    jax.jit(filter_logits)(logits, **dict(zip(names, map(jnp.asarray, numbers), strict=True)))
  )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 4, 37])
@pytest.mark.parametrize("top_p", [1e-6, 0.35, 0.9, 1.0])
def test_filters_as_numpy_does(temperature, top_k, top_p):
  logits_BV = np.random.default_rng(3).normal(size=(5, 37), scale=2).astype(np.float32)
  found = filtered(logits_BV, temperature, top_k, top_p)
  wanted = np.stack([numpy_filter(row, temperature, top_k, top_p) for row in logits_BV])
  np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_is_off_removes_nothing_however_unlikely():
  logits_BV = np.array([[80.0, 0.0, -80.0]], np.float32)  # probabilities 1, 0 and 0 in float32
  assert np.all(np.isfinite(filtered(logits_BV, 1.0, 0, 1.0)))


def test_tokens_as_likely_as_the_last_one_kept_stay():
  logits_BV = np.array([[1.0, 3.0, 2.0, 2.0, 0.0]], np.float32)
  assert np.isfinite(filtered(logits_BV, 1.0, 2, 1.0)).tolist() == [
    [False, True, True, True, False]
  ]


def settings(rows, **changed):
  """Returns settings as a sampler passes them."""
  values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, **changed}
  dtypes = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "seed": "uint32"}
  arrays = {name: jnp.asarray(value, dtypes[name]) for name, value in values.items()}
  return {**arrays, "numbers": jnp.arange(rows, dtype=jnp.int32)}


def drawn(logits_V, rows=8_000, position=5, **changed):
  """Returns what `rows` rows of the same logits draw."""
  logits_BV = jnp.tile(jnp.asarray(logits_V, jnp.float32)[None], (rows, 1))
  positions_B = jnp.full((rows,), position, jnp.int32)
  return np.asarray(jax.jit(draw)(logits_BV, positions_B, settings(rows, **changed)))


@pytest.mark.parametrize(
  "changed", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 3.0}]
)
def test_each_token_is_drawn_as_often_as_it_should(changed):
  logits_V = np.array([0.5, -1.0, 1.5, 0.0, -3.0, 1.0], np.float32)
  values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **changed}
  weights = np.exp(numpy_filter(logits_V, **values))
  wanted = weights / weights.sum()
  rows = 8_000
  found = np.bincount(drawn(logits_V, rows, **changed), minlength=6) / rows
  assert np.all(np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / rows))


def test_a_temperature_of_0_takes_the_likeliest_and_a_tiny_one_does_too():
  logits_V = [0.1, -1.0, 1.5, 1.49]
  for temperature in (0.0, 1e-45, 1e-38, 1e-6):
    assert set(drawn(logits_V, 50, temperature=temperature)) == {2}, temperature


def test_draws_differ_by_seed_by_row_and_by_position():
  logits_V, rows = np.zeros(64), 100
  first = drawn(logits_V, rows)
  assert len(set(first)) > 30
  assert np.mean(first == drawn(logits_V, rows)) == 1
  assert np.mean(first == drawn(logits_V, rows, seed=1)) < 0.2
  assert np.mean(first == drawn(logits_V, rows, position=6)) < 0.2
  np.testing.assert_array_equal(first[:7], drawn(logits_V, 7))  # whoever else is there
