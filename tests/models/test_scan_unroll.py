"""Several layers in one iteration of the scan: the same model, and fewer iterations."""

import re

import pytest

from tests.parity.comparison import FEATURES, assert_equal, train

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
