"""Pipeline stages train as one device does, in float64: loss, raw gradients, three SGD steps."""

import functools

import pytest

from tests.parity.comparison import FEATURES, assert_equal, train

LAYERS = {"model.layers": 4}
INTERLEAVED = {"training.pipeline": "interleaved"}
GPIPE = {"training.pipeline": "gpipe"}
DROPOUT = {"model.dropout_rate": 0.2}
CASES = {
  "stage2": {"mesh.stage": 2},
  "stage4_data2": {"mesh.stage": 4, "mesh.data": 2},
  "stage2_fsdp2_tensor2": {"mesh.stage": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
  "interleaved_fsdp2_tensor2": {
    "mesh.stage": 2,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    **INTERLEAVED,
  },
}


@functools.cache
def trained(**keys):
  return train("lm", "float64", {**LAYERS, **keys})


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_device_does(name):
  assert_equal(trained(**FEATURES, **CASES[name]), trained(**FEATURES), "float64")
