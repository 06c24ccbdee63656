"""Pipeline stages train as one device does, in float64: loss, raw gradients, three SGD steps."""

import functools

import pytest

from tests.parity.choices import assert_conclusive, margins
from tests.parity.comparison import assert_equal, train
from tests.parity.pipeline_cases import CASES, LAYERS, LONG, SHORT


@functools.cache
def on_one_device(name):
  keys = CASES[name].on_one_device
  if "model.experts" not in keys:
    return train("lm", "float64", keys)
  with margins() as found:
    run = train("lm", "float64", keys)
  assert_conclusive(found, "float64")
  return run


@pytest.mark.parametrize(
  "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_trains_as_one_device_does(name):
  case = CASES[name]
  same = next(n for n, one in CASES.items() if one.on_one_device == case.on_one_device)
  ours = train("lm", "float64", {**LAYERS, **case.shared, **case.ours})
  assert_equal(ours, on_one_device(same), "float64")
