"""Matmuls of groups of rows beside NumPy, with their gradients, in each way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.parallel import expert_exchange
from partitioning.parallel.expert_exchange import Way

SIZES = np.array([5, 0, 17, 9], np.int32)
ROWS, INPUTS, OUTPUTS = 40, 6, 7
WAYS = {
  "tiles of 8": Way("tiles", 8),
  "tiles of 16": Way("tiles", 16),
  "ragged": Way("ragged"),
  "megablox": Way("ragged", interpret=True),
}


def groups_of(sizes, how, rows):
  """Returns the group of each row of the buffer, -1 where it has none."""
  starts = np.asarray(expert_exchange.starts(jnp.asarray(sizes), how))
  found = np.full(rows, -1)
  for group, size in enumerate(sizes):
    assert starts[group] % how.tile == 0
    found[starts[group] : starts[group] + size] = group
  return found


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("sizes", [SIZES, np.array([0, 40, 0, 0]), np.zeros(4, int)])
def test_products_and_gradients_are_numpy_s(name, sizes):
  how, sizes, draw = WAYS[name], np.asarray(sizes, np.int32), np.random.default_rng(0)
  rows = expert_exchange.padded_rows(ROWS, len(sizes), how)
  group = groups_of(sizes, how, rows)
  used = (group >= 0)[:, None]
  x = np.where(used, draw.normal(size=(rows, INPUTS)), 0).astype(np.float32)
  dy = np.where(used, draw.normal(size=(rows, OUTPUTS)), 0).astype(np.float32)
  kernels = draw.normal(size=(len(sizes), INPUTS, OUTPUTS)).astype(np.float32)
  y, pull = jax.vjp(
    lambda x, kernels: expert_exchange.grouped_matmul(x, kernels, jnp.asarray(sizes), how),
    *(jnp.asarray(x), jnp.asarray(kernels)),
  )
  dx, dkernels = pull(jnp.asarray(dy))
  of_row = kernels[group]
  np.testing.assert_allclose(y, np.where(used, np.einsum("xa,xab->xb", x, of_row), 0), atol=2e-6)
  expected = np.where(used, np.einsum("xb,xab->xa", dy, of_row), 0)
  np.testing.assert_allclose(np.where(used, dx, 0), expected, atol=3e-6)
  for number in range(len(sizes)):
    mine = group == number
    np.testing.assert_allclose(dkernels[number], x[mine].T @ dy[mine], atol=1e-5)


def test_rows_past_the_last_group_may_hold_anything():
  how, sizes = Way("ragged"), jnp.asarray(SIZES)
  behind = np.arange(ROWS) >= SIZES.sum()
  x = np.where(behind[:, None], np.nan, 1.0).astype(np.float32) * np.ones(INPUTS, np.float32)
  kernels = jnp.ones((4, INPUTS, OUTPUTS))
  y, pull = jax.vjp(
    lambda x, k: expert_exchange.grouped_matmul(x, k, sizes, how), jnp.asarray(x), kernels
  )
  dy = jnp.where(behind[:, None], jnp.nan, jnp.ones_like(y))
  dx, dkernels = pull(dy)
  assert np.isfinite(y).all()
  assert np.isfinite(dx).all()
  np.testing.assert_allclose(dkernels, np.broadcast_to(SIZES[:, None, None], dkernels.shape))


def test_weight_gradients_are_added_up_in_float32():
  how, count = Way("tiles", 8), 4096
  x = jnp.ones((count + 8, 1), jnp.bfloat16)
  function = lambda k: expert_exchange.grouped_matmul(  # noqa: E731
    x, k, jnp.asarray([count], jnp.int32), how
  )
  _, pull = jax.vjp(function, jnp.ones((1, 1, 1), jnp.bfloat16))
  [found] = pull(jnp.ones((count + 8, 1), jnp.bfloat16))
  assert float(found[0, 0, 0]) == count  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize(
  ("rows", "groups", "most", "tile"),
  [(4096, 8, 128, 128), (256, 8, 128, 32), (40, 8, 128, 8), (4096, 1, 64, 64)],
)
def test_tiles_are_about_as_long_as_groups(rows, groups, most, tile):
  assert expert_exchange.way("tiles", rows, groups, most) == Way("tiles", tile)
  assert expert_exchange.way("ragged", rows, groups, most) == Way("ragged")
