"""Sums over rows of what they say about experts."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import load_balance
from models.experts import ENTROPY
from models.load_balance import BALANCE, COUNTS, Z_LOSS

COUNTS_LBE = np.array([[[3, 1, 0], [1, 0, 3]], [[0, 4, 0], [2, 2, 0]]], np.int32)
ROWS = {
  BALANCE: jnp.asarray([[1.0, 2.0], [3.0, 4.0]]),
  Z_LOSS: jnp.asarray([[1.0, 1.0], [1.0, 5.0]]),
  ENTROPY: jnp.asarray([[0.5, 0.5], [0.25, 0.75]]),
  COUNTS: jnp.asarray(COUNTS_LBE),
}
WEIGHTS = jnp.asarray([[1.0, 1.0], [1.0, 0.0]])


def test_sums_are_means_over_layers_and_counts_stay_apart():
  found = load_balance.sums_of(ROWS, WEIGHTS)
  assert (found[BALANCE], found[Z_LOSS], found[ENTROPY]) == (5.0, 4.0, 1.0)
  assert found[COUNTS].tolist() == [[4, 1, 3], [2, 6, 0]]
  assert found[COUNTS].dtype == np.int32
  # The fullest expert has 4 of 8 and 6 of 8 assignments to 3 experts; the weight is 3.
  assert float(found["fullest_expert"]) == pytest.approx((4 / 8 * 3 + 6 / 8 * 3) / 2 * 3)
  assert load_balance.sums_of({}, WEIGHTS) == {}


def test_the_auxiliary_loss_has_both_coefficients():
  found = load_balance.sums_of(ROWS, WEIGHTS)
  assert float(load_balance.auxiliary_loss(found, 0.1, 0.01)) == pytest.approx(0.54)
  assert load_balance.auxiliary_loss({}, 0.1, 0.01) == 0.0


def test_shares_are_means_over_the_layers_by_number():
  found = load_balance.shares(jnp.asarray([[4, 1, 3], [2, 6, 0]], jnp.int32))
  assert {name: float(x) for name, x in found.items()} == pytest.approx(
    {"expert_share/0": 0.375, "expert_share/1": 0.4375, "expert_share/2": 0.1875}
  )
  assert "expert_share/03" in load_balance.shares(jnp.ones((1, 12), jnp.int32))
