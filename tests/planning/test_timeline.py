"""The timeline of a layer: which loops it is of, what is in it, and the lines behind its gaps."""

import pytest

from planning import timeline
from planning.timeline import ROOT
from runtime import hlo
from tests.planning.programs import GROUPS, HEAD, PRODUCT, START, times

# Frames: 1 the scan over layers, 2 the MLP in it, 3 its matmul, 4 the helper that gathers;
# 5 another scan of the same model, 6 a scan of a helper.
TABLES = f"""
FileNames
1 "{ROOT}/models/transformer.py"
2 "{ROOT}/models/layers.py"
3 "{ROOT}/partitioning/parallel/matmuls.py"
4 "{ROOT}/partitioning/parallel/collectives.py"
5 "{ROOT}/.venv/lib/python3/site-packages/jax/loops.py"

FunctionNames
1 "Transformer.blocks"
2 "MLP.__call__"
3 "column_parallel"
4 "all_gather"
5 "scan"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=291}}
2 {{file_name_id=2 function_name_id=2 line=334}}
3 {{file_name_id=3 function_name_id=3 line=122}}
4 {{file_name_id=4 function_name_id=4 line=25}}
5 {{file_name_id=5 function_name_id=5 line=7}}
6 {{file_name_id=3 function_name_id=3 line=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=5 parent_frame_id=2}}
6 {{file_location_id=6 parent_frame_id=2}}
"""
STATE = "(s32[], f32[1000,1000], f32[1000])"


def loop(name, trips, *body):
  """Returns the computations of a loop over (i, %x, %v) with these instructions in its body."""
  lines = "\n".join(f"  {line}" for line in body)
  return f"""
%{name}.body (s: {STATE}) -> {STATE} {{
  %s.{name} = {STATE} parameter(0)
  %i.{name} = s32[] get-tuple-element(%s.{name}), index=0
  %x = f32[1000,1000]{{1,0}} get-tuple-element(%s.{name}), index=1
  %v = f32[1000]{{0}} get-tuple-element(%s.{name}), index=2
  %one.{name} = s32[] constant(1)
  %j.{name} = s32[] add(%i.{name}, %one.{name})
{lines}
  ROOT %t.{name} = {STATE} tuple(%j.{name}, %x, %v)
}}

%{name}.condition (s: {STATE}) -> pred[] {{
  %s2.{name} = {STATE} parameter(0)
  %i2.{name} = s32[] get-tuple-element(%s2.{name}), index=0
  %n.{name} = s32[] constant({trips})
  ROOT %c.{name} = pred[] compare(%i2.{name}, %n.{name}), direction=LT
}}
"""


def run(name, called, frame):
  """Returns the instruction that runs a loop."""
  metadata = f'metadata={{op_name="jit(step)/{called}/while" stack_frame_id={frame}}}'
  return (
    f"  %{name} = {STATE} while(%start), condition=%{name}.condition, body=%{name}.body, {metadata}"
  )


def reduce(name, called, frame=4):
  metadata = f', metadata={{op_name="jit(step)/{called}/psum" stack_frame_id={frame}}}'
  return f"%{name} = f32[1000]{{0}} all-reduce(%v), {GROUPS}{metadata if frame else ''}"


def product(name, frame=2):
  metadata = f'metadata={{op_name="jit(step)/dot_general" stack_frame_id={frame}}}'
  return f"%{name} = f32[1000,1000]{{1,0}} {PRODUCT}, {metadata}"


BACK = "transpose(jvp())/while/body"
LOOPS = {
  # 2 s, of which it waits for 1; three times
  "forward": (loop("forward", 3, product("p1"), reduce("r1", "jvp()")), run("forward", "jvp()", 1)),
  # 3 s, 1 of them waiting
  "backward": (
    loop("backward", 3, product("p2"), reduce("r2", BACK), product("p3")),
    run("backward", "transpose(jvp())", 1),
  ),
  # As many iterations, and longer than the layers: over chunks, in a helper.
  "chunks": (
    loop("chunks", 3, *(product(f"p{i}", 6) for i in range(4, 9))),
    run("chunks", "jvp()", 6),
  ),
}


def made(*names, layers=3, after="", loops=LOOPS, tables=TABLES):
  """Returns the timeline of a program with these loops."""
  computations = tables + "".join(loops[name][0] for name in names)
  body = [
    f"{START}  %zero = s32[] constant(0)",
    f"  %start = {STATE} tuple(%zero, %x, %v)",
    *(loops[name][1] for name in names),
    after,
    "  ROOT %end = f32[] constant(0)",
  ]
  entry = "\n".join(filter(None, body))
  text = f"{HEAD}{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"
  found, program = times(entry, computations), hlo.parse(text)
  return timeline.of(program, found, layers)


def test_the_loops_over_layers_and_what_is_in_an_iteration():
  found = made("chunks", "forward", "backward")
  forward, backward = found.layers
  assert (forward.title, forward.runs, forward.layers) == ("forward", 3, 1)
  assert (backward.title, backward.runs, backward.layers) == ("backward", 3, 1)
  assert forward.line == backward.line == "models/transformer.py:291, Transformer.blocks"
  assert (forward.seconds, backward.seconds) == pytest.approx((2.0, 3.0))
  [product] = [bar for bar in forward.compute if bar.text == "matmul"]
  assert (product.begin, product.end) == pytest.approx((0.0, 1.0))
  assert forward.parts["MLP"] == pytest.approx(1.0)
  [(row, [sent])] = forward.transfers.items()
  [wait] = forward.waits
  assert row == "data over ICI"
  assert sent.text == wait.text == "all-reduce over data of f32[1000]"
  assert (wait.begin, wait.end) == (sent.begin, sent.end) == pytest.approx((1.0, 2.0))
  assert found.missing == ()


def test_a_gap_is_named_with_its_pass_and_the_line_that_causes_it():
  # 4 kB reduced once outside of the loops, by an instruction that names no line itself.
  after = "  %r3 = f32[1000]{0} all-reduce(%part), " + GROUPS
  part = (
    "  %part = f32[1000]{0} get-tuple-element(%backward), index=2, "
    'metadata={op_name="jit(step)/transpose(jvp())/while" stack_frame_id=5}'
  )
  found = made("forward", "backward", after=f"{part}\n{after}")
  assert [(gap.runs, gap.seconds) for gap in found.gaps] == [
    (3, pytest.approx(3.0)),
    (3, pytest.approx(3.0)),
    (1, pytest.approx(1.0)),
  ]
  # Of the stack the helper that only gathers is left out, and so are files of other libraries.
  through = (
    "models/layers.py:334, MLP.__call__, through partitioning/parallel/matmuls.py:122, "
    "column_parallel"
  )
  whens = ["in the forward pass", "in the backward pass", "in the backward pass"]
  assert [gap.line for gap in found.gaps[:2]] == [through] * 2
  assert [gap.when for gap in found.gaps] == whens
  assert found.gaps[2].line == "models/transformer.py:291, Transformer.blocks"


@pytest.mark.parametrize(
  ("layers", "each", "outside"), [(3, 1, 0), (6, 2, 0), (4, 1, 1), (5, 1, 2), (8, 2, 2)]
)
def test_an_iteration_may_compute_several_layers_and_some_are_outside(layers, each, outside):
  [forward, backward] = made("forward", "backward", "chunks", layers=layers).layers
  assert (forward.layers, forward.outside) == (backward.layers, backward.outside)
  assert (forward.layers, forward.outside) == (each, outside)
  assert forward.line.startswith("models/transformer.py")


def test_what_an_instruction_does_not_show_its_users_do():
  """JAX drops the callers of what it transposes: here the helper alone is left."""
  lost = TABLES.replace("StackFrames\n", "StackFrames\n7 {file_location_id=4 parent_frame_id=0}\n")
  lost = lost.replace("parent_frame_id=0", "parent_frame_id=8")  # no such frame
  body = loop(
    "forward", 3, reduce("r1", "jvp()", 7), "%q1 = f32[1000]{0} negate(%r1)", product("p1")
  )
  known = body.replace(
    "negate(%r1)", 'negate(%r1), metadata={op_name="jit(step)/jvp()/neg" stack_frame_id=2}'
  )
  for text, line in (
    (body, "partitioning/parallel/collectives.py:25, all_gather"),
    (known, "models/layers.py:334, MLP.__call__"),
  ):
    found = made("forward", loops={"forward": (text, LOOPS["forward"][1])}, tables=lost)
    assert found.gaps[0].line == line


def test_loops_without_metadata_are_known_by_what_is_in_them():
  """The compiler drops it where it computes a layer outside of the loop."""
  bare = {name: (before, line.partition(", metadata")[0]) for name, (before, line) in LOOPS.items()}
  bare["backward"] = (
    bare["backward"][0].replace("jit(step)/dot", f"jit(step)/{BACK}/dot"),
    bare["backward"][1],
  )
  forward, backward = made("forward", "backward", layers=4, loops=bare).layers
  assert (forward.title, forward.seconds) == ("forward", pytest.approx(2.0))
  assert (backward.title, backward.seconds) == ("backward", pytest.approx(3.0))
  # All that both bodies contain is in the MLP; a layer has more, and then the scan is common.
  assert forward.line == "models/layers.py:334, MLP.__call__"
  mixed = {
    name: (before.replace("frame_id=2", "frame_id=5", 1), line)
    for name, (before, line) in bare.items()
  }
  forward, _ = made("forward", "backward", layers=4, loops=mixed).layers
  assert forward.line == "models/transformer.py:291, Transformer.blocks"


def test_a_loop_of_another_file_is_one_over_layers_if_it_runs_once_for_each():
  [forward] = made("chunks", layers=3).layers
  assert forward.line.startswith("partitioning/parallel/matmuls.py")
  assert made("chunks", layers=4).layers == ()


@pytest.mark.parametrize(
  ("names", "layers", "missing"),
  [
    (["forward"], 3, ["no loop over 3 layers in the backward pass"]),
    (
      ["forward", "backward"],
      7,
      ["no loop over 7 layers in the forward pass", "no loop over 7 layers in the backward pass"],
    ),
    (["forward"], None, ["the model has no layers"]),
  ],
)
def test_what_is_not_found_is_said(names, layers, missing):
  found = made(*names, layers=layers)
  assert list(found.missing) == missing
  assert found.gaps[0].seconds == pytest.approx(3.0)
