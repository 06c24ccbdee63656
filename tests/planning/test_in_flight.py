"""Links and HBM shared by transfers and compute: times known by hand."""

import numpy as np
import pytest

from planning.interconnect import memory_bytes
from planning.schedule import Device
from runtime.chips import CHIPS

A, B = frozenset({"a"}), frozenset({"b"})


def device():
  """Returns one whose HBM has 12 bytes per second."""
  return Device(12.0)


def test_what_computes_alone_takes_the_longer_of_its_seconds_and_its_bytes():
  one = device()
  assert one.compute(2.0, 12.0) == 2.0
  assert one.compute(0.5, 12.0) == 1.0
  assert one.compute(0.0, 0.0) == 0.0
  assert one.now == 3.0


def test_transfers_of_one_link_are_sent_in_turn_and_those_of_two_at_once():
  one = device()
  first, second = one.start(["x"], A, 1.0, 0.0), one.start(["y"], A, 2.0, 0.0)
  both, other = one.start(["z"], A | B, 1.0, 0.0), one.start(["w"], B, 1.0, 0.0)
  one.wait(other)
  assert [(t.begin, t.end) for t in (first, second)] == [(0, 1), (1, 3)]
  # It needs both links, and those after it wait for it: in the order in which they start.
  assert [(t.begin, t.end) for t in (both, other)] == [(3, 4), (4, 5)]
  assert one.now == 5.0


def test_a_wait_counts_for_what_is_sent_meanwhile():
  one = device()
  first, second = one.start(["x"], A, 1.0, 0.0), one.start(["y"], A, 2.0, 0.0)
  one.compute(0.25, 0.0)
  assert one.wait(second) == [(first, 0.75), (second, 2.0)]
  assert one.wait(second) == one.wait(first) == []


@pytest.mark.parametrize(("name", "axes", "share"), [("v5p", 3, 0.39), ("v6e", 2, 0.44)])
def test_the_share_of_hbm_that_an_all_gather_takes(name, axes, share):
  chip = CHIPS[name]
  sent = axes * chip.link_bandwidth
  assert memory_bytes("all-gather", sent) / chip.hbm_bandwidth == pytest.approx(share, abs=0.005)


def test_max_min_fair_shares_by_another_algorithm():
  """Beside progressive filling: all rates rise together until a demand or the sum is reached."""
  rng = np.random.default_rng(3)
  for count in range(1, 7):
    demands = rng.uniform(0.5, 9.0, count)
    rates, level = np.zeros(count), 0.0
    while level < demands.max() and rates.sum() < 12.0 - 1e-6:
      level += 1e-4
      rates = np.minimum(demands, level)
    one = device()
    sent = [one.start([str(i)], frozenset({str(i)}), 1.0, size) for i, size in enumerate(demands)]
    one.wait(min(sent, key=lambda t: t.demand))  # the smallest gets least or what it asks for
    done = [(t.seconds - t.left) * t.demand / one.now for t in sent]
    np.testing.assert_allclose(done, rates, rtol=1e-3)
