"""Scans over layers: their order, and several layers in one iteration."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layer_stack import order_of, over_layers, trip_counts
from tests.parity.comparison import FEATURES, assert_equal, train


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
  seen, found, _ = visited([5, 6, 7, 8], [], (), unroll=2)
  assert seen.tolist() == [[5, 0], [6, 1], [7, 2], [8, 3]]
  assert found.tolist() == [0, 1, 2, 3]


# s: sparse, d: dense.
@pytest.mark.parametrize(
  ("pattern", "order", "trips"),
  [
    ("ddsss", ((2, 3, 1),), [3, 2]),
    ("dsdsds", ((1, 1, 3),), [3]),
    ("ddsds", ((2, 1, 1), (1, 1, 1)), [2, 1, 1, 1]),
    ("ddsddsdds", ((2, 1, 3),), [3]),
    ("dsd", ((1, 1, 1), (1, 0, 1)), [1, 1, 1]),
    ("sdssd", ((0, 1, 1), (1, 2, 1), (1, 0, 1)), [2, 1, 1, 1]),
    ("ssdssdssdd", ((0, 2, 1), (1, 2, 2), (2, 0, 1)), [2, 2, 2]),
  ],
)
def test_layers_of_two_stacks_run_in_any_order(pattern, order, trips):
  numbers = {"experts": 4, "dense_layers": 0, "sparse_every": 1, "layers": len(pattern)}
  dense = tuple(layer for layer, kind in enumerate(pattern) if kind == "d")
  found = order_of(types.SimpleNamespace(**numbers, mlp_only_layers=dense))
  assert found == order
  assert trip_counts(found) == trips
  names = [(10 if kind == "s" else 1) * (1 + layer) for layer, kind in enumerate(pattern)]
  each = [[x for x, kind in zip(names, pattern, strict=True) if kind == one] for one in "sd"]
  seen, of_sparse, of_dense = visited(*each, found)
  assert seen.tolist() == [[name, layer] for layer, name in enumerate(names)]
  assert of_sparse.tolist() == [layer for layer, kind in enumerate(pattern) if kind == "s"]
  assert of_dense.tolist() == [layer for layer, kind in enumerate(pattern) if kind == "d"]


# ------------------------------ scan unroll ------------------------------

# Layers that differ: windows, and the rope tables of each kind.
LAYERS = {
  **{"model.layers": 6, "model.window": 9, "model.global_every": 3, "model.dropout_rate": 0.25},
  **FEATURES,
}
MESH = {"mesh.fsdp": 4, "mesh.tensor": 2, "training.scan_unroll": 2}


def iterations(text):
  """Returns how often the loops of a compiled program run."""
  return {int(count) for count in re.findall(r'"known_trip_count":\{"n":"(\d+)"', text)}


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3, 6])
def test_every_divisor_trains_as_one_layer_at_a_time(count):
  wanted = train("lm", "float64", LAYERS)
  ours = train("lm", "float64", {**LAYERS, "training.scan_unroll": count})
  assert_equal(ours, wanted, "float64")
  assert 6 in iterations(wanted.trained.text)
  assert 6 not in iterations(ours.trained.text)
  assert count == 6 or 6 // count in iterations(ours.trained.text)


@pytest.mark.long
def test_on_a_mesh_two_layers_at_a_time_train_as_one_at_a_time_on_one_device():
  layers = {**LAYERS, "model.layers": 4, "model.global_every": 2}
  ours = train("lm", "float64", {**layers, **MESH})
  assert_equal(ours, train("lm", "float64", layers), "float64")
  assert 2 in iterations(ours.trained.text)
