"""Parses the text of a compiled program (optimized HLO), as far as cost analysis needs it.

A program is a set of computations, one of them ENTRY; an instruction may call others (fusions,
loops, branches). A `Frame` is a computation with its chain of callers from ENTRY, so that a loop's
bounds can be followed to constants. Source: the grammar that XLA prints, as observed with jax
0.10.2 and 0.12 on CPU and with their compilers for TPU.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

# Bits per element. Packed types count their logical size, although some backends store them wider.
BITS = {
  "pred": 8,
  **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
  **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
  **{"f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8},
  **{"f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8},
  **{"token": 0, "opaque": 0},
}

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-]+) = (.*)")
_CALLED = re.compile(
  r"(?:^|[ ,])(?:calls|to_apply|body|condition|branch_computations|true_computation"
  r"|false_computation|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_TILED = re.compile(r"([a-z]\w*)\[([\d,]*)\]\{([\d,]*):T\(([\d,]+)\)")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
  """A line of code: its file, its number and the function that it is in; "" if it is unknown."""

  file: str
  line: str
  function: str = ""

  def __str__(self):
    return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
  """One line of a computation: `name = shape opcode(operands), attributes`."""

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str

  @property
  def operand_names(self) -> tuple[str, ...]:
    """The operands without the shapes that some printers repeat before them."""
    return tuple(operand.split()[-1].lstrip("%") for operand in self.operands)

  @property
  def settings(self) -> str:
    """The attributes without metadata and backend_config, which quote text of all kinds."""
    return re.split(r"(?:^|, )(?:metadata|backend_config)=\{", self.attributes)[0]

  def called(self) -> tuple[str, ...]:
    """Returns the names of the computations that this instruction runs or applies."""
    if self.opcode.endswith(("-update", "-done")):
      return ()  # Older printers repeat the `calls=` of the start: it would count twice.
    lists = _CALLED.findall(self.settings)
    return tuple(name for text in lists for name in re.findall(r"[\w.\-]+", text))

  def one(self, attribute: str) -> str:
    """Returns the name in `attribute=%name`."""
    return re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
  """A named list of instructions; `root` is the name of the one that is its result."""

  name: str
  instructions: dict[str, Instruction]
  root: str

  def operand_shapes(self, instruction: Instruction) -> list[str]:
    """Returns the shapes of the operands of an instruction of this computation.

    Raises:
      ValueError: an operand that is not defined here, and whose shape the text does not repeat.
    """
    shapes = []
    for operand, name in zip(instruction.operands, instruction.operand_names, strict=True):
      known = self.instructions.get(name)
      shapes.append(known.shape if known else operand.rpartition(" ")[0])
      if not shapes[-1]:
        raise ValueError(f"operand {name} is not defined in computation {self.name}")
    return shapes


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
  """The computations by name, the name of ENTRY, and the lines of each `stack_frame_id`."""

  computations: dict[str, Computation]
  entry: str
  frames: dict[str, tuple[Place, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
  """A computation, and the instruction (in the caller's frame) that runs it; None at ENTRY."""

  computation: Computation
  site: Instruction | None = None
  caller: "Frame | None" = None


# ---- Text -> Program ----


def parse(text: str) -> Program:
  """Returns the program that `compiled.as_text()` printed.

  Raises:
    ValueError: there is no ENTRY computation.
  """
  bodies: dict[str, dict[str, Instruction]] = {}
  roots: dict[str, str] = {}
  entry, name = None, None
  lines = text.splitlines()
  for line in _whole(map(str.strip, lines)):
    if " = " not in line and (header := _HEADER.fullmatch(line)):
      name = header[2]
      bodies[name] = {}
      entry = name if header[1] else entry
    elif line.startswith("}"):
      name = None
    elif name and (found := _INSTRUCTION.match(line)):
      instruction = _instruction(found[2], found[3])
      bodies[name] |= _parts_of_tuples(bodies[name], instruction)
      bodies[name][found[2]] = instruction
      if found[1]:
        roots[name] = found[2]
  if entry is None:
    raise ValueError("HLO text has no ENTRY computation; pass compiled.as_text() of one program")
  # The last instruction is the root where none is marked.
  computations = {
    name: Computation(name, body, roots.get(name) or next(reversed(body), ""))
    for name, body in bodies.items()
  }
  return Program(computations, entry, stacks(lines))


def _whole(lines: Iterable[str]) -> Iterator[str]:
  """Yields the lines, joining those of an instruction whose attributes span several."""
  parts: list[str] = []
  for line in lines:
    if parts or (" = " in line and line.endswith("{")):
      parts.append(line)
      if not line.startswith("}}"):
        continue
      line, parts = "".join(parts), []
    yield line


def _parts_of_tuples(
  body: Mapping[str, Instruction], user: Instruction
) -> Iterator[tuple[str, Instruction]]:
  """Yields what reads an operand `%name#1`, the element of a tuple, as older printers have it."""
  for name in user.operand_names:
    whole, _, index = name.partition("#")
    if index and name not in body and whole in body:
      shape = elements(body[whole].shape)[int(index)]
      yield name, Instruction(name, shape, "get-tuple-element", (f"%{whole}",), f"index={index}")


def _instruction(name: str, rest: str) -> Instruction:
  end = _close(rest, 0) if rest.startswith("(") else rest.find(" ")
  start = rest.find("(", end)
  close = _close(rest, start)
  return Instruction(
    name,
    rest[:end],
    rest[end:start].strip(),
    tuple(split(rest[start + 1 : close - 1])),
    rest[close:].lstrip(", "),
  )


def _close(text: str, start: int) -> int:
  """Returns the index after the bracket that closes the one at `start`."""
  depth = 0
  for bracket in _BRACKET.finditer(text, start):
    depth += (bracket[0] in "([{") - (bracket[0] in ")]}")
    if depth == 0:
      return bracket.end()
  return len(text)


def split(text: str) -> list[str]:
  """Splits at the commas outside brackets and strings."""
  text, parts, depth, start = re.sub(r"/\*.*?\*/", "", text), [], 0, 0
  for bracket in _BRACKET.finditer(text):
    depth += (bracket[0] in "([{") - (bracket[0] in ")]}")
    if bracket[0] == "," and depth == 0:
      parts.append(text[start : bracket.start()].strip())
      start = bracket.end()
  return [part for part in [*parts, text[start:].strip()] if part]


# ---- Shapes ----


def shape_bytes(shape: str) -> int:
  """Returns the bytes of an array, or the sum over a tuple's elements.

  A dim printed as `<=8` (dynamic) counts at its bound. Sub-byte arrays are rounded up to bytes.

  Raises:
    ValueError: an element type that is not in this table.
  """
  total = 0
  for dtype, dims in _ARRAY.findall(shape):
    if dtype not in BITS:
      raise ValueError(f"HLO shape {shape}: unknown element type {dtype}; add it to BITS")
    sizes = [int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip()]
    total += -(-math.prod(sizes) * BITS[dtype] // 8)
  return total


def tuple_index(instruction: Instruction) -> int:
  """Returns which element a get-tuple-element takes."""
  return int(re.search(r"\bindex=(\d+)", instruction.settings)[1])


def elements(shape: str) -> list[str]:
  """Returns the elements of a tuple shape; none for an array."""
  return split(shape[1:-1]) if shape.startswith("(") else []


def tiled_bytes(shape: str) -> int:
  """Returns the bytes that an array takes with its tiles filled up: `f32[3,192]{1,0:T(8,128)}`.

  The layout lists dims from minor to major; the last numbers of a tile are for the minor dims. A
  shape without a layout or tiles is not padded.
  """
  found = _TILED.match(shape)
  if found is None:
    return shape_bytes(shape)
  dtype, dims, order, tile = found.groups()
  sizes = [int(dim) for dim in dims.split(",") if dim]
  tiled = [int(size) for size in tile.split(",")]
  for dim, size in zip(map(int, filter(None, order.split(","))), reversed(tiled), strict=False):
    sizes[dim] = -(-sizes[dim] // size) * size
  return -(-math.prod(sizes) * BITS[dtype] // 8)


def entry_parameters(program: Program) -> dict[str, str]:
  """Returns the arguments of a program by the names that JAX gives them, with their shapes.

  `state.params['mlp']['kernel']` is called `params/mlp/kernel`.
  """
  found = {}
  for one in program.computations[program.entry].instructions.values():
    name = op_name(one.attributes)
    if one.opcode == "parameter" and name:
      found[argument_path(name)] = one.shape
  return found


def argument_path(name: str) -> str:
  """Returns `params/mlp/kernel` of JAX's name `state.params['mlp']['kernel']`."""
  path = re.sub(r"\['([^']*)'\]", r"/\1", name.replace("\\", ""))
  return path.removeprefix("state.")


# ---- Loops ----


def trip_count(program: Program, frame: Frame, loop: Instruction) -> int | None:
  """Returns how often the body of a `while` in `frame` runs, or None if the text does not show it.

  It is XLA's `known_trip_count` if printed; else it follows from the condition, a comparison of a
  counter with a constant, the counter's start and the constant added to it in the body.
  """
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
    return int(known[1])
  condition = Frame(program.computations[loop.one("condition")], loop, frame)
  where, compare = _defining(program, condition, condition.computation.root)
  if compare.opcode != "compare":
    return None
  direction = compare.attributes.split("direction=")[1][:2]
  sides = [_affine(program, where, name) for name in compare.operand_names]
  bounds = [_split_counter(program, condition, side) for side in sides]
  if None in bounds:
    return None
  (start, step), (limit, limit_step) = bounds
  if step == 0:  # `limit > counter` instead of `counter < limit`.
    (start, step), (limit, limit_step) = (limit, limit_step), (start, step)
    direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
  if step == 0 or limit_step != 0:
    return None
  distance = limit - start + {"LE": 1, "GE": -1}.get(direction, 0)
  if direction == "NE":
    return distance // step if distance % step == 0 and distance // step >= 0 else None
  if direction not in (("LT", "LE") if step > 0 else ("GT", "GE")):
    return None
  return max(0, -(-distance // step))


def _split_counter(program, loop_frame, value):
  """Returns (value before the first iteration, change per iteration), or None."""
  if value is None:
    return None
  index, offset = value
  if index is None:
    return offset, 0
  step = _step(program, loop_frame, index)
  start = _start(program, loop_frame, index)
  return None if step is None or start is None else (start + offset, step)


def _step(program: Program, loop_frame: Frame, index: int) -> int | None:
  """Returns what one iteration adds to element `index` of the loop's state, or None."""
  loop = loop_frame.site
  body = Frame(program.computations[loop.one("body")], loop, loop_frame.caller)
  value = _element(program, body, body.computation.root, index)
  return value[1] if value and value[0] == index else None


def _start(program: Program, loop_frame: Frame, index: int) -> int | None:
  """Returns element `index` of the loop's state before its first iteration, or None."""
  outer = loop_frame.caller
  value = _element(program, outer, loop_frame.site.operand_names[0], index)
  if value is None or value[0] is None:
    return value and value[1]
  while outer.site is not None and outer.site.opcode != "while":
    outer = outer.caller
  # A value that an enclosing loop only passes through is that loop's initial value.
  if outer.site is None or _step(program, outer, value[0]) != 0:
    return None
  start = _start(program, outer, value[0])
  return None if start is None else start + value[1]


_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")


def _defining(program: Program, frame: Frame, name: str) -> tuple[Frame, Instruction]:
  """Follows copies, and fusions and calls into their roots, to what computes the value."""
  instruction = frame.computation.instructions[name]
  if instruction.opcode in _SAME_VALUE:
    return _defining(program, frame, instruction.operand_names[0])
  if instruction.opcode in ("fusion", "call"):
    inner = Frame(program.computations[instruction.called()[0]], instruction, frame)
    return _defining(program, inner, inner.computation.root)
  if instruction.opcode == "parameter" and frame.site and frame.site.opcode in ("fusion", "call"):
    return _defining(program, frame.caller, frame.site.operand_names[int(instruction.operands[0])])
  return frame, instruction


def _affine(program: Program, frame: Frame, name: str) -> tuple[int | None, int] | None:
  """Returns a scalar as (index, offset): state[index] of the enclosing loop plus a constant.

  The index is None for a constant; the whole is None for anything else.
  """
  frame, instruction = _defining(program, frame, name)
  if instruction.opcode == "constant":
    literal = instruction.operands[0] if instruction.operands else ""
    return (None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
  if instruction.opcode == "get-tuple-element":
    return _element(program, frame, instruction.operand_names[0], tuple_index(instruction))
  if instruction.opcode in ("add", "subtract"):
    left, right = (_affine(program, frame, operand) for operand in instruction.operand_names)
    if instruction.opcode == "subtract":
      right = (None, -right[1]) if right and right[0] is None else None
    if left is None or right is None or None not in (left[0], right[0]):
      return None
    return (left[0] if right[0] is None else right[0]), left[1] + right[1]
  return None


def _element(program, frame, name, index) -> tuple[int | None, int] | None:
  """Returns element `index` of the tuple `name` as `_affine` does."""
  frame, instruction = _defining(program, frame, name)
  if instruction.opcode == "tuple":
    return _affine(program, frame, instruction.operand_names[index])
  if instruction.opcode == "parameter" and frame.site and frame.site.opcode == "while":
    return index, 0
  return None


def loop_frames(program: Program, frame: Frame, loop: Instruction) -> Iterator[Frame]:
  """Yields the frames of a loop's condition and body."""
  for part in ("condition", "body"):
    yield Frame(program.computations[loop.one(part)], loop, frame)


# ------------------------------ lines of Python ------------------------------
# Instructions name a stack frame, whose tables are at the top of the text, or, on some platforms, a
# file and a line. The tables are complete where `jax_traceback_in_locations_limit` is high enough.

_TITLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def stacks(lines: Sequence[str]) -> dict[str, tuple[Place, ...]]:
  """Returns `stack_frame_id -> places`, innermost first, from the lines of a program's text."""
  tables: dict[str, dict[str, str]] = {title: {} for title in _TITLES}
  title = ""
  for line in lines:
    if line in _TITLES:
      title = line
    elif title and (row := re.match(r"(\d+) (.*)", line)):
      tables[title][row[1]] = row[2]
    elif line:
      title = ""
  places = {}
  for key, text in tables["FileLocations"].items():
    ids = dict(re.findall(r"(\w+)=(\d+)", text))
    file = tables["FileNames"].get(ids.get("file_name_id", ""), "").strip('"')
    function = tables["FunctionNames"].get(ids.get("function_name_id", ""), "").strip('"')
    places[key] = Place(file, ids.get("line", "?"), function)
  frames = {
    key: dict(re.findall(r"(\w+)=(\d+)", text)) for key, text in tables["StackFrames"].items()
  }
  # XLA writes a parent's id plus one (jax 0.10.2): the outermost frame seems to call itself.
  later = any(frame.get("parent_frame_id") == key for key, frame in frames.items())

  def upwards(key: str) -> Iterator[Place]:
    """Yields the places of a frame and its callers."""
    while key in frames:
      yield places.get(frames[key].get("file_location_id", ""), Place("", "?"))
      caller = str(int(frames[key].get("parent_frame_id", "0")) - later)
      key = caller if int(caller) < int(key) else ""

  return {key: tuple(place for place in upwards(key) if place.file) for key in frames}


def stack(frames: Mapping[str, tuple[Place, ...]], attributes: str) -> tuple[Place, ...]:
  """Returns the lines of an instruction, innermost first; () if its metadata has none.

  Args:
    frames: of `stacks`.
    attributes: of the instruction.
  """
  file = re.search(r'\bsource_file="((?:[^"\\]|\\.)*)"', attributes)
  line = re.search(r"\bsource_line=(\d+)", attributes)
  frame = re.search(r"\bstack_frame_id=(\d+)", attributes)
  found = frames.get(frame[1], ()) if frame else ()
  if file and not found:
    return (Place(file[1], line[1] if line else "?"),)
  return found


def op_name(attributes: str) -> str:
  """Returns the name that JAX gives an instruction, such as `jit(f)/while/body/dot_general`."""
  name = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', attributes)
  return name[1] if name else ""


def source(frames: Mapping[str, tuple[Place, ...]], attributes: str) -> str:
  """Returns `op_name (file:line)` from an instruction's metadata, as far as available."""
  place = next((f"({place})" for place in stack(frames, attributes)), "")
  return " ".join(filter(None, (op_name(attributes), place)))
