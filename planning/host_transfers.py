"""Transfers between a device's memory and its host's, by formula: where no compiler shows them.

Offloaded activations go out while the forward pass runs, a third of the step's work, and come back
in the backward pass, each overlapping with it as far as possible. Optimizer state comes and goes in
the loop over layers that updates them, in which there is nothing to overlap with.
"""

import dataclasses
from collections.abc import Mapping

from planning.host_traffic import FROM_HOST, TO_HOST
from planning.step_time import HostTraffic, Times
from runtime.chips import Chip, Rates
from training.setup import Job

_FORWARD = 1 / 3  # of the step's work


def with_host_traffic(
  times: Times, job: Job, held: Mapping[str, int], chip: Chip, rates: Rates
) -> Times:
  """Returns the times of a step with what its transfers add.

  Args:
    times: without them.
    job: a prepared job.
    held: of `memory.of_the_host`.
    chip: of a device.
    rates: achieved shares of the chip's constants.
  """
  bandwidth = chip.host_bandwidth * rates.link
  count = job.config.training.gradient_accumulation_steps
  found = []
  for what, directions in (
    ("activations", ((TO_HOST, _FORWARD), (FROM_HOST, 1 - _FORWARD))),
    ("optimizer state", ((FROM_HOST, 0), (TO_HOST, 0))),
  ):
    size = held.get(what, 0) * (count if what == "activations" else 1)
    seconds = size / bandwidth
    found += [
      HostTraffic(direction, size, seconds, max(0.0, seconds - share * times.step), what)
      for direction, share in directions
      if size
    ]
  waited = sum(one.exposed_seconds for one in found)
  return dataclasses.replace(times, step=times.step + waited, host=(*times.host, *found))
