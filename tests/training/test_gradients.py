"""Gradients of microbatches, added up: sums by NumPy, magnitudes, and variables in order."""

import jax
import jax.numpy as jnp
import numpy as np

from partitioning import dtypes
from partitioning.rules import nested
from training import gradients

ROWS, COUNT = 6, 3


def loss(params, variables, batch, key):
  """Returns the sum of (w x)^2 over rows, and how often it was called, which grows by 1."""
  del key
  x = batch["x"] * params["w"]
  seen = dtypes.known_magnitudes(params["w_product"][dtypes.HISTORY])
  noted = _noting(x, seen[0])
  sums = {"loss": jnp.sum(noted**2), "rows": jnp.int32(len(x))}
  return sums, {**variables, "w_product": params["w_product"], "calls": variables["calls"] + 1}


@jax.custom_vjp
def _noting(x, known):
  return x


def _backward(x, gradient):
  return gradient, jnp.max(jnp.abs(x))  # the cotangent of what was known is this magnitude


_noting.defvjp(lambda x, known: (x, x), _backward)


def test_microbatches_add_up_and_the_largest_magnitude_stays():
  x = np.random.default_rng(0).standard_normal(ROWS).astype(np.float32)
  history = jnp.zeros((dtypes.MAGNITUDES, 5), jnp.float32)
  learned = {"w": jnp.float32(3), **nested({f"w_product/{dtypes.HISTORY}": history})}
  of_mean = gradients.of_loss(loss, lambda sums: gradients.each(lambda s: s / ROWS, sums))
  found = {}
  for count in (1, COUNT):
    run = jax.jit(gradients.accumulate(of_mean, count))
    (grads, sums), after = run({"x": x}, learned, {}, {"calls": jnp.int32(0)}, None)
    assert {*after} == {"calls"}  # what is differentiated is none of the others
    assert int(after["calls"]) == count
    assert int(sums["rows"]) == ROWS  # a count is not divided
    np.testing.assert_allclose(sums["loss"], np.mean((3 * x) ** 2), rtol=1e-6)
    np.testing.assert_allclose(grads["w"], np.mean(2 * 3 * x**2), rtol=1e-6)
    found[count] = np.asarray(grads["w_product"][dtypes.HISTORY])
    assert found[count][0, 0] == np.max(np.abs(3 * x))
    assert np.count_nonzero(found[count]) == 1
  np.testing.assert_array_equal(found[1], found[COUNT])
