"""Transfers in flight beside what a device computes: a fluid simulation of its links and its HBM.

Collectives, copies to and from the host's memory, and copies between HBM and on-chip memory run
while the device computes. The model:

- A transfer takes the links that it names, alone. Transfers with a common link are sent in the
  order in which they start. The two directions of a torus' axis are different links; so are the
  axes, the network between slices, and the two directions to the host's memory.
- By itself a transfer takes its seconds, over which it evenly reads and writes its bytes of HBM. An
  instruction that computes does likewise.
- The bandwidth of HBM is shared max-min fairly: each gets what it asks for, up to an equal share of
  what is left (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). What gets less takes
  longer in proportion. So a matmul beside a gather takes no longer, and an elementwise pass does.

A data sheet gives HBM's bandwidth for reads and writes together, and the links' for each direction.
By those in `runtime/chips.py`, an all-gather along all three axes of a v5p receives 3 x 180 GB/s,
writes them and reads as much, 39 % of HBM's 2.77 TB/s; along both axes of a v6e it takes 44 %.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

_ROUNDING = 1e-9


@functools.cache  # a group of a large torus takes thousands of links, and few sets of them differ
def _share(one: frozenset[str], other: frozenset[str]) -> bool:
  return not one.isdisjoint(other)


@dataclasses.dataclass(eq=False)
class Transfer:
  """A transfer, and how far it is.

  Attributes:
    names: of the collectives or copies that it consists of.
    links: those that it takes.
    seconds: by itself.
    bytes: that it reads and writes in HBM.
    left: seconds that are left to do, by itself.
    begin: when its first byte was sent; None before.
    end: when it was complete; None before.
  """

  names: tuple[str, ...]
  links: frozenset[str]
  seconds: float
  bytes: float
  left: float = dataclasses.field(init=False)
  begin: float | None = dataclasses.field(init=False, default=None)
  end: float | None = dataclasses.field(init=False, default=None)

  def __post_init__(self):
    self.left = self.seconds

  @property
  def demand(self) -> float:
    """Returns the bytes of HBM per second that it asks for."""
    return self.bytes / self.seconds if self.seconds else 0.0


class Device:
  """The clock of a device: it computes, starts transfers and waits for them.

  Attributes:
    now: seconds.
    transfers: all that were started.
  """

  def __init__(self, bandwidth: float):
    self.now = 0.0
    self.transfers: list[Transfer] = []
    self._bandwidth = bandwidth
    self._open: list[Transfer] = []

  def start(
    self, names: Sequence[str], links: frozenset[str], seconds: float, size: float
  ) -> Transfer:
    """Starts a transfer of `size` bytes of HBM; it takes `seconds`, or longer if HBM is slower."""
    started = Transfer(tuple(names), links, max(seconds, size / self._bandwidth), size)
    self.transfers.append(started)
    self._open.append(started)
    return started

  def compute(self, seconds: float, size: float) -> float:
    """Runs an instruction that reads and writes `size` bytes; returns how long it takes.

    Args:
      seconds: that it takes at least.
      size: bytes of HBM.
    """
    lasted, left = 0.0, max(seconds, size / self._bandwidth)
    demand = size / left if left else 0.0
    while left > 0:
      sending = [*self._sending()]
      speed, *speeds = self._speeds([demand, *(one.demand for one in sending)])
      lasts = self._advance(sending, speeds, left / speed)
      left = left - lasts * speed if lasts < left / speed else 0.0
      lasted += lasts
    return lasted

  def wait(self, transfer: Transfer) -> list[tuple[Transfer, float]]:
    """Waits for a transfer; returns (whose sending it was, how long it took) in turn."""
    waited: dict[Transfer, float] = {}
    while transfer.end is None:
      sending, begin = [*self._sending()], self.now
      holder = self._holder(transfer, sending)
      self._advance(sending, self._speeds([one.demand for one in sending]))
      waited[holder] = waited.get(holder, 0.0) + self.now - begin
    return [*waited.items()]

  def _holder(self, transfer: Transfer, sending: Sequence[Transfer]) -> Transfer:
    """Returns the transfer that is sent before one that has to wait for its links, or itself."""
    while transfer not in sending:
      before = self._open[: self._open.index(transfer)]
      transfer = next(one for one in before if _share(one.links, transfer.links))
    return transfer

  def _sending(self) -> Iterator[Transfer]:
    """Yields the transfers that have all of their links; others wait in order."""
    for place, one in enumerate(self._open):
      if not any(_share(one.links, before.links) for before in self._open[:place]):
        one.begin = self.now if one.begin is None else one.begin
        yield one

  def _speeds(self, demands: Sequence[float]) -> list[float]:
    """Returns the speed of each, 1 if it gets what it asks for: max-min fair."""
    speeds, left, count = [1.0] * len(demands), self._bandwidth, len(demands)
    for index in sorted(range(len(demands)), key=demands.__getitem__):
      given = min(demands[index], left / count)
      if demands[index] - given > _ROUNDING * demands[index]:
        speeds[index] = given / demands[index]
      left, count = left - given, count - 1
    return speeds

  def _advance(
    self, sending: Sequence[Transfer], speeds: Sequence[float], limit: float = math.inf
  ) -> float:
    """Advances until a transfer is complete, at most by `limit` seconds; returns how far."""
    ends = (one.left / speed for one, speed in zip(sending, speeds, strict=True))
    lasts = min([limit, *ends])
    self.now += lasts
    for one, speed in zip(sending, speeds, strict=True):
      one.left -= lasts * speed
      if one.left <= _ROUNDING * one.seconds:
        one.end = self.now
        self._open.remove(one)
    return lasts
