"""The time of a collective, from its bytes and the links between its devices.

V bytes over links of W bytes per second each way: an all-gather or reduce-scatter takes V/W, an
all-reduce twice that, an all-to-all on a ring V/4W and over a switch V/W; a group that spans
several axes of a torus sends along all of them, in both directions. Source: the scaling book,
chapter on sharded matrices. Of a group over several machines or slices, the devices in one send
side by side, each over its own part of the network (NCCL's rings, one for each card).
Groups whose chips alternate along an axis share its links, since all groups communicate at the same
time. A permute sends each array along one path: one direction of an axis, at half of W.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from planning.topology import Topology
from runtime.chips import Rates

# Kind -> how often V passes a link, and the device's own memory: what is received is written, what
# is sent on is read, and a sum also reads the device's own part.
_PASSES = {
  "all-gather": (1.0, 2.0),
  "reduce-scatter": (1.0, 3.0),
  "all-reduce": (2.0, 5.0),  # a reduce-scatter and an all-gather
  "all-to-all": (0.25, 2.0),
  "ragged-all-to-all": (0.25, 2.0),
  "collective-permute": (1.0, 2.0),
  "collective-broadcast": (1.0, 2.0),
}
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


DCN = "DCN"  # between machines of GPUs, and between slices


@dataclasses.dataclass(frozen=True)
class Wire:
  """The link between a group of devices.

  Attributes:
    network: `ICI`, `NVLink`, `PCIe`, `memory` or `DCN`.
    bandwidth: bytes per second that a device sends.
    hops: to the farthest device of the group.
    latency: additional seconds of a collective.
    alone: bytes per second that a device sends by itself, of an all-to-all; 0: `bandwidth`.
    links: those that a collective takes, of all devices; collectives without a common one run at
      the same time. `ICI 0+ 2,3` leads from the chip at (2, 3) along the torus' first dim, towards
      larger coordinates.
  """

  network: str
  bandwidth: float
  hops: int
  latency: float = 0.0
  links: frozenset[str] = frozenset()
  alone: float = 0.0


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

  def slowest(self, groups: np.ndarray) -> Wire:
    """Returns the slowest of the links of groups [groups, members], of places.

    Groups whose members are as far from their first one have the same, so one of them is examined.
    """
    at = np.concatenate((self.coordinates, self.slices[:, None]), axis=1)[groups]
    away = (at - at[:, :1]).reshape(len(groups), -1)
    _, first = np.unique(away, axis=0, return_index=True)
    return min((self.wire(groups[i]) for i in sorted(first)), key=lambda wire: wire.bandwidth)

  def wire(self, group: Sequence[int]) -> Wire:
    """Returns the link between a group of places."""
    group = np.asarray(group)
    if not self._in_the_torus(group):
      return self._switched(group)
    there = self.coordinates[group]
    bandwidth, hops, dims = 0.0, 0, []
    for dim, (size, closed) in enumerate(self._dims()):
      along = np.unique(there[:, dim])
      if len(along) > 1:
        # Between the group's chips are those of as many other groups, which use the same links.
        apart = int(np.diff(along).max())
        ring = closed and apart * len(along) == size
        bandwidth += self.topology.chip.link_bandwidth * (1.0 if ring else 0.5) / apart
        hops += apart * (len(along) // 2 if ring else len(along) - 1)
        dims.append(dim)
    return self._over(bandwidth, hops, _links_along(tuple(dims), self.topology.shape))

  def route(self, pairs: Sequence[tuple[int, int]]) -> Wire:
    """Returns the link by which pairs (source, target) of places send at the same time.

    Each takes the shorter way around, dim after dim; the link that most of them pass is the
    slowest.
    """
    ends = np.array([pair for pair in pairs if pair[0] != pair[1]], int).reshape(-1, 2)
    switched = ends if not self.topology.chip.torus else ends[np.ptp(self.slices[ends], axis=1) > 0]
    if len(switched):
      return self.slowest(switched)
    passed: dict[tuple, int] = defaultdict(int)
    hops = 0
    for source, target in ends.tolist():
      at, length = [*map(int, self.coordinates[source])], 0
      where, target = self.slices[source], self.coordinates[target]
      for dim, (size, closed) in enumerate(self._dims()):
        away = int(target[dim]) - at[dim]
        if closed and not -size < 2 * away <= size:
          away -= size if away > 0 else -size
        way = 1 if away > 0 else -1
        for _ in range(abs(away)):
          passed[where, _link(dim, way, at)] += 1
          at[dim] = (at[dim] + way) % size
        length += abs(away)
      hops = max(hops, length)
    most = max(passed.values(), default=1)
    one_way = self.topology.chip.link_bandwidth / 2
    links = frozenset(link for _, link in passed)
    return self._over(one_way / most if links else 0.0, hops, links)

  def _in_the_torus(self, group: np.ndarray) -> bool:
    return bool(self.topology.chip.torus) and len(np.unique(self.slices[group])) == 1

  def _dims(self) -> Iterator[tuple[int, bool]]:
    """Yields the size of each dim of the torus, and whether it has wraparound links."""
    return zip(self.topology.shape, self.topology.wraps(), strict=True)

  def _over(self, bandwidth: float, hops: int, links: frozenset[str]) -> Wire:
    # The two devices of one chip need no link between chips.
    bandwidth = bandwidth or 2 * self.topology.chip.link_bandwidth
    return Wire("ICI", bandwidth, max(hops, 1), links=links or frozenset({"chip"}))

  def _switched(self, group: np.ndarray) -> Wire:
    """Returns the link between devices that no torus connects."""
    chip = self.topology.chip
    there = self.slices
    if not chip.torus:  # a machine of a slice
      there = there * (1 + self.coordinates.max()) + self.coordinates[:, 0]
    units, members = np.unique(there[group], return_counts=True)
    if len(units) > 1:
      bandwidth, alone, beside = chip.slow_bandwidth, 0.0, int(members.min())
      if beside > 1:
        inside = self.wire(group[there[group] == units[0]])
        bandwidth, alone = min(beside * bandwidth, inside.bandwidth), bandwidth
      return Wire(DCN, bandwidth, 1, links=frozenset({DCN}), alone=alone)
    return Wire(chip.network, chip.link_bandwidth, 1, chip.latency, frozenset({chip.network}))


def _link(dim: int, way: int, at: Sequence[int]) -> str:
  return f"ICI {dim}{'+' if way > 0 else '-'} {','.join(map(str, at))}"


@functools.cache
def _links_along(dims: tuple[int, ...], shape: tuple[int, ...]) -> frozenset[str]:
  """Returns all links of a torus along some of its dims, in both directions."""
  every = itertools.product(dims, (1, -1), itertools.product(*map(range, shape)))
  return frozenset(_link(dim, way, at) for dim, way, at in every)


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
  bandwidth, (passes, _) = wire.bandwidth, _PASSES[kind]
  if kind in _ALL_TO_ALL and wire.network != "ICI":
    bandwidth, passes = wire.alone or bandwidth, 1.0
  return passes * size / (bandwidth * rates.link) + beside


def memory_bytes(kind: str, size: float) -> float:
  """Returns the bytes that one run reads and writes in the memory of a device that it runs on."""
  return _PASSES[kind][1] * size
