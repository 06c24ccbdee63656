"""Runs that fail are simulated; held to closed forms."""

import dataclasses
import math

import numpy as np
import pytest

from planning import goodput
from planning.goodput import DAY, Faults

LLAMA = Faults(2048, goodput.FAILURES_PER_NODE_DAY, 10.0, 120.0, 600.0)


def test_the_default_rate_is_the_published_one():
  assert 54 * DAY / LLAMA.between_seconds == pytest.approx(419)


@pytest.mark.parametrize("interval", [150.0, 470.0, 3000.0])
@pytest.mark.parametrize("nodes", [64, 2048])
def test_a_long_run_has_the_share_of_the_closed_form(nodes, interval):
  faults = Faults(nodes, 0.02, 10.0, 100.0, 300.0)
  found = goodput.simulate(400 * faults.between_seconds, interval, faults)
  between = faults.between_seconds
  # A life lasts `between` in the mean, and saves k times with probability exp(-k cycle / between)
  # after the restart; the save is there once it is written.
  started = math.exp(-(faults.restart_seconds + faults.write_seconds) / between)
  saves = started / math.expm1((interval + faults.block_seconds) / between)
  assert found.share == pytest.approx(saves * interval / between, rel=0.02)
  assert found.failures == pytest.approx(found.seconds[0] / between, rel=0.02)
  spent = found.share + found.saving + found.again + found.restarting
  assert spent == pytest.approx(1.0, abs=1e-9)
  low, high = found.seconds[1:]
  assert low < found.seconds[0] < high


def test_the_best_interval_is_daly_s():
  found = goodput.best(60 * DAY, 5.0, LLAMA)
  assert goodput.young(LLAMA) == pytest.approx(math.sqrt(2 * 10 * LLAMA.between_seconds))
  assert found.interval_seconds == pytest.approx(goodput.daly(LLAMA), rel=0.35)  # it is flat there
  at_daly = goodput.simulate(60 * DAY, goodput.daly(LLAMA), LLAMA)
  assert at_daly.share <= found.share + 1e-9
  assert at_daly.share == pytest.approx(found.share, rel=0.005)
  # Lambert's W solves Daly's exact condition: T = M (1 + W(-exp(-d / M - 1))), here by Newton.
  block, between = LLAMA.block_seconds, LLAMA.between_seconds
  exact = goodput.young(LLAMA)
  for _ in range(50):
    grows = math.exp((exact + block) / between)
    exact -= (grows * (1 - exact / between) - 1) / (-grows * exact / between**2)
  assert goodput.daly(LLAMA) == pytest.approx(exact, rel=0.01)


def test_saves_in_memory_save_the_steps_of_the_failures_that_they_cover():
  faults, interval, in_memory, slower = Faults(2048, 0.02, 0.0, 0.0, 300.0), 900.0, 30.0, 1.01
  between, shares = faults.between_seconds, []
  for covers in (0.0, 0.5, 1.0):
    both = dataclasses.replace(
      faults, memory_interval_seconds=in_memory, memory_block_seconds=0.3, memory_covers=covers
    )
    found = goodput.simulate(30 * DAY, interval, both)
    shares.append(found.share)
    assert found.saving >= found.share * 0.01 * (1 - 1e-9)
  # As above: a life keeps k intervals with probability exp(-k interval / between).
  for share, kept in ((shares[0], interval), (shares[2], in_memory)):
    wanted = math.exp(-300 / between) * kept / math.expm1(kept * slower / between) / between
    assert share == pytest.approx(wanted, rel=0.02)
  assert shares[0] < shares[1] < shares[2]


def test_without_failures_only_saves_cost():
  found = goodput.simulate(1000.0, 100.0, Faults(1, 1e-9, 2.0, 5.0, 60.0))
  np.testing.assert_allclose(found.seconds, 1000.0 + 9 * 2.0)  # none after the last step
  assert found.failures == found.again == found.restarting == 0


def test_a_run_that_would_not_end_is_refused_with_its_numbers():
  with pytest.raises(
    ValueError, match=r"20,000 nodes with 1 failures per node and day fail every 4 s"
  ):
    goodput.simulate(DAY, 60.0, Faults(20_000, 1.0, 1.0, 10.0, 600.0))
