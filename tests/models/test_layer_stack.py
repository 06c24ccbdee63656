"""Scans over layers: their order, and several layers in one iteration."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layer_stack import order_of, over_layers, trip_counts
from runtime.layer_kinds import LAYERS
from tests.parity.comparison import FEATURES, assert_equal, train


class One(nnx.Module):
  """Stands for a layer: its name is a number."""

  def __init__(self, name):
    self.name = nnx.Param(jnp.asarray(name))


def stacked(names):
  return nnx.vmap(One)(jnp.asarray(names, jnp.int32))


def visited(stacks, order, unroll=1):
  """Returns (name, number) of the layers in the order in which they run."""
  count = sum(map(len, stacks.values()))

  def body(layer, carry, number):
    seen, at = carry
    entry = jnp.stack([layer.name[...], number])
    return (jax.lax.dynamic_update_index_in_dim(seen, entry, at, 0), at + 1), number

  first = jnp.zeros((count, 2), jnp.int32), jnp.asarray(0, jnp.int32)
  numbers = jnp.arange(count, dtype=jnp.int32)
  layers = {name: stacked(names) for name, names in stacks.items()}
  (seen, _), found = over_layers(body, layers, order, first, numbers, unroll=unroll)
  return np.asarray(seen), {name: np.asarray(one).tolist() for name, one in found.items()}


def test_one_stack():
  seen, found = visited({"layers/": [5, 6, 7, 8]}, (), unroll=2)
  assert seen.tolist() == [[5, 0], [6, 1], [7, 2], [8, 3]]
  assert found == {"layers/": [0, 1, 2, 3]}


# s: sparse, d: dense, m: mixer, x: dense mixer; of layers with one part f: full, r: mixer, p: MLP.
STACKS = {"s": LAYERS, "d": "dense_layers/", "m": "mixer_layers/", "x": "dense_mixer_layers/"}
STACKS |= {"f": LAYERS, "r": "mixer_layers/", "p": "mlp_layers/"}
TYPES = {"m": "mixer", "x": "mixer", "r": "mixer", "p": "mlp"}


def runs(text):
  """Returns groups of `order_of`: `2(s3 d1)` is a period that runs twice."""
  found = []
  for times, several, one in re.findall(r"(\d)\((.*?)\)|(\w\d)", text):
    each = [(STACKS[word[0]], int(word[1:])) for word in (several or one).split()]
    found.append((tuple(each), int(times or 1)))
  return tuple(found)


@pytest.mark.parametrize(
  ("pattern", "order", "trips"),
  [
    ("ddsss", "d2 s3", [3, 2]),
    ("dsdsds", "3(d1 s1)", [3]),
    ("ddsds", "d2 s1 d1 s1", [2, 1, 1, 1]),
    ("ddsddsdds", "3(d2 s1)", [3]),
    ("dsd", "d1 s1 d1", [1, 1, 1]),
    ("sdssd", "s1 d1 s2 d1", [2, 1, 1, 1]),
    ("ssdssdssdd", "2(s2 d1) s2 d2", [2, 2, 2]),
    ("xmmsmmmsmmms", "x1 m2 2(s1 m3) s1", [2, 2, 1, 1]),
    ("rprprfprprfprprp", "2(r1 p1) 2(r1 f1 p1 r1 p1) r1 p1", [2, 2, 1, 1]),
    ("rrpfrrppfr", "r2 p1 f1 r2 p2 f1 r1", [2, 2, 2, 1, 1, 1, 1]),
  ],
)
def test_layers_of_several_stacks_run_in_any_order(pattern, order, trips):
  numbers = {"experts": 4, "dense_layers": 0, "sparse_every": 1, "layers": len(pattern)}
  dense = tuple(layer for layer, kind in enumerate(pattern) if kind in "dx")
  kinds = tuple(TYPES.get(kind, "full") for kind in pattern)
  found = order_of(types.SimpleNamespace(**numbers, mlp_only_layers=dense, layer_types=kinds))
  assert found == runs(order)
  assert trip_counts(found) == trips
  stacks = {STACKS[kind]: {} for kind in pattern}
  for layer, kind in enumerate(pattern):
    stacks[STACKS[kind]][layer] = 10 * ord(kind) + layer
  seen, returned = visited({name: [*each.values()] for name, each in stacks.items()}, found)
  assert seen.tolist() == [[10 * ord(kind) + layer, layer] for layer, kind in enumerate(pattern)]
  assert returned == {name: [*each] for name, each in stacks.items()}


# ------------------------------ scan unroll ------------------------------

# Layers that differ: windows, and the rope tables of each kind.
DIFFERING = {
  **{"model.layers": 6, "model.window": 9, "model.global_every": 3, "model.dropout_rate": 0.25},
  **FEATURES,
}
MESH = {"mesh.fsdp": 4, "mesh.tensor": 2, "training.scan_unroll": 2}


def iterations(text):
  """Returns how often the loops of a compiled program run."""
  return {int(count) for count in re.findall(r'"known_trip_count":\{"n":"(\d+)"', text)}


@pytest.mark.long
def test_on_a_mesh_two_layers_at_a_time_train_as_one_at_a_time_on_one_device():
  layers = {**DIFFERING, "model.layers": 4, "model.global_every": 2}
  ours = train("lm", "float64", {**layers, **MESH})
  assert_equal(ours, train("lm", "float64", layers), "float64")
  assert 2 in iterations(ours.trained.text)
