"""Simulates one run of a compiled program on one device, in the order of the compiler's schedule.

An asynchronous transfer overlaps with the work between its start and its end, and takes links and
HBM bandwidth meanwhile (`planning/in_flight.py`): a collective, a copy to or from the host's
memory, a copy into on-chip memory. A synchronous one is exposed. Loops count as often as they run.
A transfer that is in flight while a loop runs shares HBM with it, but no links.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from planning import in_flight
from planning.roofline import FREE, Costs, Work, matmul_seconds
from runtime import hlo
from runtime.chips import Chip, Rates

_START, _END = "start", "end"
_CHAIN = {"AsyncCollectiveStart": _START, "AsyncCollectiveDone": _END}
_COPIES = frozenset({"on-chip memory"})


@dataclasses.dataclass(frozen=True)
class Interval:
  """What a device does in a part of a computation's run.

  Attributes:
    begin: seconds from the start of the run.
    end: likewise.
    names: the instruction, or the transfers that are sent or waited for.
    bound: of compute, "matmul" or "HBM", or "loop" for a loop within; of others "".
  """

  begin: float
  end: float
  names: tuple[str, ...]
  bound: str = ""


@dataclasses.dataclass(frozen=True)
class Trace:
  """One run of a computation.

  Attributes:
    seconds: in all.
    bytes: of HBM, those of transfers included.
    compute: instructions, in order.
    waits: when the device waits for a transfer.
    transfers: when each is sent.
  """

  seconds: float
  bytes: float
  compute: tuple[Interval, ...]
  waits: tuple[Interval, ...]
  transfers: tuple[Interval, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop of the program: where it stands, how often its body runs, and one run of it.

  Attributes:
    site: the instruction.
    trips: runs of the body in one run of the loop.
    runs: of the body in one step.
    body: one run.
  """

  site: hlo.Instruction
  trips: int
  runs: int
  body: Trace


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a transfer takes by itself: links, seconds, bytes of HBM."""

  links: frozenset[str]
  seconds: float
  bytes: float


class Schedule:
  """A program on a device, with the sums of all that it runs.

  Attributes:
    program: as compiled and scheduled.
    costs: of its collectives and host transfers, by the names of their instructions.
    bandwidth: of HBM.
    work: FLOPs and bytes, counted as often as they run.
    waited: seconds that the device waits for each transfer.
    slowed: seconds by which transfers that share HBM slow the rest down.
    loops: of the program, in order.
  """

  def __init__(self, program: hlo.Program, costs: Mapping[str, Cost], chip: Chip, rates: Rates):
    self.program, self.costs = program, costs
    self.bandwidth = rates.bandwidth(chip)
    self.work = Work(0, 0)
    self.waited: dict[str, float] = defaultdict(float)
    self.slowed = 0.0
    self.loops: list[Loop] = []
    self._roofline, self._chip, self._rates = Costs(program), chip, rates

  def run(self) -> float:
    """Returns the seconds of one run of the program."""
    entry = hlo.Frame(self.program.computations[self.program.entry])
    return _Run(self, entry, 1).trace().seconds

  def inner(self, frame: hlo.Frame, instruction: hlo.Instruction, runs: int) -> tuple[Trace, int]:
    """Returns one run of what a loop, call or conditional runs, and how often it does."""
    if instruction.opcode != "while":
      branches = [self.program.computations[name] for name in instruction.called()]
      return self._slowest([hlo.Frame(one, instruction, frame) for one in branches], runs), 1
    trips = hlo.trip_count(self.program, frame, instruction)
    trips = 1 if trips is None else trips
    body = self.program.computations[instruction.one("body")]
    place = len(self.loops)  # before the loops in its body
    found = _Run(self, hlo.Frame(body, instruction, frame), runs * trips).trace()
    self.loops.insert(place, Loop(instruction, trips, runs * trips, found))
    return found, trips

  def _slowest(self, branches: Sequence[hlo.Frame], runs: int) -> Trace:
    """Runs each branch of a conditional; what is recorded is that of the slowest one."""
    work, waited, slowed, loops = self.work, self.waited, self.slowed, self.loops
    found = []
    for branch in branches:
      self.work, self.waited, self.slowed, self.loops = work, waited.copy(), slowed, [*loops]
      trace = _Run(self, branch, runs).trace()
      found.append((trace, (self.work, self.waited, self.slowed, self.loops)))
    trace, recorded = max(found, key=lambda one: one[0].seconds)
    self.work, self.waited, self.slowed, self.loops = recorded
    return trace

  def cost(self, computation: hlo.Computation, instruction: hlo.Instruction) -> tuple[Work, float]:
    """Returns the work of an instruction, and the seconds of its matmuls."""
    work = self._roofline.work(computation, instruction)
    return work, matmul_seconds(work, self._chip, self._rates)

  def transfers(self, instruction: hlo.Instruction) -> list[str]:
    """Returns the names of the transfers that an instruction is or contains."""
    names = [instruction.name] if instruction.name in self.costs else []
    for called in instruction.called():
      for inner in self.program.computations[called].instructions.values():
        names += self.transfers(inner)
    return names

  def wait(self, names: tuple[str, ...], seconds: float) -> None:
    """Records seconds of waiting for transfers that are sent one after another."""
    alone = [self.costs[name].seconds if name in self.costs else 1.0 for name in names]
    for name, share in zip(names, alone, strict=True):
      self.waited[name] += seconds * share / sum(alone)


class _Run:
  """Simulates one run of a computation."""

  def __init__(self, schedule: Schedule, frame: hlo.Frame, runs: int):
    self._schedule, self._frame, self._runs = schedule, frame, runs
    self._device = in_flight.Device(schedule.bandwidth)
    self._started: dict[str, in_flight.Transfer] = {}
    self._compute: list[Interval] = []
    self._waits: list[Interval] = []
    self._bytes = 0.0

  def trace(self) -> Trace:
    """Runs it."""
    for instruction in self._frame.computation.instructions.values():
      if instruction.opcode in ("while", "call", "conditional"):
        inner, trips = self._schedule.inner(self._frame, instruction, self._runs)
        self._work(instruction, trips * inner.seconds, trips * inner.bytes, "loop")
      elif instruction.opcode.endswith("-done"):
        self._wait(_start(self._frame, instruction))
      elif instruction.opcode not in FREE and not instruction.opcode.endswith(("-update", "recv")):
        self._instruction(instruction)
    sent = self._device.transfers
    return Trace(
      self._device.now,
      self._bytes + sum(one.bytes for one in sent),
      tuple(self._compute),
      tuple(self._waits),
      tuple(Interval(one.begin, one.end, one.names) for one in sent if one.end is not None),
    )

  def _instruction(self, instruction: hlo.Instruction) -> None:
    """Runs one that computes, transfers, or both at the same time."""
    schedule, fused = self._schedule, instruction.opcode == "fusion"
    role, key = _role(self._schedule.program, instruction)
    names = schedule.transfers(instruction)
    work, seconds = schedule.cost(self._frame.computation, instruction)
    copies = role == _START and not names and not fused  # between HBM and on-chip memory
    if not names or fused:
      schedule.work += work * self._runs
    if names or copies:
      costs = [schedule.costs[name] for name in names] or [Cost(_COPIES, seconds, work.bytes)]
      self._started[key] = self._device.start(
        names or [instruction.name],
        frozenset().union(*(one.links for one in costs)),
        sum(one.seconds for one in costs),
        sum(one.bytes for one in costs),
      )
    if fused or not (names or copies):
      bound = "matmul" if seconds >= work.bytes / schedule.bandwidth else "HBM"
      self._work(instruction, seconds, work.bytes, bound)
    if role != _START:
      self._wait(key)

  def _work(self, instruction: hlo.Instruction, seconds: float, size: float, bound: str) -> None:
    """Computes for some seconds, or for as long as its bytes of HBM take."""
    begin, alone = self._device.now, max(seconds, size / self._schedule.bandwidth)
    lasts = self._device.compute(seconds, size)
    self._bytes += size
    self._schedule.slowed += self._runs * (lasts - alone)
    if lasts:
      self._compute.append(Interval(begin, self._device.now, (instruction.name,), bound))

  def _wait(self, key: str) -> None:
    """Waits for a transfer, if it is in flight; the time counts for those that are sent in it."""
    transfer = self._started.pop(key, None)
    if transfer is None:
      return
    now = self._device.now
    for one, lasts in self._device.wait(transfer):
      now += lasts
      if not lasts:
        continue
      self._waits.append(Interval(now - lasts, now, one.names))
      self._schedule.wait(one.names, self._runs * lasts)


def _role(program: hlo.Program, instruction: hlo.Instruction) -> tuple[str, str]:
  """Returns (what an instruction is to a transfer, the transfer's key).

  It is its _START or _END, or, if it is neither, waits itself for what it sends. A chain of fusions
  repeats one collective in each: the first starts it, the last waits for it.
  """
  if instruction.opcode == "send":
    return _START, _meeting(instruction)
  if instruction.opcode == "fusion":
    inside = program.computations[instruction.called()[0]].instructions.values()
    for end, role in _CHAIN.items():
      if any(f'custom_call_target="{end}"' in one.settings for one in inside):
        chained = "".join(one.attributes for one in inside)
        links = re.search(r'\bchain_id="?(\d+)', chained), re.search(r"\bchannel_id=(\d+)", chained)
        return role, " ".join(link[0] for link in links if link)
  return _START if instruction.opcode.endswith("-start") else "", instruction.name


def _start(frame: hlo.Frame, instruction: hlo.Instruction) -> str:
  """Returns the key of the start of what an instruction ends or continues."""
  name = instruction.operand_names[0]
  before = frame.computation.instructions[name]
  if before.opcode == "recv":
    return _meeting(before)
  return _start(frame, before) if before.opcode.endswith("-update") else name


def _meeting(instruction: hlo.Instruction) -> str:
  """Returns the key that a send between slices shares with its recv."""
  found = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', instruction.attributes)
  return found[1] if found else instruction.name
