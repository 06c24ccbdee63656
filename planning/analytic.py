"""The time of a step by formula, for topologies without a compiler.

What is sent is in `terms.py`. Source of the times: the scaling book, chapter on training.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from partitioning.rules import bytes_per_device
from planning import interconnect, terms, traced_step
from planning.interconnect import Places, Wire
from planning.roofline import Work, matmul_seconds, matmul_share, seconds_alone
from planning.step_facts import StepFacts
from planning.step_time import FROM_HOST, TO_HOST, HostTraffic, Sent, Times
from runtime.chips import Chip, Rates

Operations = Sequence[tuple[Work, int, bool]]


@dataclasses.dataclass(frozen=True)
class Counted:
  """What a device does in a step, before it is known how fast.

  Attributes:
    operations: of `traced_step.operations` and of whole matrices.
    update: bytes that the optimizer reads and writes.
    sent: the communication, with the bytes of a run and the link it takes.
  """

  operations: Operations
  update: float
  sent: Sequence[tuple[terms.Term, int, Wire]]

  def times(self, chip: Chip, rates: Rates) -> Times:
    """Returns how long a step takes.

    Operations run one after another, each for the longer of its FLOPs and its HBM traffic; then the
    optimizer passes over the state. The communication of FSDP and data parallelism overlaps with
    that as far as it lasts; between slices and machines only a share of it does
    (`Rates.slow_overlap`), whatever else there is to do. That of `tensor` and `context` is exposed.
    """
    bandwidth = rates.bandwidth(chip)
    chip = dataclasses.replace(chip, matmul=matmul_share(chip, alone=not self.sent))
    work, compute, busy = Work(0, self.update), 0.0, self.update / bandwidth
    for one, runs, wide in self.operations:
      work += one * runs
      # On GPUs float32 runs as TF32, at half the speed of bfloat16 (NVIDIA's data sheets).
      seconds = matmul_seconds(one, chip, rates) * (2 if wide and not chip.torus else 1)
      compute += runs * seconds
      busy += runs * seconds_alone(seconds, one.bytes / bandwidth, chip)
    found = [(term, _sent(term, size, wire, rates)) for term, size, wire in self.sent]
    hidden = sum(one.seconds for term, one in found if term.hidden)
    least = max(0.0, hidden - busy) / hidden if hidden else 0.0
    shares = {interconnect.DCN: max(least, 1 - rates.slow_overlap)}
    waited = tuple(
      dataclasses.replace(one, exposed_seconds=shares.get(one.wire.network, least) * one.seconds)
      if term.hidden
      else one
      for term, one in found
    )
    memory = work.bytes / bandwidth
    return Times(busy + sum(one.exposed_seconds for one in waited), compute, memory, work, waited)


def counted(
  step: StepFacts, places: Places, *, fused: bool = True, traced: Operations | None = None
) -> Counted:
  """Returns what a device computes and sends in a step.

  Args:
    step: whose time it is.
    places: of its mesh's devices in the topology.
    fused: as of `traced_step.operations`.
    traced: of `traced_step.operations`, if it is known; else it is traced here.
  """
  if traced is None:
    traced = traced_step.operations(step, fused=fused)
  operations = (*traced, *traced_step.of_matrices(step))
  return Counted(operations, _bytes(step), tuple(_sizes(step, places)))


def _sizes(step: StepFacts, places: Places) -> Iterator[tuple[terms.Term, int, Wire]]:
  """Yields the communication of a step, with the bytes of a run and the link it takes."""
  wire = functools.cache(lambda ring, axes: _wire(groups(step, axes), places, ring=ring))
  for term in terms.step_terms(step):
    axes = tuple(axis for axis in step.mesh.axis_names if axis in term.axes)
    link = wire(term.kind == "collective-permute", axes)
    yield dataclasses.replace(term, axes=axes), round(term.elements * term.itemsize), link


def times(
  step: StepFacts,
  places: Places,
  chip: Chip,
  rates: Rates,
  *,
  fused: bool = True,
  traced: Operations | None = None,
) -> Times:
  """Returns how long a step takes, as `counted` and `Counted.times` do."""
  return counted(step, places, fused=fused, traced=traced).times(chip, rates)


def _sent(term: terms.Term, size: int, wire: Wire, rates: Rates) -> Sent:
  """Returns a term with its time, as if nothing were hidden."""
  seconds = term.runs / term.every * interconnect.seconds(term.kind, size, wire, rates)
  return Sent(term.kind, term.axes, size, term.runs, term.why, wire, seconds, seconds)


def _wire(found: np.ndarray, places: Places, *, ring: bool) -> Wire:
  """Returns the slowest link of groups [groups, members], which in a ring send to the next one."""
  if not ring:
    return places.slowest(found)
  return places.route(
    np.stack((found, np.roll(found, -1, axis=1)), axis=-1).reshape(-1, 2).tolist()
  )


def groups(step: StepFacts, axes: tuple[str, ...]) -> np.ndarray:
  """Returns groups [groups, members], places in `mesh.devices.flat` apart along these axes."""
  sizes = tuple(step.mesh.shape.values())
  numbers = np.arange(step.mesh.size).reshape(sizes)
  chosen = [step.mesh.axis_names.index(axis) for axis in axes]
  numbers = np.moveaxis(numbers, chosen, range(len(chosen)))
  return numbers.reshape(math.prod(sizes[i] for i in chosen), -1).T


def _bytes(step: StepFacts) -> float:
  """Returns the HBM traffic of the optimizer: parameters, gradients and its state.

  Gradients that are accumulated are read, added and written once per microbatch.
  """
  sizes, count = step.sizes, step.training.gradient_accumulation_steps
  held = {
    title: sum(
      bytes_per_device(p, sizes)
      for p in step.placements[title].values()
      if title == "optimizer" or p.name in step.trained
    )
    for title in ("parameters", "optimizer")
  }
  sums = 3 * count if count > 1 else 0
  return 2.0 * (2 * held["parameters"] + held["optimizer"]) + sums * held["parameters"]


# Transfers between a device's memory and its host's, by formula: where no compiler shows them.
#
# Offloaded activations go out while the forward pass runs, a third of the step's work, and come
# back in the backward pass, each overlapping with it as far as possible. Optimizer state comes and
# goes in the loop over layers that updates them, in which there is nothing to overlap with.

_FORWARD = 1 / 3  # of the step's work


def with_host_traffic(
  times: Times, microbatches: int, held: Mapping[str, int], chip: Chip, rates: Rates
) -> Times:
  """Returns the times of a step with what its transfers add.

  Args:
    times: without them.
    microbatches: of a step, one after another.
    held: of `memory.of_the_host`.
    chip: of a device.
    rates: achieved shares of the chip's constants.
  """
  bandwidth = chip.host_bandwidth * rates.link
  found = []
  for what, directions in (
    ("activations", ((TO_HOST, _FORWARD), (FROM_HOST, 1 - _FORWARD))),
    ("optimizer state", ((FROM_HOST, 0), (TO_HOST, 0))),
  ):
    size = held.get(what, 0) * (microbatches if what == "activations" else 1)
    seconds = size / bandwidth
    found += [
      HostTraffic(direction, size, seconds, max(0.0, seconds - share * times.step), what)
      for direction, share in directions
      if size
    ]
  waited = sum(one.exposed_seconds for one in found)
  return dataclasses.replace(times, step=times.step + waited, host=(*times.host, *found))
