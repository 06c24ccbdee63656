"""What lives at the peak of a compiled step's memory: each buffer, its line, why, what removes it.

XLA writes its buffer assignment where `XLA_FLAGS` names a folder: which bytes each value has
(`*-buffer-assignment.txt`), and from which instruction to which it lives (`*-live-range.txt`). The
peak is counted as XLA does (`ComputePeakMemory`, xla/service/buffer_assignment.cc): what is there
for all of the step, and the most that lives at once of the temporaries. These have offsets in one
allocation, which is larger by the gaps between them. Grammar: as jax 0.10.2 and libtpu print it.
"""

import dataclasses
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from partitioning.rules import Axes, partition_spec, shard_shape, spec_entries
from planning.step_facts import StepFacts
from planning.timeline import is_ours, place_text, rank
from runtime import hlo

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_ON_THE_HOST = re.compile(r"^allocation \d+: size (\d+), color 5\b", re.MULTILINE)
_VALUE = re.compile(
  r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_LIFE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)")
_ORDER = re.compile(r"    (\d+):(\S+)")

ALWAYS = "there all the time"
# Part of a step's memory -> what makes it smaller.
FIXES = {
  "parameters": "a larger mesh.fsdp, mesh.tensor or mesh.stage; training.parameter_dtype=bfloat16",
  "optimizer state": "a larger mesh.fsdp; optimizer.state_dtype; optimizer.state_memory=host",
  "batch": "fewer rows: data.global_batch_size",
  "saved for the backward pass": (
    "training.rematerialization=full or offload; fewer rows of a device at once: "
    "training.gradient_accumulation_steps; mesh.context"
  ),
  "logits": "more training.loss_chunks; mesh.tensor, which splits the vocabulary",
  "gathered parameters": "mesh.tensor, which splits them; partitioning.reshard_after_forward=True",
  "copies of parameters": "a larger mesh.fsdp; training.parameter_dtype=bfloat16, which needs none",
  "gradients": "a larger mesh.fsdp or mesh.tensor; training.gradient_reduction",
  "activations": (
    "fewer rows of a device at once: training.gradient_accumulation_steps; mesh.context; "
    "partitioning.sequence_parallel=True with mesh.tensor"
  ),
}
_OF_PARAMETERS = ("parameters", "optimizer state", "gradients", "copies of parameters")
_OF_PARAMETERS += ("gathered parameters",)
_STATE = {"state.params": "parameters", "state.optimizer": "optimizer state", "batch": "batch"}


def xla_flags(folder: pathlib.Path) -> str:
  """Returns the flags with which XLA writes the buffers of a train step to a folder."""
  return f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*"


def accepted(folder: pathlib.Path) -> bool:
  """Returns whether XLA has assigned a TPU program's buffers there, and found memory for them.

  It writes this file once it has, and the machine code, for which it takes long, after that.
  """
  return any(folder.glob("*train_step*after_optimizations_after_buffer_assignment.txt"))


def program_text(folder: pathlib.Path) -> str:
  """Returns the optimized program that XLA has written there."""
  return sorted(folder.glob("*train_step*after_optimizations.txt"))[-1].read_text()


@dataclasses.dataclass(frozen=True)
class Buffer:
  """Bytes of a device that are taken at the peak.

  Attributes:
    name: of the instruction that writes them first.
    array: dtype and dims on one device, `bf16[32,64,14336]`; or tuple.
    split: how its dims of all devices are divided over mesh axes, `batch=64 over fsdp`; "" where
      the dims of a device do not tell.
    bytes: with the padding of their tiles.
    part: what it is, of FIXES or another word.
    made: line of code that makes it, "" if the program does not show it; of an argument, its name.
    until: line of the instruction that needs it last; ALWAYS for arguments, results, constants.
    begin: place in the program's order of the first instruction with it.
    end: of the last.
  """

  name: str
  array: str
  split: str
  bytes: int
  part: str
  made: str
  until: str
  begin: int
  end: int


@dataclasses.dataclass(frozen=True)
class Assignment:
  """The buffers of a compiled step.

  Attributes:
    buffers: those that are taken at the peak, the largest first.
    curve: bytes that are taken at each instruction in the program's order.
    peak: the most of them.
    gaps: bytes that the allocation of temporaries is larger than what lives in it at the peak.
    host: bytes in the host's memory.
  """

  buffers: tuple[Buffer, ...]
  curve: tuple[int, ...]
  peak: int
  gaps: int
  host: int = 0

  def groups(self) -> list[tuple[Buffer, int, int]]:
    """Returns a buffer of each kind, how many there are, and their bytes; the most bytes first.

    A kind has part, array and lines in common; arguments have the part.
    """
    found = defaultdict(list)
    for one in self.buffers:
      found[_kind(one)].append(one)
    kinds = [(those[0], len(those), sum(one.bytes for one in those)) for those in found.values()]
    return sorted(kinds, key=lambda kind: -kind[2])

  def as_json(self) -> dict[str, Any]:
    """Returns the peak, the gaps and the buffers, as plan.json has them."""
    found = [dataclasses.asdict(one) for one in self.buffers]
    return {"peak_bytes": self.peak, "gap_bytes": self.gaps, "at_the_peak": found}

  def parts(self) -> dict[str, int]:
    """Returns part -> bytes at the peak, the largest first."""
    sizes = defaultdict(int)
    for one in self.buffers:
      sizes[one.part] += one.bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _kind(one: Buffer) -> tuple[str, ...]:
  return (one.part,) if one.until == ALWAYS else (one.part, one.array, one.made, one.until)


@dataclasses.dataclass(frozen=True)
class _Value:
  name: str
  shape: str
  size: int
  offset: int
  begin: int
  end: int


def read(folder: pathlib.Path, step: StepFacts) -> Assignment | None:
  """Returns the buffers that XLA has written to a folder; None if it has written none.

  It writes those of a program that it then refuses, too: too large a one is named as well.

  Args:
    folder: that of `xla_flags`.
    step: the layout of the step that was compiled.
  """
  assigned = sorted(folder.glob("*train_step*buffer-assignment.txt"))
  lives = sorted(folder.glob("*train_step*live-range.txt"))
  if not (assigned and lives):
    return None
  order, life = _lives(lives[-1].read_text().splitlines())
  lines = assigned[-1].read_text().splitlines()
  held, temporaries, allocated = _allocations(lines, life)
  host = sum(int(size) for size in _ON_THE_HOST.findall("\n".join(lines)))
  always = sum(one.size for one in held)
  curve = tuple(always + _taken(temporaries, at) for at in range(len(order)))
  peak = max(curve)
  at = curve.index(peak)
  parts = _Parts(hlo.parse(program_text(folder)), step, order)
  there = [parts.buffer(one, always=True) for one in held]
  there += [parts.buffer(one) for one in _apart(_alive(temporaries, at))]
  there.sort(key=lambda one: -one.bytes)
  return Assignment(tuple(there), curve, peak, allocated - (peak - always), host)


def _lives(lines: Iterable[str]) -> tuple[list[str], dict[tuple[str, str], tuple[int, int]]]:
  """Returns the instructions in order, and (name, index in its tuple) -> first and last place."""
  order, life = [], {}
  for line in lines:
    if found := _ORDER.fullmatch(line):
      order.append(found[2])
    elif found := _LIFE.fullmatch(line):
      life[found[1], found[2]] = int(found[3]), int(found[4])
  return order, life


def _allocations(
  lines: Iterable[str], life: Mapping[tuple[str, str], tuple[int, int]]
) -> tuple[list[_Value], list[_Value], int]:
  """Returns what is there all the time, the temporaries, and the bytes allocated for these.

  Only of the device's main memory: allocations with a color are on the chip or the host's.
  """
  held, temporaries, allocated = [], [], 0
  kind, largest = "", None
  for line in [*lines, "allocation 0: size 0, thread-local:"]:
    if found := _ALLOCATION.match(line):
      held += [largest] if largest else []
      size, text, largest = int(found[1]), found[2], None
      if ", color " in text or "thread-local" in text:
        kind = ""
      elif "preallocated-temp" in text:
        kind, allocated = "temporary", allocated + size
      else:
        kind = "held"
    elif kind and (found := _VALUE.match(line)):
      name, index, shape = found[1], found[2] or "{}", found[5]
      begin, end = life.get((name, index), (0, 0))
      value = _Value(name, shape, int(found[3]), int(found[4]), begin, end)
      if kind == "held":
        largest = max(filter(None, (largest, value)), key=lambda one: one.size)
      elif not shape.startswith("("):  # XLA's count leaves the tables of tuples out
        temporaries.append(value)
  return held, temporaries, allocated


def _alive(values: Iterable[_Value], at: int) -> list[_Value]:
  return [one for one in values if one.begin <= at <= one.end]


def _apart(values: Iterable[_Value]) -> Iterator[_Value]:
  """Yields values that have bytes of their own: of those that share some, the first and largest."""
  last = -1
  for one in sorted(values, key=lambda one: (one.offset, -one.size, one.begin)):
    if one.offset >= last:
      yield one
      last = one.offset + one.size


def _taken(values: Sequence[_Value], at: int) -> int:
  """Returns the bytes of the values that live at a place, shared ones counted once."""
  return sum(one.size for one in _apart(_alive(values, at)))


class _Parts:
  """Says what the values of a program are."""

  def __init__(self, program: hlo.Program, step: StepFacts, order: Sequence[str]):
    """Takes the program, its layout and its instructions in order."""
    self._program, self._order = program, order
    computations = program.computations.values()
    self._where = {name: one for c in computations for name, one in c.instructions.items()}
    placements = step.parameters.values()
    self._whole = {_sorted(p.shape) for p in placements}
    self._own = {_sorted(shard_shape(p.shape, p.spec, step.sizes)) for p in placements}
    self._vocabulary = _logit_dims(step)
    stacked = [p.shape[0] for p in placements if p.letters.startswith("L")]
    self._layers = stacked[0] if stacked else None
    self._splits = _splits(step, self._layers)

  def buffer(self, value: _Value, *, always: bool = False) -> Buffer:
    """Returns a value as a buffer; `always`: it is there for all of the step."""
    instruction = self._where.get(value.name)
    name = hlo.op_name(instruction.attributes) if instruction else ""
    part = self._held(name) if always else self._temporary(value, instruction, name)
    until = ALWAYS if always else self._line(self._order[value.end])
    made = hlo.argument_path(name) if always else self._line(value.name)
    array = re.sub(r"\{.*", "", value.shape) if value.shape[0] != "(" else "tuple"
    split = self._split(array, part)
    return Buffer(value.name, array, split, value.size, part, made, until, value.begin, value.end)

  def _split(self, array: str, part: str) -> str:
    found = self._splits[part in _OF_PARAMETERS].get(_sorted(_dims(array)), set())
    return found.copy().pop() if len(found) == 1 else ""

  def _held(self, name: str) -> str:
    return next((part for start, part in _STATE.items() if name.startswith(start)), "other")

  def _temporary(self, value: _Value, instruction: hlo.Instruction | None, name: str) -> str:
    dims = _dims(value.shape)
    backward = "transpose(" in name
    if _sorted(dims) in self._own:
      return "gradients" if backward else "copies of parameters"
    if _sorted(dims) in self._whole:
      gathers = "gather" in name or not backward
      return "gathered parameters" if gathers else "gradients"
    opcode = instruction.opcode if instruction else ""
    if dims[:1] == [self._layers] and opcode in ("while", "broadcast", "get-tuple-element"):
      return "saved for the backward pass"
    if not self._vocabulary.isdisjoint(dims):
      return "logits"
    return "activations"

  def _line(self, name: str) -> str:
    instruction = self._where.get(name)
    stack = hlo.stack(self._program.frames, instruction.attributes) if instruction else ()
    place = max(filter(is_ours, stack), key=rank, default=None)
    return "" if place is None else place_text(place)


def _logit_dims(step: StepFacts) -> set[int]:
  """Returns the sizes that the dim of the vocabulary has in logits: of a device, of a chunk."""
  tables = [p for p in step.parameters.values() if "V" in p.letters]
  sizes = {p.shape[p.letters.index("V")] // step.sizes["tensor"] for p in tables}
  return sizes | {size // (step.training.loss_chunks or 1) for size in sizes}


def _splits(step: StepFacts, layers: int | None) -> tuple[dict, dict]:
  """Returns sorted dims of a device -> how arrays with them are split; of activations, parameters.

  Parameters are also gathered over the axes that no activation has, and those of a layer alone;
  activations of all layers may be stacked.
  """
  of_activations, of_parameters = defaultdict(set), defaultdict(set)

  def add(found: dict, letters: str, shape: Sequence[int], entries: Sequence[Axes]) -> None:
    taken = [tuple(axis for axis in axes if step.sizes[axis] > 1) for axes in entries]
    names = ("layers" if letter == "L" else step.legend[letter].name for letter in letters)
    split = [
      f"{name}={size} over {' x '.join(axes)}"
      for name, size, axes in zip(names, shape, taken, strict=True)
      if axes
    ]
    dims = shard_shape(shape, partition_spec(taken), step.sizes)
    found[_sorted(dims)].add(", ".join(split) or "whole on each device")

  for one in step.activations.seen:
    entries = spec_entries(one.spec, len(one.shape))
    add(of_activations, one.letters, one.shape, entries)
    if layers:
      add(of_activations, f"L{one.letters}", (layers, *one.shape), ((), *entries))
  table = step.activations.table
  for one in step.parameters.values():
    entries = spec_entries(one.spec, len(one.shape))
    axes_of = [() if c == "L" else table[step.legend[c].name] for c in one.letters]
    used = [tuple(set(axes) & set(those)) for axes, those in zip(entries, axes_of, strict=True)]
    for first in range(1 + one.letters.startswith("L")):
      for those in (entries, used):
        add(of_parameters, one.letters[first:], one.shape[first:], those[first:])
  return of_activations, of_parameters


def _dims(array: str) -> list[int]:
  """Returns the dims of an array; none of a tuple."""
  found = re.search(r"\[([\d,]*)\]", array)
  return [int(size) for size in re.findall(r"\d+", found[1])] if found else []


def _sorted(dims: Iterable[int]) -> tuple[int, ...]:
  """Returns dims in ascending order without those of 1: transposed copies have the same."""
  return tuple(sorted(size for size in dims if size != 1))
