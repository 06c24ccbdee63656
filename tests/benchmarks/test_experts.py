"""The layers of experts that are timed compute the same."""

import functools

from benchmarks import experts


def test_all_ways_agree():
  given = experts.inputs(n=48, d=8, f=12, e=4)
  wanted = experts.own_tokens(*given)
  for way in (experts.every_token, functools.partial(experts.ours, "tiles")):
    assert experts.distance(experts.of_a_loss(way)(*given), wanted) < experts.TOLERANCE
  wrong = experts.of_a_loss(lambda *inputs: 1.01 * experts.every_token(*inputs))(*given)
  assert experts.distance(wrong, wanted) > experts.TOLERANCE
