"""Whose a leaf of an optimizer's state is, and which dims it has (placement: test_rules.py)."""

import jax
import jax.numpy as jnp
import optax
import pytest

from partitioning.rules import Square, candidates, kept_by_trial, leaves_by_path, owners

PARAMETERS = [("kernel",), ("up", "kernel")]


@pytest.mark.parametrize(
  ("paths", "wanted"),
  [
    ([("mu", "kernel"), ("mu", "up", "kernel")], [("kernel",), ("up", "kernel")]),
    ([("mu", "up", "kernel"), ("count",)], [("up", "kernel"), None]),  # the other is masked
    ([("mu", "kernel"), ("mu", "total")], [None, None]),  # a field that is called like one
    ([("mu", "up", "kernel", "0")], [("up", "kernel")]),  # one of several of a parameter
    ([("kernel",), ("up", "kernel")], [("kernel",), ("up", "kernel")]),
    ([("key",)], [None]),
  ],
)
def test_owners_are_found_by_structure(paths, wanted):
  assert owners(paths, PARAMETERS) == dict(zip(paths, wanted, strict=True))


@pytest.mark.parametrize(
  ("shape", "whole", "wanted"),
  [
    ((3, 12, 20), (3, 12, 20), [(0, 1, 2)]),
    ((3, 20), (3, 12, 20), [(0, 2)]),
    ((3, 12), (3, 12, 12), [(0, 1), (0, 2)]),
    ((1, 12), (3, 12), [(1,)]),
    ((1, 1), (3, 12), [()]),
    ((3, 5), (3, 12), []),
    ((20, 3), (3, 12, 20), []),  # in another order
    ((3, 12, 20), (3, 12), []),
  ],
)
def test_candidates(shape, whole, wanted):
  assert candidates(shape, whole) == wanted


@pytest.mark.parametrize(
  ("shape", "whole", "wanted"),
  [
    ((3, 12, 12), (3, 12, 20), [Square((0,), (1,), (2,), (1,))]),
    ((3, 20, 20), (3, 12, 20), [Square((0,), (1,), (2,), (2,))]),
    ((3, 20, 20), (3, 12, 4, 5), [Square((0,), (1,), (2, 3), (2, 3))]),  # of all heads
    ((3, 4, 12, 12), (3, 12, 4, 5), [Square((0, 2), (1,), (3,), (1,))]),  # of each head
    ((12, 12), (12, 20), [Square((), (0,), (1,), (0,))]),
    ((3, 12, 12), (3, 12, 12), [(0, 1, 2)]),  # of the parameter's own shape, and sharding
    ((2, 12, 12), (3, 12, 20), []),
    ((3, 12, 20), (3, 12, 12), []),
    ((3, 60, 60), (3, 12, 20), []),
  ],
)
def test_squares_of_a_side(shape, whole, wanted):
  assert candidates(shape, whole) == wanted


def test_equal_dims_are_distinguished_as_the_optimizer_sorts_them():
  """Against optax: a row of its own second moment is a mean over one of the two equal dims."""
  init = optax.adafactor(1e-3, min_dim_size_to_factor=2).init
  parameters = {("up",): jax.ShapeDtypeStruct((4, 6, 6), jnp.float32)}
  kept = kept_by_trial(init, parameters)
  assert kept["0", "v_row", "up"] == [(0, 1)]
  assert kept["0", "v_col", "up"] == [(0, 2)]
  optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=2)
  params = {"up": jnp.ones((4, 6, 6))}
  grads = {"up": jnp.broadcast_to(jnp.arange(1.0, 7.0), (4, 6, 6))}  # differs along the last dim
  _, state = optimizer.update(grads, optimizer.init(params), params)
  state = leaves_by_path(state)
  assert jnp.ptp(state["0", "v_row", "up"]) == 0  # the mean over it: nothing differs
  assert jnp.ptp(state["0", "v_col", "up"]) > 0
