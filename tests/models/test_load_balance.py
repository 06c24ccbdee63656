"""Load balancing beside NumPy, and sums over rows of what they say about experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_balance
from models.experts import ENTROPY
from models.load_balance import (
  BALANCE,
  Z_LOSS,
  router_entropy,
  router_z_loss,
  row_sums,
  sequence_balance,
  updated_bias,
)
from models.losses import COUNTS

ROWS, LENGTH, EXPERTS, TOP_K = 3, 10, 7, 2


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def drawn():
  """Returns (experts, probabilities, weights); the last row has no tokens, others have padding."""
  random = np.random.default_rng(0)
  experts = np.argsort(random.standard_normal((ROWS, LENGTH, EXPERTS)), -1)[..., :TOP_K]
  probabilities = random.dirichlet(np.ones(EXPERTS), (ROWS, LENGTH))
  weights = np.ones((ROWS, LENGTH))
  weights[0, 7:], weights[1, :2], weights[2] = 0.0, 0.0, 0.0
  weights[1, 5] = 0.25  # counts as one token
  return experts.astype(np.int32), probabilities, weights


def arrays(*given):
  return [jnp.asarray(one) for one in given]


def numpy_balance(experts, probabilities, weights):
  """Returns DeepSeek-V3's loss of one row, as its equations 17 to 20 are written."""
  tokens = [t for t in range(LENGTH) if weights[t]]
  total = 0.0
  for expert in range(EXPERTS):
    f = EXPERTS / (TOP_K * len(tokens)) * sum(expert in experts[t] for t in tokens)
    total += f * sum(probabilities[t, expert] for t in tokens) / len(tokens)
  return total


def test_the_loss_of_a_row_is_that_of_the_published_equations():
  experts, probabilities, weights = drawn()
  found = sequence_balance(row_sums(*arrays(experts, probabilities, weights)), TOP_K)
  wanted = [numpy_balance(experts[b], probabilities[b], weights[b]) for b in range(2)]
  np.testing.assert_allclose(found, [*wanted, 0.0], rtol=1e-14)


def test_padding_changes_nothing_whatever_is_in_it():
  experts, probabilities, weights = drawn()
  wanted = row_sums(*arrays(experts, probabilities, weights))
  experts[weights == 0] = 0
  probabilities[weights == 0] = np.nan
  found = row_sums(*arrays(experts, probabilities, weights))
  for one, two in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(one, two)
  assert found.tokens.tolist() == [7, 8, 0]
  assert found.counts.sum(-1).tolist() == [14, 16, 0]


def test_the_gradient_flows_through_probabilities_alone():
  given = drawn()
  experts, probabilities, weights = arrays(*given)

  def total(probabilities):
    return jnp.sum(sequence_balance(row_sums(experts, probabilities, weights), TOP_K))

  grad = jax.jit(jax.grad(total))(probabilities)
  experts, _, weights = given
  for row, tokens in ((0, 7), (1, 8)):
    counts = np.bincount(
      np.asarray(experts[row])[np.asarray(weights[row]) > 0].ravel(), minlength=7
    )
    wanted = EXPERTS / (TOP_K * tokens) * counts / tokens  # f_e / tokens
    for t in range(LENGTH):
      np.testing.assert_allclose(grad[row, t], wanted * (weights[row, t] > 0), rtol=1e-14)
  np.testing.assert_array_equal(grad[2], 0.0)


def test_sums_are_in_float32_or_wider():
  experts, probabilities, weights = drawn()
  narrow = row_sums(*arrays(experts, probabilities.astype(jnp.bfloat16), weights))
  assert narrow.probabilities.dtype == jnp.float32
  assert narrow.counts.dtype == narrow.tokens.dtype == jnp.int32


def test_the_z_loss_is_numpys():
  logits = np.random.default_rng(1).standard_normal((3, 5, EXPERTS)) * 5
  wanted = np.log(np.exp(logits).sum(-1)) ** 2
  np.testing.assert_allclose(router_z_loss(jnp.asarray(logits)), wanted, rtol=1e-13)
  large = router_z_loss(jnp.asarray([[300.0, 300.0]], jnp.bfloat16))
  np.testing.assert_allclose(large, [(300.0 + np.log(2)) ** 2], rtol=1e-6)


def test_the_bias_moves_against_the_load():
  bias = jnp.array([0.5, -0.5, 0.0, 0.25])
  found = updated_bias(bias, jnp.array([10, 2, 6, 6], jnp.int32), 0.125)
  np.testing.assert_array_equal(found, [0.375, -0.375, 0.0, 0.25])
  uneven = updated_bias(bias, jnp.array([4, 3, 3, 3], jnp.int32), 0.125)  # a mean of 3.25
  np.testing.assert_array_equal(uneven, [0.375, -0.375, 0.125, 0.375])


def test_the_bias_of_each_layer_is_exact_for_counts_that_float32_cannot_hold():
  counts = np.array([[2**28 + 1, 2**28, 2**28, 2**28 - 1], [0, 0, 0, 0]], np.int32)
  found = updated_bias(jnp.zeros((2, 4), jnp.float32), jnp.asarray(counts), 1.0)
  np.testing.assert_array_equal(found, [[-1, 0, 0, 1], [0, 0, 0, 0]])


def test_the_entropy_of_a_router():
  found = router_entropy(jnp.array([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]]))
  np.testing.assert_allclose(found, [np.log(4), 0.0, np.log(2)])
  grad = jax.grad(lambda x: router_entropy(x)[0])(jnp.array([[0.5, 0.25, 0.25]]))
  np.testing.assert_allclose(grad, [-np.log([0.5, 0.25, 0.25]) - 1])


# ------------------------------ expert sums ------------------------------

COUNTS_LBE = np.array([[[3, 1, 0], [1, 0, 3]], [[0, 4, 0], [2, 2, 0]]], np.int32)
ROW_SUMS = {
  BALANCE: jnp.asarray([[1.0, 2.0], [3.0, 4.0]]),
  Z_LOSS: jnp.asarray([[1.0, 1.0], [1.0, 5.0]]),
  ENTROPY: jnp.asarray([[0.5, 0.5], [0.25, 0.75]]),
  COUNTS: jnp.asarray(COUNTS_LBE),
}
WEIGHTS = jnp.asarray([[1.0, 1.0], [1.0, 0.0]])


def test_sums_are_means_over_layers_and_counts_stay_apart():
  found = load_balance.sums_of(ROW_SUMS, WEIGHTS)
  assert (found[BALANCE], found[Z_LOSS], found[ENTROPY]) == (5.0, 4.0, 1.0)
  assert found[COUNTS].tolist() == [[4, 1, 3], [2, 6, 0]]
  assert found[COUNTS].dtype == np.int32
  # The fullest expert has 4 of 8 and 6 of 8 assignments to 3 experts; the weight is 3.
  assert float(found["fullest_expert"]) == pytest.approx((4 / 8 * 3 + 6 / 8 * 3) / 2 * 3)


def test_the_auxiliary_loss_has_both_coefficients():
  found = load_balance.sums_of(ROW_SUMS, WEIGHTS)
  assert float(load_balance.auxiliary_loss(found, 0.1, 0.01)) == pytest.approx(0.54)
  assert load_balance.auxiliary_loss({}, 0.1, 0.01) == 0.0


def test_shares_are_means_over_the_layers_by_number():
  found = load_balance.shares(jnp.asarray([[4, 1, 3], [2, 6, 0]], jnp.int32))
  assert {name: float(x) for name, x in found.items()} == pytest.approx(
    {"expert_share/0": 0.375, "expert_share/1": 0.4375, "expert_share/2": 0.1875}
  )
  assert "expert_share/03" in load_balance.shares(jnp.ones((1, 12), jnp.int32))
