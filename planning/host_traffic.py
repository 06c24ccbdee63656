"""Transfers between a device's memory and its host's, in the text of a compiled program.

An array in host memory has memory space 5 in its layout: `f32[8,128]{1,0:S(5)}`. It is copied, or
read and written by slices (dynamic-slice, dynamic-update-slice), mostly asynchronously: from a
`-start` to its `-done`. Seen in programs for TPUs, of libtpu 0.0.42; XLA's CPU backend has no such
memory and leaves no trace of it.
"""

import dataclasses
import re
from collections.abc import Iterator

from runtime import hlo
from runtime.hlo import source

TO_HOST, FROM_HOST = "to host", "from host"
_HOST = re.compile(r"S\(5\)")
_MOVES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")


@dataclasses.dataclass(frozen=True)
class Transfer:
  """An instruction that moves an array between the memories.

  Attributes:
    name: of the instruction.
    direction: TO_HOST or FROM_HOST.
    bytes: of one run, per device.
    count: how often it runs in one execution; None if the text does not show it.
    source: its source line.
    asynchronous: whether other work can run at the same time.
  """

  name: str
  direction: str
  bytes: int
  count: int | None
  source: str
  asynchronous: bool


def transfers(program: hlo.Program) -> list[Transfer]:
  """Returns the transfers that one execution of a program runs, in program order."""
  found: dict[tuple[str, str], Transfer] = {}
  for computation, instruction, count in _runs(program):
    key = computation.name, instruction.name
    direction, size = _moved(computation, instruction)
    if key in found:
      before = found[key].count
      count = None if None in (before, count) else before + count
    line = source(program.frames, instruction.attributes)
    later = instruction.opcode.endswith("-start")
    found[key] = Transfer(instruction.name, direction, size, count, line, later)
  return list(found.values())


def _runs(program: hlo.Program) -> Iterator[tuple[hlo.Computation, hlo.Instruction, int | None]]:
  """Yields (computation, instruction, count) of the transfers, for each way from ENTRY."""
  known: dict[str, bool] = {}

  def moves(name: str) -> bool:
    """Returns whether there is a transfer below; other loops need not be parsed."""
    if name not in known:
      computation = program.computations[name]
      known[name] = any(
        _moved(computation, one) or any(map(moves, one.called()))
        for one in computation.instructions.values()
      )
    return known[name]

  def visit(frame: hlo.Frame, count: int | None):
    for instruction in frame.computation.instructions.values():
      if _moved(frame.computation, instruction):
        yield frame.computation, instruction, count
      elif not any(map(moves, instruction.called())):
        continue
      elif instruction.opcode == "while":
        trips = hlo.trip_count(program, frame, instruction)
        body = hlo.Frame(program.computations[instruction.one("body")], instruction, frame)
        yield from visit(body, None if None in (count, trips) else count * trips)
      else:
        for name in instruction.called():
          yield from visit(hlo.Frame(program.computations[name], instruction, frame), count)

  yield from visit(hlo.Frame(program.computations[program.entry]), 1)


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
