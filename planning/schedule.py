"""Simulates one run of a compiled program on one device, in the order of the compiler's schedule.

An asynchronous transfer overlaps with the work between its start and its end, and takes links and
HBM bandwidth meanwhile (`Device`): a collective, a copy to or from the host's
memory, a copy into on-chip memory. A synchronous one is exposed. Loops count as often as they run.
A transfer that is in flight while a loop runs shares HBM with it, but no links.
"""

import copy
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from planning.roofline import FREE, Costs, Work, matmul_seconds, seconds_alone
from runtime import hlo
from runtime.chips import Chip, Rates

# Transfers in flight beside what a device computes: a fluid simulation of its links and its HBM.
#
# Collectives, copies to and from the host's memory, and copies between HBM and on-chip memory run
# while the device computes. The model:
#
# - A transfer takes the links that it names, alone. Transfers with a common link are sent in the
#   order in which they start. The two directions of a torus' axis are different links; so are the
#   axes, the network between slices, and the two directions to the host's memory.
# - By itself a transfer takes its seconds, over which it evenly reads and writes its bytes of HBM.
#   An instruction that computes does likewise.
# - The bandwidth of HBM is shared max-min fairly: each gets what it asks for, up to an equal share
#   of what is left (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). What gets less
#   takes longer in proportion. So a matmul beside a gather takes no longer, and an elementwise pass
#   does.
#
# A data sheet gives HBM's bandwidth for reads and writes together, and the links' for each
# direction. By those in `runtime/chips.py`, an all-gather along all three axes of a v5p receives 3
# x 180 GB/s, writes them and reads as much, 39 % of HBM's 2.77 TB/s; along both axes of a v6e it
# takes 44 %.

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
    chip: of the device.
    bandwidth: of HBM.
    work: FLOPs and bytes, counted as often as they run.
    waited: seconds that the device waits for each transfer.
    runs: how often each transfer is started.
    slowed: seconds by which transfers that share HBM slow the rest down.
    loops: of the program, in order.
  """

  def __init__(self, program: hlo.Program, costs: Mapping[str, Cost], chip: Chip, rates: Rates):
    self.program, self.costs = program, costs
    self.bandwidth = rates.bandwidth(chip)
    self.work = Work(0, 0)
    self.waited: dict[str, float] = defaultdict(float)
    self.runs: dict[str, int] = defaultdict(int)
    self.slowed = 0.0
    self.loops: list[Loop] = []
    self._roofline, self.chip, self._rates = Costs(program), chip, rates

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
    names = ("work", "waited", "runs", "slowed", "loops")
    before = {name: getattr(self, name) for name in names}
    found = []
    for branch in branches:
      vars(self).update({name: copy.copy(value) for name, value in before.items()})
      trace = _Run(self, branch, runs).trace()
      found.append((trace, {name: getattr(self, name) for name in names}))
    trace, recorded = max(found, key=lambda one: one[0].seconds)
    vars(self).update(recorded)
    return trace

  def cost(self, computation: hlo.Computation, instruction: hlo.Instruction) -> tuple[Work, float]:
    """Returns the work of an instruction, and the seconds of its matmuls."""
    work = self._roofline.work(computation, instruction)
    return work, matmul_seconds(work, self.chip, self._rates)

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
    self._device = Device(schedule.bandwidth)
    self._started: dict[str, Transfer] = {}
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
      for name in names or [instruction.name]:
        schedule.runs[name] += self._runs
      self._started[key] = self._device.start(
        names or [instruction.name],
        frozenset().union(*(one.links for one in costs)),
        sum(one.seconds for one in costs),
        sum(one.bytes for one in costs),
      )
    if fused or not (names or copies):
      memory = work.bytes / schedule.bandwidth
      bound = "matmul" if seconds >= memory else "HBM"
      alone = seconds_alone(seconds, memory, schedule.chip)
      self._work(instruction, alone, work.bytes, bound)
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
