"""Traffic to and from the host's memory by formula, and whether the step hides it."""

import dataclasses

import pytest

from planning.analytic import with_host_traffic
from planning.roofline import Work
from planning.step_time import Times
from runtime.chips import CHIPS
from tests.planning.programs import IDEAL

CHIP = dataclasses.replace(CHIPS["h100"], host_bandwidth=100.0)


def traffic(held, microbatches=1):
  """Returns what a step of 3 seconds becomes: its seconds, and (direction, bytes, exposed)."""
  found = with_host_traffic(Times(3.0, 0, 0, Work(0, 0), ()), microbatches, held, CHIP, IDEAL)
  rows = [(one.direction, one.bytes, pytest.approx(one.exposed_seconds)) for one in found.host]
  return found.step, rows


def test_activations_go_out_in_the_forward_pass_and_come_back_in_the_backward_pass():
  assert traffic({"activations": 150}) == (3.5, [("to host", 150, 0.5), ("from host", 150, 0.0)])


def test_each_microbatch_moves_its_own():
  step, rows = traffic({"activations": 50}, microbatches=4)
  assert [size for _, size, _ in rows] == [200, 200]
  assert step == 4.0


def test_optimizer_state_moves_while_nothing_else_can_run():
  assert traffic({"optimizer state": 50})[0] == 4.0
  assert traffic({}) == (3.0, [])
