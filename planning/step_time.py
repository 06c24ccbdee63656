"""Simulates the time of a step: its instructions in the order of the compiler's schedule.

A collective, or a transfer to or from the host's memory, overlaps with the work between its start
and its end; a synchronous one is exposed. Loops count as often as they run.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from analysis import hlo
from analysis.chips import Chip, Rates
from analysis.collectives import Collective
from analysis.host_traffic import Transfer
from analysis.roofline import FREE, Costs, Work, matmul_seconds
from planning import interconnect
from planning.interconnect import Places, Wire


@dataclasses.dataclass(frozen=True)
class Sent:
  """A collective, and what it costs in one step.

  Attributes:
    kind: of `collectives.KINDS`.
    axes: the mesh axes along which the devices of a group differ.
    each: bytes of the payload of one run, per device.
    runs: how often it runs; 1 if the program's text does not show it.
    source: its source line, or, by formula, the cause.
    wire: its link.
    seconds: of all its runs.
    exposed_seconds: the part of them that the device waits.
  """

  kind: str
  axes: tuple[str, ...]
  each: int
  runs: int
  source: str
  wire: Wire
  seconds: float
  exposed_seconds: float

  @property
  def bytes(self) -> int:
    """Returns the payload of all its runs, per device."""
    return self.runs * self.each


@dataclasses.dataclass(frozen=True)
class HostTraffic:
  """What a device sends to its host's memory, or receives from it, in one step.

  Attributes:
    direction: of `host_traffic`.
    bytes: per device.
    seconds: by itself, at the bandwidth of the link.
    exposed_seconds: the part of them that the device waits.
    what: the arrays; "" if it is all of them, in a compiled program.
  """

  direction: str
  bytes: int
  seconds: float
  exposed_seconds: float
  what: str = ""


@dataclasses.dataclass(frozen=True)
class Times:
  """One step on one device.

  Attributes:
    step: seconds.
    compute: seconds of the matmuls alone.
    memory: seconds of the HBM traffic alone.
    work: FLOPs and bytes, counted as often as they run.
    sent: the collectives.
    host: transfers between the device's memory and its host's.
  """

  step: float
  compute: float
  memory: float
  work: Work
  sent: tuple[Sent, ...]
  host: tuple[HostTraffic, ...] = ()

  @property
  def communication(self) -> float:
    """Returns the seconds of all collectives, hidden or not."""
    return sum(one.seconds for one in self.sent)

  @property
  def exposed(self) -> float:
    """Returns the seconds that the device waits for them."""
    return sum(one.exposed_seconds for one in self.sent)

  @property
  def host_exposed(self) -> float:
    """Returns the seconds that the device waits for transfers to or from its host's memory."""
    return sum(one.exposed_seconds for one in self.host)


def times(
  program: hlo.Program,
  found: Sequence[Collective],
  places: Places,
  chip: Chip,
  rates: Rates,
  moved: Sequence[Transfer] = (),
) -> Times:
  """Returns how long a step takes.

  Args:
    program: as compiled and scheduled for one device.
    found: its collectives.
    places: of its mesh's devices in the topology.
    chip: of a device.
    rates: achieved shares of the chip's constants.
    moved: its transfers between the device's memory and its host's.
  """
  walker = _Walker(program, found, places, chip, rates, moved)
  step = walker.walk(hlo.Frame(program.computations[program.entry]), 1)
  sent = []
  for one in found:
    runs = 1 if one.count is None else one.count
    wire, seconds = walker.wires[one.name], runs * walker.alone[one.name]
    waited = walker.waited[one.name]
    sent.append(Sent(one.kind, one.axes, one.bytes, runs, one.source, wire, seconds, waited))
  work = walker.work
  compute, memory = matmul_seconds(work, chip, rates), work.bytes / walker.bandwidth
  return Times(step, compute, memory, work, tuple(sent), tuple(walker.host_traffic(moved)))


class _Walker:
  """Simulates the schedule with a clock."""

  def __init__(
    self,
    program,
    found: Sequence[Collective],
    places,
    chip: Chip,
    rates: Rates,
    moved: Sequence[Transfer],
  ):
    self._program, self._costs = program, Costs(program)
    self._chip, self._rates = chip, rates
    self.bandwidth = chip.hbm_bandwidth * rates.memory
    self.wires = {one.name: _slowest(one, places) for one in found}
    self.alone = {
      one.name: interconnect.seconds(one.kind, one.bytes, self.wires[one.name], rates)
      for one in found
    }
    # The link to the host is apart from those to other devices, and has two directions.
    self._links = {one.name: one.direction for one in moved}
    bandwidth = chip.host_bandwidth * rates.link
    self.alone |= {one.name: one.bytes / bandwidth for one in moved}
    self.waited: dict[str, float] = defaultdict(float)
    self.work = Work(0, 0)

  def host_traffic(self, moved: Sequence[Transfer]) -> Iterator[HostTraffic]:
    """Yields the sums of the transfers by direction."""
    for direction in dict.fromkeys(one.direction for one in moved):
      some = [(one, one.count or 1) for one in moved if one.direction == direction]
      size = sum(runs * one.bytes for one, runs in some)
      seconds = sum(runs * self.alone[one.name] for one, runs in some)
      waited = sum(self.waited[one.name] for one, _ in some)
      yield HostTraffic(direction, size, seconds, waited)

  def walk(self, frame: hlo.Frame, runs: int) -> float:
    """Returns the seconds of one run of a computation that runs `runs` times in a step."""
    clock, free = 0.0, defaultdict(float)  # now, and when each link is free again
    under_way: dict[str, tuple[list[str], float]] = {}
    for instruction in frame.computation.instructions.values():
      if instruction.opcode == "while":
        known = hlo.trip_count(self._program, frame, instruction)
        trips = 1 if known is None else known
        body = self._program.computations[instruction.one("body")]
        clock += trips * self.walk(hlo.Frame(body, instruction, frame), runs * trips)
      elif instruction.opcode in ("call", "conditional"):
        branches = (self._program.computations[name] for name in instruction.called())
        clock += max(self.walk(hlo.Frame(one, instruction, frame), runs) for one in branches)
      elif instruction.opcode.endswith(("-update", "-done")):
        names, end = under_way.pop(_start(frame, instruction), ([], 0.0))
        clock += self._wait(names, end - clock, runs)
      elif instruction.opcode == "recv":
        continue  # its transfer began with a send
      elif instruction.opcode not in FREE:
        names = self._collectives(instruction)
        there = self._costs.work(frame.computation, instruction)
        if not names or instruction.opcode == "fusion":
          self.work += there * runs
        compute = matmul_seconds(there, self._chip, self._rates)
        lasts = max(compute, there.bytes / self.bandwidth)
        if not names:
          clock += lasts
          continue
        link = self._links.get(names[0], "")
        free[link] = max(free[link], clock) + sum(self.alone[name] for name in names)
        if instruction.opcode.endswith("-start"):
          under_way[instruction.name] = names, free[link]
        elif instruction.opcode == "send":
          under_way[_meeting(instruction)] = names, free[link]
        else:  # synchronous, or fused with matmuls that run at the same time
          clock += lasts if instruction.opcode == "fusion" else 0.0
          clock += self._wait(names, free[link] - clock, runs)
    return clock

  def _wait(self, names: list[str], seconds: float, runs: int) -> float:
    """Records that a device waits for collectives; returns how long."""
    if not names or seconds <= 0:
      return 0.0
    for name in names:
      share = self.alone[name] / sum(self.alone[one] for one in names)
      self.waited[name] += runs * seconds * share
    return seconds

  def _collectives(self, instruction: hlo.Instruction) -> list[str]:
    """Returns the names of the collectives that an instruction is or contains."""
    names = [instruction.name] if instruction.name in self.alone else []
    for called in instruction.called():
      for inner in self._program.computations[called].instructions.values():
        names += self._collectives(inner)
    return names


def _slowest(collective: Collective, places: Places) -> Wire:
  if collective.pairs:
    return places.route(collective.pairs)
  return min(map(places.wire, collective.groups), key=lambda wire: wire.bandwidth)


def _start(frame: hlo.Frame, instruction: hlo.Instruction) -> str:
  """Returns the name of the start of what an instruction ends or continues."""
  name = instruction.operand_names[0]
  before = frame.computation.instructions[name]
  if before.opcode == "recv":
    return _meeting(before)
  return _start(frame, before) if before.opcode.endswith("-update") else name


def _meeting(instruction: hlo.Instruction) -> str:
  """Returns the key that a send between slices shares with its recv."""
  found = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', instruction.attributes)
  return found[1] if found else instruction.name
