"""The bytes that an instruction of a compiled program reads from and writes to HBM.

Fusions contain fusions: a matmul of a chunk is one that contains the fusion of the slice. So both
directions are followed through them.
"""

import math
import re

from runtime import hlo
from runtime.collectives import KINDS

# Kernels that move nothing: they reserve memory, name it, or prepare a transfer.
_NAMING = re.compile(
  r'custom_call_target="(AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast'
  r'|PrepareAsyncCall\w+|AsyncCollective\w+)"'
)
_ON_CHIP = re.compile(r"S\([1-9]\)")  # the memory space of a layout: not the device's main one
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def moves_nothing(instruction: hlo.Instruction) -> bool:
  """Returns whether a kernel reserves memory, names it, or prepares a transfer."""
  return bool(_NAMING.search(instruction.settings))


def moved(shape: str) -> int:
  """Returns the bytes of a shape, except those in on-chip memory."""
  parts = hlo.elements(shape) or [shape]
  return sum(hlo.shape_bytes(part) for part in parts if not _ON_CHIP.search(part))


def count(shape: str) -> float:
  """Returns the elements of an array."""
  return float(math.prod(sizes(shape)))


def width(shape: str) -> float:
  """Returns the bytes of an element; 0 in on-chip memory."""
  return moved(shape) / max(count(shape), 1.0)


def sizes(shape: str) -> list[int]:
  """Returns the dims of an array."""
  found = _ARRAY.match(shape)
  return [int(size) for size in found[2].split(",") if size]


def of_fusion(program: hlo.Program, instruction: hlo.Instruction, operands: list[str]) -> float:
  """Returns the bytes that a fusion reads and writes: of slices and updates in place, only those.

  Args:
    program: with the fusion.
    instruction: the fusion.
    operands: their shapes.
  """
  [name] = instruction.called()
  frame = hlo.Frame(program.computations[name])
  shapes = hlo.elements(instruction.shape) or [instruction.shape]
  kept = _aliased(instruction)
  total = 0.0
  for index, shape in enumerate(operands):
    taken = None
    if not hlo.elements(shape):
      taken = _read(program, frame.computation, index, kept)
    total += moved(shape) if taken is None else min(moved(shape), taken * width(shape))
  for index, shape in enumerate(shapes):
    total += _written(program, frame, index, shape, index in kept)
  return total


def _aliased(instruction: hlo.Instruction) -> set[int]:
  """Returns the results that are operands, as the compiler has decided."""
  found = re.search(r"\boutput_to_operand_aliasing=\{(.*?\))\}", instruction.settings)
  return {int(i or 0) for i in re.findall(r"\{(\d*)\}: \(", found[1])} if found else set()


def _written(program: hlo.Program, frame: hlo.Frame, index: int, shape: str, kept: bool) -> float:
  """Returns the bytes that a fusion writes of a result: only slices, if it updates an array.

  Args:
    program: with the fusion.
    frame: of the fusion's computation.
    index: of the result, if it has several.
    shape: of the result.
    kept: whether the result is an operand, unless it is updated.
  """
  name, written = frame.computation.root, 0.0
  while True:
    frame, found = _through(program, frame, name, index)
    if found.opcode == "parameter":
      return min(moved(shape), written) if written or kept else moved(shape)
    if _by_transfer(found):
      return 0.0
    if found.opcode != "dynamic-update-slice":
      return moved(shape)
    written += count(frame.computation.operand_shapes(found)[1]) * width(shape)
    name, index = found.operand_names[0], 0


def _through(
  program: hlo.Program, frame: hlo.Frame, name: str, index: int
) -> tuple[hlo.Frame, hlo.Instruction]:
  """Follows an array through fusions, and through what leaves its elements where they are."""
  while True:
    found = frame.computation.instructions[name]
    if found.opcode == "fusion":
      frame = hlo.Frame(program.computations[found.called()[0]], found, frame)
      name = frame.computation.root
    elif found.opcode == "tuple":
      name, index = found.operand_names[index], 0
    elif found.opcode == "parameter" and frame.site is not None:
      name, frame = frame.site.operand_names[int(found.operands[0])], frame.caller
    elif found.opcode == "get-tuple-element":
      name, index = found.operand_names[0], hlo.tuple_index(found)
    elif _in_place(frame.computation, found):
      name = found.operand_names[0]
    else:
      return frame, found


def _by_transfer(instruction: hlo.Instruction) -> bool:
  """Returns whether a collective reads or writes the array, whose memory traffic is its own."""
  return instruction.opcode in KINDS or moves_nothing(instruction)


def _in_place(computation: hlo.Computation, instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction leaves the elements of its operand where they are."""
  if instruction.opcode == "copy":
    return _layout(instruction.shape) == _layout(computation.operand_shapes(instruction)[0])
  return instruction.opcode == "bitcast"


def _layout(shape: str) -> str:
  return re.sub(r"S\(\d+\)", "", shape)


_STATES = _SAME, _UPDATED, _CONVERTED = "same", "updated", "converted"


def _read(program: hlo.Program, inner: hlo.Computation, index: int, kept: set[int]) -> float | None:
  """Returns the elements of a parameter that a fusion reads, if only slices; None: all of it.

  Args:
    program: with the fusion.
    inner: its computation.
    index: of the parameter.
    kept: the results that are operands.
  """
  taken, passed = _uses(program, inner, index)
  # What is returned unchanged is copied; what is updated in place stays where it is.
  copied = {state for result, state in passed.items() if result not in kept}
  return None if copied & {_SAME, _CONVERTED} else taken


def _uses(
  program: hlo.Program, inner: hlo.Computation, index: int
) -> tuple[float | None, dict[int, str]]:
  """Returns the elements taken of a parameter (None: all), and which results it is, and how."""
  states: dict[tuple[str, int], str] = {}  # (instruction, element of its tuple) -> the parameter
  taken = 0.0
  for one in inner.instructions.values():
    if one.opcode == "parameter" and one.operands and int(one.operands[0]) == index:
      states[one.name, 0] = _SAME
    elif one.opcode == "get-tuple-element":
      part = one.operand_names[0], hlo.tuple_index(one)
      states |= {(one.name, 0): states[part]} if part in states else {}
    for place, name in enumerate(one.operand_names):
      if one.opcode in ("get-tuple-element", "tuple") or (name, 0) not in states:
        continue
      elements, becomes = _use(program, inner, one, place, states[name, 0])
      if elements is None:
        return None, {}
      taken += elements
      states |= {(one.name, result): state for result, state in becomes.items()}
  root = inner.instructions[inner.root]
  if root.opcode != "tuple":
    return taken, {at: state for (name, at), state in states.items() if name == inner.root}
  results = enumerate(root.operand_names)
  return taken, {at: states[name, 0] for at, name in results if (name, 0) in states}


def _use(
  program: hlo.Program, inner: hlo.Computation, user: hlo.Instruction, place: int, state: str
) -> tuple[float | None, dict[int, str]]:
  """Returns the same for one operand of one instruction of a fusion."""
  if user.opcode == "fusion":
    taken, passed = _uses(program, program.computations[user.called()[0]], place)
    if state == _CONVERTED and _UPDATED in passed.values():
      return None, {}
    return taken, {at: max(state, after, key=_STATES.index) for at, after in passed.items()}
  if _by_transfer(user):
    return 0.0, {}
  if place == 0 and user.opcode in ("dynamic-slice", "slice", "gather"):
    return count(user.shape), {}
  if place == 0 and user.opcode == "dynamic-update-slice" and state != _CONVERTED:
    return 0.0, {0: _UPDATED}
  if _in_place(inner, user):
    return 0.0, {0: state}
  if user.opcode in ("convert", "copy", "reshape", "transpose"):
    return 0.0, {0: _CONVERTED}
  return None, {}
