"""The lines of Python behind the instructions of a compiled program, from its metadata.

Instructions name a stack frame, whose tables are at the top of the text, or, on some platforms, a
file and a line. The tables are complete where `jax_traceback_in_locations_limit` is high enough.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

_TITLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
  """A line of code: its file, its number and the function that it is in; "" if it is unknown."""

  file: str
  line: str
  function: str = ""

  def __str__(self):
    return f"{self.file}:{self.line}"


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
