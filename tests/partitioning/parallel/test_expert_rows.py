"""Rows in order of their experts: who is where, and gathers as each other's transposes."""

import jax
import jax.numpy as jnp
import numpy as np

from partitioning.parallel import expert_exchange
from partitioning.parallel.expert_exchange import Places, Way


def test_assignments_are_in_order_of_their_experts_those_of_others_last():
  experts = jnp.asarray([2, -1, 0, 2, 1, 7, 0], jnp.int32)
  found = expert_exchange.in_order(experts, 3)
  order = np.asarray(found.order_A)
  assert order[:5].tolist() == [2, 6, 4, 0, 3]  # of equal experts the first comes first
  assert sorted(order[5:].tolist()) == [1, 5]
  assert np.asarray(found.inverse_A)[order].tolist() == list(range(7))
  assert found.starts_E1.tolist() == [0, 2, 3, 5]
  assert found.counts.tolist() == [2, 1, 2]


def test_groups_start_at_tiles_and_the_rows_between_have_no_expert():
  counts = jnp.asarray([3, 0, 5], jnp.int32)
  groups, within, used, starts = expert_exchange.rows_in_order(counts, 8, Way("tiles", 4))
  assert starts.tolist() == [0, 4, 4, 12]
  expected = [0, 0, 0, 3, 2, 2, 2, 2, 2, 3, 3, 3]
  assert groups.expert_X.tolist()[:12] == expected
  assert set(groups.expert_X.tolist()[12:]) == {3}
  assert within[used].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_each_gather_is_the_other_s_transpose():
  # Three rows, of which row 0 goes to places 3 and 1, row 2 to place 0; place 2 has none.
  to = Places(jnp.asarray([2, 0, 0, 0], jnp.int32), jnp.asarray([True, True, False, True]))
  back = Places(
    jnp.asarray([[3, 1], [0, 0], [0, 0]], jnp.int32),
    jnp.asarray([[True, True], [False, False], [True, False]]),
  )
  matrix = np.array([[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]], np.float32)
  x, y = np.arange(6.0).reshape(3, 2) + 1, np.arange(8.0).reshape(4, 2) - 3
  x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
  spread, pull = jax.vjp(lambda x: expert_exchange.spread(x, to, back), x)
  np.testing.assert_array_equal(spread, matrix @ x)
  np.testing.assert_array_equal(pull(y)[0], matrix.T @ y)
  summed, pull = jax.vjp(lambda y: expert_exchange.summed(y, to, back), y)
  np.testing.assert_array_equal(summed, matrix.T @ y)
  np.testing.assert_array_equal(pull(x)[0], matrix @ x)


def test_rows_that_are_not_there_are_zero_whatever_they_hold():
  x = jnp.asarray([[jnp.nan], [3.0]])
  places = Places(jnp.asarray([1, 0], jnp.int32), jnp.asarray([True, False]))
  assert expert_exchange.taken(x, places).tolist() == [[3.0], [0.0]]
