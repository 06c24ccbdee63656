"""The time of a collective, from its bytes and the links between its devices.

V bytes over links of W bytes per second each way: an all-gather or reduce-scatter takes V/W, an
all-reduce twice that, an all-to-all on a ring V/4W; a group that spans several axes of a torus
sends along all of them. Source: the scaling book, chapter on sharded matrices.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from analysis.chips import Rates
from planning.topology import Topology

# Kind -> how often V passes a link.
_PASSES = {
  "all-gather": 1.0,
  "reduce-scatter": 1.0,
  "all-reduce": 2.0,
  "all-to-all": 0.25,
  "ragged-all-to-all": 0.25,
  "collective-permute": 1.0,
  "collective-broadcast": 1.0,
}


@dataclasses.dataclass(frozen=True)
class Wire:
  """The link between a group of devices.

  Attributes:
    network: `ICI`, `NVLink`, `PCIe`, `memory` or `DCN`.
    bandwidth: bytes per second that a device sends.
    hops: to the farthest device of the group.
    latency: additional seconds of a collective.
  """

  network: str
  bandwidth: float
  hops: int
  latency: float = 0.0


@dataclasses.dataclass(frozen=True)
class Places:
  """The places of a mesh's devices in the topology.

  Attributes:
    topology: theirs, of one slice.
    coordinates: [devices, dims of the torus], by their places in `mesh.devices.flat`; of GPUs
      [devices, 1], the number of the machine.
    slices: [devices], the slice of each.
  """

  topology: Topology
  coordinates: np.ndarray
  slices: np.ndarray

  def wire(self, group: Sequence[int]) -> Wire:
    """Returns the link between a group of places."""
    chip = self.topology.chip
    group = np.asarray(group)
    if len(np.unique(self.slices[group])) > 1:
      return Wire("DCN", chip.slow_bandwidth, 1)
    there = self.coordinates[group]
    if not chip.torus:
      beyond = len(np.unique(there[:, 0])) > 1
      near = Wire(chip.network, chip.link_bandwidth, 1, chip.latency)
      return Wire("DCN", chip.slow_bandwidth, 1) if beyond else near
    bandwidth, hops = 0.0, 0
    for dim, (size, closed) in enumerate(
      zip(self.topology.shape, self.topology.wraps(), strict=True)
    ):
      varied = len(np.unique(there[:, dim]))
      if varied > 1:
        ring = closed and varied == size
        bandwidth += chip.link_bandwidth * (1.0 if ring else 0.5)
        hops += varied // 2 if ring else varied - 1
    # The two devices of one chip need no link between chips.
    return Wire("ICI", bandwidth or 2 * chip.link_bandwidth, max(hops, 1))


def in_order(topology: Topology, count: int) -> Places:
  """Returns devices numbered by place: through chips, machines and slices."""
  numbers = np.arange(count)
  slices, inside = np.divmod(numbers, topology.devices)
  if not topology.chip.torus:
    return Places(topology, (inside // topology.chip.machine)[:, None], slices)
  chips = inside // topology.chip.devices_per_chip
  return Places(topology, np.stack(np.unravel_index(chips, topology.shape), axis=1), slices)


def seconds(kind: str, size: float, wire: Wire, rates: Rates) -> float:
  """Returns the time of one run without overlap.

  Args:
    kind: of `collectives.KINDS`.
    size: bytes of its payload, per device.
    wire: the link of its groups.
    rates: the achieved share of a link's bandwidth.
  """
  beside = wire.hops * rates.hop_seconds + wire.latency
  return _PASSES[kind] * size / (wire.bandwidth * rates.link) + beside
