"""The layers of experts that are timed compute the same."""

import functools

import pytest
from absl import flags

from benchmarks import experts


@pytest.fixture
def given():
  flags.FLAGS.mark_as_parsed()
  sizes = {"layer_tokens": 48, "layer_width": 8, "layer_hidden": 12, "layer_experts": 4}
  before = {name: flags.FLAGS[name].value for name in sizes}
  for name, value in sizes.items():
    setattr(flags.FLAGS, name, value)
  yield experts.inputs()
  for name, value in before.items():
    setattr(flags.FLAGS, name, value)


def test_all_ways_agree(given):
  wanted = experts.own_tokens(*given)
  ways = [experts.every_token, functools.partial(experts.ours, "tiles")]
  for way in ways:
    assert experts.distance(experts.of_a_loss(way)(*given), wanted) < experts.TOLERANCE
  wrong = experts.of_a_loss(lambda *inputs: 1.01 * experts.every_token(*inputs))(*given)
  assert experts.distance(wrong, wanted) > experts.TOLERANCE
