"""Random numbers of some rows beside those that JAX draws for the complete array."""

import jax
import numpy as np
import pytest

from models.layers import bernoulli_rows


@pytest.mark.parametrize("x64", [False, True])
def test_rows_are_those_of_the_complete_array(x64):
  with jax.enable_x64(x64):
    key = jax.random.key(7)
    wanted = np.asarray(jax.random.bernoulli(key, 0.7, (12, 5, 3)))
    draw = jax.jit(lambda first: bernoulli_rows(jax.random.key_data(key), 0.7, (4, 5, 3), first))
    for first in (0, 4, 8):
      found = np.asarray(draw(np.int32(first)))
      np.testing.assert_array_equal(found, wanted[first : first + 4])
  assert (wanted[:4] != wanted[4:8]).any()  # else every part would do
