"""The time of a step, from its compiled program: what a device waits for, and for how long."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planning import interconnect
from planning.interconnect import Places, Wire
from planning.roofline import Work, matmul_seconds, matmul_share
from planning.schedule import Cost, Loop, Schedule
from runtime import hlo
from runtime.chips import Chip, Rates
from runtime.collectives import Collective

# Transfers between a device's memory and its host's, in the text of a compiled program.
#
# An array in host memory has memory space 5 in its layout: `f32[8,128]{1,0:S(5)}`. It is copied,
# or read and written by slices (dynamic-slice, dynamic-update-slice), mostly asynchronously: from
# a `-start` to its `-done`. Seen in programs for TPUs, of libtpu 0.0.42; XLA's CPU backend has no
# such memory and leaves no trace of it.

TO_HOST, FROM_HOST = "to host", "from host"
_HOST = re.compile(r"S\(5\)")
_MOVES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


def host_transfers(program: hlo.Program) -> dict[str, tuple[str, int]]:
  """Returns instruction -> (TO_HOST or FROM_HOST, bytes of one run) of those transfers."""
  return {
    one.name: moved
    for computation in program.computations.values()
    for one in computation.instructions.values()
    if (moved := _moved(computation, one))
  }


def _moved(computation: hlo.Computation, instruction: hlo.Instruction) -> tuple[str, int] | None:
  """Returns the direction and the bytes of a transfer; None for another instruction."""
  kind = instruction.opcode.removesuffix("-start")
  if kind not in _MOVES:
    return None
  operands, parts = computation.operand_shapes(instruction), hlo.elements(instruction.shape)
  result = instruction.shape
  if parts:  # a copy-start is (result, operand, context), the others ((operands), result, context)
    result = parts[0 if kind == "copy" else 1]
  moved = operands[1] if kind == "dynamic-update-slice" else result
  before = operands[1 if kind == "dynamic-update-slice" else 0]
  there, here = (bool(_HOST.search(shape)) for shape in (result, before))
  if there == here:
    return None
  return TO_HOST if there else FROM_HOST, hlo.shape_bytes(moved)


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
    name: of its instruction; "" by formula.
  """

  kind: str
  axes: tuple[str, ...]
  each: int
  runs: int
  source: str
  wire: Wire
  seconds: float
  exposed_seconds: float
  name: str = ""

  @property
  def bytes(self) -> int:
    """Returns the payload of all its runs, per device."""
    return self.runs * self.each


def by_axes(sent: Iterable[Sent]) -> list[dict[str, Any]]:
  """Returns the sums of the collectives of one kind along the same axes, the longest first.

  Of each axis, kind, network, runs, bytes, seconds, and those that are exposed.
  """
  sums: dict[tuple, dict[str, Any]] = {}
  for one in sent:
    what = {"axis": "+".join(one.axes), "kind": one.kind, "network": one.wire.network}
    zeros = {"runs": 0, "bytes": 0, "seconds": 0.0, "exposed": 0.0}
    row = sums.setdefault((*what.values(),), what | zeros)
    row["runs"] += one.runs
    row["bytes"] += one.bytes
    row["seconds"] += one.seconds
    row["exposed"] += one.exposed_seconds
  return sorted(sums.values(), key=lambda row: -row["seconds"])


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
    slowed: seconds by which transfers that share HBM slow the rest down.
    loops: of the program, in order; () by formula.
    waited: seconds that the device waits for each transfer of the program; {} by formula.
    runs: how often each of them runs.
    moved: direction of those between the device's memory and its host's.
    copies_exposed: those for copies into on-chip memory.
  """

  step: float
  compute: float
  memory: float
  work: Work
  sent: tuple[Sent, ...]
  host: tuple[HostTraffic, ...] = ()
  slowed: float = 0.0
  loops: tuple[Loop, ...] = ()
  waited: Mapping[str, float] = dataclasses.field(default_factory=dict)
  runs: Mapping[str, int] = dataclasses.field(default_factory=dict)
  moved: Mapping[str, str] = dataclasses.field(default_factory=dict)
  copies_exposed: float = 0.0

  @property
  def communication(self) -> float:
    """Returns the seconds of all collectives, hidden or not."""
    return sum(one.seconds for one in self.sent)

  @property
  def exposed(self) -> float:
    """Returns the seconds that the device waits for them."""
    return sum(one.exposed_seconds for one in self.sent)

  @property
  def parts(self) -> dict[str, float]:
    """Returns the seconds that add up to a step, by what the device does in them."""
    waits = {
      "waiting for collectives": self.exposed,
      "waiting for the host's memory": self.host_exposed,
      "waiting for copies into on-chip memory": self.copies_exposed,
    }
    waits = {name: seconds for name, seconds in waits.items() if seconds}
    return {"computing": self.step - sum(waits.values()), **waits}

  @property
  def host_exposed(self) -> float:
    """Returns the seconds that the device waits for transfers to or from its host's memory."""
    return sum(one.exposed_seconds for one in self.host)


def times(
  program: hlo.Program, found: Sequence[Collective], places: Places, chip: Chip, rates: Rates
) -> Times:
  """Returns how long a step takes.

  Args:
    program: as compiled and scheduled for one device.
    found: its collectives.
    places: of its mesh's devices in the topology.
    chip: of a device.
    rates: achieved shares of the chip's constants.
  """
  if not chip.torus:
    chip = dataclasses.replace(chip, matmul=matmul_share(chip, alone=not found))
  bandwidth, moved = rates.bandwidth(chip), host_transfers(program)
  wires = {one.name: _slowest(one, places) for one in found}
  costs = {
    one.name: Cost(
      wires[one.name].links,
      interconnect.seconds(one.kind, one.bytes, wires[one.name], rates),
      interconnect.memory_bytes(one.kind, one.bytes),
    )
    for one in found
  }
  # The link to the host is apart from those to other devices, and has two directions.
  host = chip.host_bandwidth * rates.link
  costs |= {
    name: Cost(frozenset({direction}), size / host, size)
    for name, (direction, size) in moved.items()
  }
  schedule = Schedule(program, costs, chip, rates)
  step = schedule.run()
  sent = []
  for one in found:
    seconds, waited = one.count * costs[one.name].seconds, schedule.waited[one.name]
    what = (one.kind, one.axes, one.bytes, one.count, one.source, wires[one.name])
    sent.append(Sent(*what, seconds, waited, one.name))
  return Times(
    step,
    matmul_seconds(schedule.work, chip, rates),
    schedule.work.bytes / bandwidth,
    schedule.work,
    tuple(sent),
    tuple(_by_direction(moved, schedule)),
    schedule.slowed,
    tuple(schedule.loops),
    dict(schedule.waited),
    dict(schedule.runs),
    {name: direction for name, (direction, _) in moved.items()},
    sum(seconds for name, seconds in schedule.waited.items() if name not in costs),
  )


def _by_direction(
  moved: Mapping[str, tuple[str, int]], schedule: Schedule
) -> Iterator[HostTraffic]:
  """Yields the sums of the transfers to the host's memory, and of those from it."""
  for direction in dict.fromkeys(direction for direction, _ in moved.values()):
    some = [name for name, (way, _) in moved.items() if way == direction]
    yield HostTraffic(
      direction,
      sum(schedule.runs[name] * moved[name][1] for name in some),
      sum(schedule.runs[name] * schedule.costs[name].seconds for name in some),
      sum(schedule.waited[name] for name in some),
    )


def _slowest(collective: Collective, places: Places) -> Wire:
  if collective.pairs:
    return places.route(collective.pairs)
  return places.slowest(np.array(collective.groups))
