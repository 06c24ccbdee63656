"""Roofline costs of a compiled program on one device: FLOPs and bytes of each instruction.

An instruction takes the longer of its FLOPs at the peak rate and its bytes at the HBM bandwidth
(Williams et al. 2009, doi:10.1145/1498765.1498785). On a GPU a matmul of which both take about as
long takes longer than either.
"""

import dataclasses
import functools
import math
import re

import numpy as np

from runtime import hlo
from runtime.chips import Chip, Rates
from runtime.collectives import KINDS

# The bytes that an instruction of a compiled program reads from and writes to HBM.
#
# Fusions contain fusions: a matmul of a chunk is one that contains the fusion of the slice. So
# both directions are followed through them.

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


# Instructions that move nothing: other names for existing arrays.
FREE = frozenset(
  [
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "iota", "domain"),
    *("partition-id", "replica-id", "after-all", "add-dependency", "opt-barrier"),
    *("while", "conditional", "call"),
  ]
)
# Kernel -> its matmuls: the scores (recomputed), and those of the scores.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
# Kernels that multiply rows by the kernel of their group; their last two operands are those
# matrices: rows and kernels, or rows and the gradients of their results.
_GROUPED = ("ragged-dot-none", "tgmm")
# Kernels of NVIDIA's libraries in programs for GPUs.
_CUBLAS = 'custom_call_target="__cublas$'
_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?(?:F8)?"')
_EIGHT_BIT = re.compile(r"(s8|u8|f8\w+)\[")


@dataclasses.dataclass(frozen=True)
class Work:
  """The cost of one run of an instruction.

  Attributes:
    flops: of its matmuls; other arithmetic is bound by HBM bandwidth.
    bytes: read from and written to HBM.
    eight_bit: those of `flops` whose operands have 8 bits.
    attention: those of `flops` in fused attention kernels, of traced programs and on GPUs.
    small_heads: as many as would take as long as attention loses by heads of fewer than 128.
  """

  flops: float
  bytes: float
  eight_bit: float = 0.0
  attention: float = 0.0
  small_heads: float = 0.0

  def __add__(self, other: "Work") -> "Work":
    """Returns the sum."""
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Work(*(one + other for one, other in pairs))

  def __mul__(self, runs: float) -> "Work":
    """Returns the cost of several runs."""
    return Work(*(one * runs for one in dataclasses.astuple(self)))


def matmul_share(chip: Chip, *, alone: bool) -> float:
  """Returns the share of the peak that a step's matmuls reach by formula, and in programs for GPUs.

  A GPU that is alone reaches what large matmuls do, as was measured on an H100 (docs/plan.md); one
  before Hopper was not measured.
  """
  return chip.matmul if alone and chip.compute_capability >= 9 else chip.formula or chip.matmul


def matmul_seconds(work: Work, chip: Chip, rates: Rates) -> float:
  """Returns the seconds of the matmuls, at the achieved shares of the chip's peaks."""
  share = rates.matmul or chip.matmul
  wide = (work.flops - work.eight_bit - work.attention) / chip.flops
  fused = (work.attention + work.small_heads) / chip.flops / (chip.attention or share)
  return (wide + work.eight_bit / chip.eight_bit_flops) / share + fused


# On an H100 matmuls whose bytes take 0.17 of the time of their FLOPs (16384 x 2048 x 8192) run at
# 767 to 806 TFLOP/s, of 0.65 (16384 x 2048 x 512) at 613 to 631, and of 0.68 (32768 x 768 x 768) at
# 620 to 647 (docs/performance.md): as with this exponent. On TPUs a matmul's bytes are prefetched.
_GPU_OVERLAP = 1.8
# cuDNN's attention on an H100: 236 and 297 TFLOP/s with heads of 64 in rows of 1,024 and 2,048, and
# 463 to 598 with heads of 128 in rows of 4,096 to 32,768: half as many for each exponential.
_FULL_HEAD = 128


def cudnn_attention(flops: float, size: float, head_size: int) -> Work:
  """Returns the work of cuDNN's attention, of its FLOPs and bytes and the size of its heads."""
  return Work(flops, size, 0.0, flops, flops * max(0.0, _FULL_HEAD / head_size - 1))


def seconds_alone(matmuls: float, memory: float, chip: Chip) -> float:
  """Returns the seconds of an instruction, of those of its matmuls and of its HBM traffic."""
  if chip.torus or not matmuls or not memory:
    return max(matmuls, memory)
  power = _GPU_OVERLAP
  return (matmuls**power + memory**power) ** (1 / power)


class Costs:
  """Computes the costs of instructions, caching those of computations."""

  def __init__(self, program: hlo.Program):
    self._program = program
    self._flops = functools.cache(self._flops_of)

  def work(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Work:
    """Returns the cost of one run."""
    if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
      return Work(0, 0)
    size = self._bytes(computation, instruction)
    return self._own_flops(computation, instruction) + Work(0, size)

  def _own_flops(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Work:
    """Returns the FLOPs of an instruction, without its bytes."""
    flops = 0.0
    if instruction.opcode == "dot":
      flops = _dot(computation, instruction)
    elif instruction.opcode == "convolution":
      flops = _convolution(computation, instruction)
    elif instruction.opcode == "custom-call" and _CUBLAS in instruction.settings:
      flops = _cublas(computation, instruction)
    elif instruction.opcode == "custom-call" and (found := _CUDNN.search(instruction.settings)):
      return _cudnn(computation, instruction, backward=bool(found[1]))
    elif instruction.opcode == "custom-call":
      return Work(_kernel(computation, instruction), 0)
    elif instruction.opcode == "fusion" or instruction.opcode.startswith("async"):
      return sum(map(self._flops, instruction.called()), Work(0, 0))
    narrow = flops and all(map(_EIGHT_BIT.match, computation.operand_shapes(instruction)[:2]))
    return Work(flops, 0, flops if narrow else 0.0)

  def _flops_of(self, name: str) -> Work:
    computation = self._program.computations[name]
    inside = computation.instructions.values()
    return sum((self._own_flops(computation, one) for one in inside), Work(0, 0))

  def _bytes(self, computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    """Returns the bytes read and written; for a slice of a larger array, only the slice.

    Those of a collective follow from its kind and payload (`planning.interconnect`).
    """
    opcode, result = instruction.opcode.removesuffix("-start"), instruction.shape
    operands = computation.operand_shapes(instruction)
    if opcode in KINDS:
      return 0.0
    if opcode != instruction.opcode:  # (result, operand, context), or ((operands), result, context)
      if opcode in ("async", "call"):
        return sum(map(self._bytes_of, instruction.called()))
      result = hlo.elements(result)[0 if opcode == "copy" else 1]
    if opcode in ("dynamic-slice", "slice", "gather"):
      return count(result) * (width(operands[0]) + width(result))
    if opcode in ("dynamic-update-slice", "scatter"):
      update = operands[1 if opcode == "dynamic-update-slice" else -1]
      return count(update) * (width(update) + width(operands[0]))
    if opcode == "fusion":
      return of_fusion(self._program, instruction, operands)
    if opcode == "custom-call" and moves_nothing(instruction):
      return 0.0
    if opcode == "custom-call" and _CUBLAS in instruction.settings:
      result = _results(instruction)[0]  # a large matmul leaves its workspace alone
    return float(moved(result) + sum(map(moved, operands)))

  def _bytes_of(self, name: str) -> float:
    computation = self._program.computations[name]
    inside = computation.instructions.values()
    return sum(self.work(computation, instruction).bytes for instruction in inside)


def _dims(settings: str, name: str) -> list[int]:
  found = re.search(rf"\b{name}=\{{([\d,]*)\}}", settings)
  return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _dot(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
  left = sizes(computation.operand_shapes(instruction)[0])
  contracted = _dims(instruction.settings, "lhs_contracting_dims")
  return 2.0 * math.prod(sizes(instruction.shape)) * math.prod(left[dim] for dim in contracted)


def _convolution(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
  """Returns the FLOPs of a convolution; in a TPU's program matmuls are convolutions.

  Only window positions on input elements count, not those on dilation gaps or padding: a batch dim
  is expressed as a window of which only one position is on an element.
  """
  left, right = map(sizes, computation.operand_shapes(instruction))
  result = sizes(instruction.shape)
  settings = instruction.settings
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", settings)
  window = re.search(r"window=\{([^}]*)\}", settings)
  given = dict(item.split("=") for item in window[1].split()) if window else {}
  pairs = 1
  spatial = [letter for letter in labels[3] if letter.isdigit()]
  for place, letter in enumerate(spatial):
    pairs *= _valid(
      left[labels[1].index(letter)],
      right[labels[2].index(letter)],
      result[labels[3].index(letter)],
      {name: _part(value, place) for name, value in given.items()},
    )
  groups = re.search(r"batch_group_count=(\d+)", settings)
  batch, features = result[labels[3].index("b")], result[labels[3].index("f")]
  inputs = right[labels[2].index("i")]
  return 2.0 * batch * features * inputs * pairs / (int(groups[1]) if groups else 1)


def _cublas(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
  """Returns the FLOPs of a matmul of cuBLAS, which returns (result, workspace)."""
  left = sizes(computation.operand_shapes(instruction)[0])
  found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
  contracted = math.prod(left[int(dim)] for dim in re.findall(r"\d+", found[1]))
  return 2.0 * count(_results(instruction)[0]) * contracted


def _cudnn(computation: hlo.Computation, instruction: hlo.Instruction, *, backward: bool) -> Work:
  """Returns the FLOPs of cuDNN's attention.

  Its matmuls are two, in the backward pass five, of the scores that a causal mask leaves, in a
  sliding window at most as many for each query as it is wide.
  """
  rows, queries, heads, size = sizes(computation.operand_shapes(instruction)[0])
  keys = sizes(computation.operand_shapes(instruction)[1])[1]
  window = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.attributes)
  seen = np.arange(keys - queries, keys) + 1
  if "CAUSAL" not in instruction.attributes:
    seen = np.full(queries, keys)
  if window and int(window[1]):
    seen = np.minimum(seen, int(window[1]))
  flops = (5 if backward else 2) * 2.0 * rows * heads * float(seen.sum()) * size
  return cudnn_attention(flops, 0, size)


def _results(instruction: hlo.Instruction) -> list[str]:
  """Returns the shapes of an instruction's results."""
  return hlo.elements(instruction.shape) or [instruction.shape]


def _kernel(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
  """Returns the FLOPs of splash attention or of a grouped matmul; 0 for other kernels.

  Of a grouped matmul all rows of its buffer count: how many are used is known on the device alone.

  Of attention only blocks on and below the diagonal are computed; in a sliding window, at most as
  many for each block of queries (in the gradients of keys: of keys) as the kernel's table of blocks
  is wide. All are where it has no table, because nothing is masked, and where the table is computed
  (s32): of rows that devices split, the last part sees nearly all.
  """
  if instruction.name.startswith(_GROUPED):
    rows, other = map(sizes, computation.operand_shapes(instruction)[-2:])
    return 2.0 * math.prod(rows) * other[-1]
  products = [n for name, n in _PRODUCTS.items() if instruction.name.startswith(name)]
  if not products:
    return 0.0
  blocks, *others = computation.operand_shapes(instruction)
  queries, keys = map(sizes, others[1:3] if blocks.startswith("s") else (blocks, others[0]))
  share = 1.0
  if blocks.startswith("s") and not blocks.startswith("s32"):
    most, count = sorted(sizes(blocks)[-2:])
    share = (count + 1) / (2 * count) if most == count else most / count
  *rows, length, head = queries
  return products[0] * 2.0 * math.prod(rows) * length * keys[-2] * head * share


def _part(value: str, place: int) -> str:
  return value.split("x")[place]


def _valid(size: int, kernel: int, result: int, window: dict[str, str]) -> int:
  """Returns the number of pairs of an output and a window position that are on an element."""
  stride, low = int(window.get("stride", 1)), int(window.get("pad", "0_0").split("_")[0])
  apart, spread = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
  at = np.arange(result)[:, None] * stride - low + np.arange(kernel)[None] * spread
  return int(np.sum((at >= 0) & (at % apart == 0) & (at // apart < size)))
