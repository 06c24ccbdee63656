"""Lines of Python behind instructions: tables of frames, and metadata that names a file."""

import zlib

import jax
import jax.numpy as jnp
import pytest

from runtime import hlo
from runtime.hlo import Place, op_name, source, stack, stacks

TABLES = """FileNames
1 "/a/model.py"
2 "/a/lib/collectives.py"

FunctionNames
1 "Block.__call__"
2 "all_gather"

FileLocations
1 {file_name_id=1 function_name_id=1 line=88 end_line=88 column=2 end_column=9}
2 {file_name_id=2 function_name_id=2 line=25 end_line=25 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""
OUTER, INNER = Place("/a/model.py", "88", "Block.__call__"), Place("/a/lib/collectives.py", "25")


@pytest.mark.parametrize(
  "text",
  [
    TABLES,  # a parent's id plus one, as jax 0.10.2 prints it
    TABLES.replace("parent_frame_id=1", "").replace("parent_frame_id=2", "parent_frame_id=1"),
  ],
)
def test_frames_are_followed_to_their_callers(text):
  found = stacks(text.splitlines())
  assert found["1"] == (OUTER,)
  assert [str(place) for place in found["2"]] == [str(INNER), str(OUTER)]
  assert found["2"][0].function == "all_gather"


def test_an_instruction_names_a_frame_or_a_file_or_neither():
  frames = stacks(TABLES.splitlines())
  named = 'metadata={op_name="jit(f)/dot" stack_frame_id=2}'
  assert stack(frames, named)[-1] == OUTER
  assert source(frames, named) == "jit(f)/dot (/a/lib/collectives.py:25)"
  filed = 'metadata={op_name="jit(f)/dot" source_file="/b/c.py" source_line=7}'
  assert stack(frames, filed) == (Place("/b/c.py", "7"),)
  assert source(frames, filed) == "jit(f)/dot (/b/c.py:7)"
  assert stack(frames, "") == ()
  assert (op_name(""), source(frames, "")) == ("", "")


def inner(x):
  return jnp.sin(x)


# The cache of compiled programs knows no paths: of another clone's it would have the files.
OWN = zlib.crc32(__file__.encode()) % 1000


def outer(x):
  return inner(x) + OWN


@pytest.mark.usefixtures("lines_of_python")
def test_the_lines_of_a_compiled_program():
  text = jax.jit(outer).lower(jnp.ones(3)).compile().as_text()
  program = hlo.parse(text)
  instructions = (i for c in program.computations.values() for i in c.instructions.values())
  [sine] = [i for i in instructions if i.opcode == "sine"]
  assert op_name(sine.attributes).endswith("/sin")
  first, second, *_ = stack(program.frames, sine.attributes)
  assert first.file == second.file == __file__
  assert int(first.line) == inner.__code__.co_firstlineno + 1
  assert int(second.line) == outer.__code__.co_firstlineno + 1
  assert (first.function, second.function) == ("inner", "outer")
