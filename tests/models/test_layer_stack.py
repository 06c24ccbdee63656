"""Layers of two stacks run in the order of the pattern, each with what is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layer_stack import over_layers


class One(nnx.Module):
  """Stands for a layer: its name is a number."""

  def __init__(self, name):
    self.name = nnx.Param(jnp.asarray(name))


def stacked(names):
  return nnx.vmap(One)(jnp.asarray(names, jnp.int32)) if len(names) else None


def visited(sparse, dense, order, unroll=1):
  """Returns (name, number) of the layers in the order in which they run."""
  count = len(sparse) + len(dense)

  def body(layer, carry, number):
    seen, at = carry
    entry = jnp.stack([layer.name[...], number])
    return (jax.lax.dynamic_update_index_in_dim(seen, entry, at, 0), at + 1), number

  first = jnp.zeros((count, 2), jnp.int32), jnp.asarray(0, jnp.int32)
  numbers = jnp.arange(count, dtype=jnp.int32)
  layers = stacked(sparse), stacked(dense)
  (seen, _), of_sparse, of_dense = over_layers(body, *layers, order, first, numbers, unroll=unroll)
  return np.asarray(seen), np.asarray(of_sparse), of_dense


def test_one_stack():
  seen, found, _ = visited([5, 6, 7, 8], [], (0, 1), unroll=2)
  assert seen.tolist() == [[5, 0], [6, 1], [7, 2], [8, 3]]
  assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
  ("dense", "order", "expected"),
  [
    ([1, 2], (2, 1), [1, 2, 10, 20, 30]),
    ([1, 2, 3], (0, 2), [1, 10, 2, 20, 3, 30]),
    ([1, 2, 3, 4], (1, 2), [1, 2, 10, 3, 20, 4, 30]),
    ([1, 2, 3, 4, 5, 6], (0, 3), [1, 2, 10, 3, 4, 20, 5, 6, 30]),
  ],
)
def test_dense_layers_come_first_or_between(dense, order, expected):
  seen, of_sparse, of_dense = visited([10, 20, 30], dense, order)
  assert seen[:, 0].tolist() == expected
  assert seen[:, 1].tolist() == list(range(len(expected)))
  assert of_sparse.tolist() == [at for at, name in enumerate(expected) if name >= 10]
  assert of_dense.tolist() == [at for at, name in enumerate(expected) if name < 10]
