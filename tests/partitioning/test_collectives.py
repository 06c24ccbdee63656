"""What the collectives of a program are said to be, against programs that we know.

Most are compiled here for 8 simulated devices. What CPU never prints (starts, fused and chained
collectives, loops without a known trip count) stands as text, cut down from what the compilers
for TPU printed.
"""

import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning import hlo
from partitioning.collectives import Collective, Row, collectives, format_summary, summarize

P = PartitionSpec
SHAPE = (24, 40)  # A shard on data=4, tensor=2 is [6, 20], 480 bytes.
SHARD = 6 * 20 * 4
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def make_mesh(devices=None, **sizes):
  shape = tuple(sizes.values())
  devices = np.array(jax.devices() if devices is None else devices).reshape(shape)
  return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(data=4, tensor=2)


def compiled_text(function, mesh, spec=("data", "tensor"), shape=SHAPE, dtype=jnp.float32):
  """Compiles a function of each device's shard."""
  body = jax.shard_map(function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), check_vma=False)
  x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
  return jax.jit(body).lower(x).compile().as_text()


def told(text, mesh):
  return [(c.kind, c.axes, c.bytes, c.count) for c in collectives(text, mesh)]


def entry(*lines):
  """A program whose ENTRY has these lines."""
  return "HloModule m\n\nENTRY %main (p: f32[6]) -> f32[6] {\n" + "\n".join(lines) + "\n}\n"


def all_reduce(groups, shape="f32[6]", more="channel_id=1, use_global_device_ids=true"):
  return entry(
    f"  %p = {shape} parameter(0)",
    f"  ROOT %r = {shape} all-reduce(%p), replica_groups={groups}, {more}, to_apply=%add",
  )


# ---- Kinds, axes and bytes of compiled programs ----


def scatter(x, axis):
  return jnp.tile(lax.psum_scatter(x, axis, tiled=True), (2, 1))


@pytest.mark.parametrize(
  ("function", "kind", "axes", "size"),
  [
    (lambda x: lax.psum(x, "data"), "all-reduce", ("data",), SHARD),
    (lambda x: lax.psum(x, "tensor"), "all-reduce", ("tensor",), SHARD),
    (lambda x: lax.psum(x, ("tensor", "data")), "all-reduce", ("data", "tensor"), SHARD),
    (lambda x: lax.all_gather(x, "data").sum(0), "all-gather", ("data",), 4 * SHARD),
    (lambda x: lax.all_gather(x, "tensor").sum(0), "all-gather", ("tensor",), 2 * SHARD),
    (lambda x: scatter(x, "tensor"), "reduce-scatter", ("tensor",), SHARD),
    (lambda x: lax.all_to_all(x, "data", 1, 1, tiled=True), "all-to-all", ("data",), SHARD),
    (lambda x: lax.ppermute(x, "data", RING), "collective-permute", ("data",), SHARD),
    (lambda x: lax.ppermute(x, "tensor", [(0, 1)]), "collective-permute", ("tensor",), SHARD),
  ],
)
def test_collectives_of_shard_map(mesh, function, kind, axes, size):
  (record,) = collectives(compiled_text(function, mesh), mesh)
  assert (record.kind, record.axes, record.bytes, record.count) == (kind, axes, size, 1)
  assert record.whole
  assert "shard_map" in record.source
  assert "test_collectives.py:" in record.source


def test_contracting_a_sharded_dim_reduces_over_its_axis(mesh):
  a = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
  b = jax.ShapeDtypeStruct((6, 10), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
  text = jax.jit(jnp.matmul).lower(a, b).compile().as_text()
  assert told(text, mesh) == [("all-reduce", ("tensor",), 2 * 10 * 4, 1)]


def test_local_work_has_none(mesh):
  assert told(compiled_text(lambda x: jnp.sin(x) @ x.T @ x, mesh), mesh) == []


@pytest.mark.parametrize("axis", ["a", "b", "c"])
def test_groups_of_the_same_size_on_different_axes(axis):
  mesh = make_mesh(a=2, b=2, c=2)
  text = compiled_text(lambda x: lax.psum(x, axis), mesh, spec=(("a", "b", "c"),))
  assert told(text, mesh) == [("all-reduce", (axis,), 3 * 40 * 4, 1)]


def test_the_same_program_read_with_another_axis_order():
  text = compiled_text(lambda x: lax.psum(x, "a"), make_mesh(a=2, b=4), spec=("a", "b"))
  assert [c[1] for c in told(text, make_mesh(b=2, a=4))] == [("b",)]
  (record,) = collectives(text, make_mesh(x=2, y=2, z=2))
  assert (record.axes, record.whole) == (("x",), True)


@pytest.mark.parametrize("order", [slice(None, None, -1), np.arange(8).reshape(2, 4).T.ravel()])
def test_ids_are_positions_in_the_mesh_and_not_device_ids(order):
  mesh = make_mesh(np.array(jax.devices())[order], data=4, tensor=2)
  text = compiled_text(lambda x: lax.psum(x, "data"), mesh)
  assert [c[1] for c in told(text, mesh)] == [("data",)]


def test_half_an_axis_is_not_whole(mesh):
  halves = [[0, 1], [2, 3]]
  text = compiled_text(lambda x: lax.psum(x, "data", axis_index_groups=halves), mesh)
  (record,) = collectives(text, mesh)
  assert (record.axes, record.whole) == (("data",), False)


def test_a_resharding_names_the_axes_it_moves_over(mesh):
  # It prints part of an axis in XLA's own mesh, and pairs of which some copy to themselves.
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
  out = NamedSharding(mesh, P("tensor", "data"))
  records = collectives(jax.jit(jnp.sin, out_shardings=out).lower(x).compile().as_text(), mesh)
  axes = {record.kind: record.axes for record in records}
  assert axes == {"all-to-all": ("data",), "collective-permute": ("data", "tensor")}
  assert not any(record.whole for record in records)


# ---- Counts ----


def scan(length, body):
  return lambda x: lax.scan(lambda c, _: (body(c) * 0.5, None), x, None, length=length)[0]


LOOPS = [
  (scan(5, lambda x: lax.psum(x, "data")), 5),
  (scan(3, scan(5, lambda x: lax.psum(x, "data"))), 15),
  (lambda x: lax.fori_loop(2, 13, lambda i, c: lax.psum(c, "data") * i, x), 11),
  (
    lambda x: lax.while_loop(
      lambda s: s[0] > 3, lambda s: (s[0] - 2, lax.psum(s[1], "data") * 0.5), (14, x)
    )[1],
    6,
  ),
]


@pytest.mark.parametrize(("loop", "count"), LOOPS)
def test_a_loop_counts_its_iterations(mesh, loop, count):
  text = compiled_text(loop, mesh)
  expected = [("all-reduce", ("data",), SHARD, count)]
  assert told(text, mesh) == expected
  # Programs for TPU do not say the trip count: it follows from condition, start and step.
  assert '"known_trip_count"' in text
  assert told(text.replace('"known_trip_count"', '"unknown"'), mesh) == expected


def until_seven(start, x):
  body = lambda s: (s[0] + 1, lax.psum(s[1], "data") * 0.5)  # noqa: E731
  return lax.while_loop(lambda s: s[0] < 7, body, (start, x))[1]


@pytest.mark.parametrize(
  "loop",
  [
    lambda x: lax.while_loop(lambda c: c[0, 0] < 9, scan(5, lambda c: lax.psum(c, "data")), x),
    lambda x: lax.fori_loop(0, 3, until_seven, x),
    lambda x: until_seven(jnp.argmax(x[0]), x),
  ],
)
def test_a_loop_that_depends_on_data_has_no_count(mesh, loop):
  assert told(compiled_text(loop, mesh), mesh) == [("all-reduce", ("data",), SHARD, None)]


def test_each_branch_counts(mesh):
  def function(x):
    branches = lambda v: lax.psum(v, "data"), lambda v: lax.psum(v, "tensor")
    return lax.cond(x[0, 0] > 0, *branches, x)

  axes = sorted(c[1:] for c in told(compiled_text(function, mesh), mesh))
  assert axes == [(("data",), SHARD, 1), (("tensor",), SHARD, 1)]


CALLS = """
HloModule calls

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %y = f32[] parameter(1)
}

%inner (q: f32[6]) -> f32[6] {
  %q = f32[6] parameter(0)
  ROOT %reduced = f32[6] all-reduce(%q), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%unused (q.1: f32[6]) -> f32[6] {
  %q.1 = f32[6] parameter(0)
  ROOT %never = f32[6] all-reduce(%q.1), replica_groups={}, to_apply=%add
}

%outer (o: f32[6]) -> f32[6] {
  %o = f32[6] parameter(0)
  %first = f32[6] call(%o), to_apply=%inner
  ROOT %second = f32[6] fusion(%first), kind=kCustom, calls=%inner, \
metadata={op_name="f calls=%outer"}
}

ENTRY %main (p: f32[6]) -> f32[6] {
  %p = f32[6] parameter(0)
  %once = f32[6] call(%p), to_apply=%outer
  ROOT %again = f32[6] call(%once), to_apply=%outer
}
"""


def test_a_computation_counts_as_often_as_it_is_called(mesh):
  assert told(CALLS, mesh) == [("all-reduce", ("tensor",), 24, 4)]


# ---- Device groups in every syntax ----


@pytest.mark.parametrize(
  ("groups", "axes", "whole"),
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), True),
    ("{{0,2,4,6},{1,3,5,7}}", ("data",), True),
    ("{{6,0,4,2},{1,3,5,7}}", ("data",), True),
    ("{{0,2},{4,6},{1,3},{5,7}}", ("data",), False),
    ("{{0,3},{2,5},{4,7},{6,1}}", ("data", "tensor"), False),
    ("{{0,1},{2},{3},{4},{5},{6},{7}}", ("tensor",), False),
    ("{}", ("data", "tensor"), True),
    ("[1,8]<=[8]", ("data", "tensor"), True),
    ("[4,2]<=[8]", ("tensor",), True),
    ("[2,4]<=[8]", ("data", "tensor"), False),
    ("[2,4]<=[4,2]T(1,0)", ("data",), True),
    ("[4,2]<=[2,2,2]T(0,2,1)", ("data",), False),
    ("mesh['data'=4,'tensor'=2] {'data'}", ("data",), True),
    ("mesh['data'=4,'tensor'=2] {'tensor'}", ("tensor",), True),
    ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0','axis_2'}", ("data", "tensor"), True),
    ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", ("data",), False),
    ("mesh['a'=8] {'a':(4)2}", ("tensor",), True),
    ("mesh['a'=8] {'a':(1)4}", ("data",), True),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "tensor"), False),
    ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ("data",), True),
    ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}", ("data",), False),
    ("mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}", ("data",), False),
  ],
)
def test_group_syntax(mesh, groups, axes, whole):
  (record,) = collectives(all_reduce(groups), mesh)
  assert (record.axes, record.whole) == (axes, whole)


@pytest.mark.parametrize(
  "groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['a'=8,'b'=1] {'b'}"]
)
def test_groups_of_one_are_left_out(mesh, groups):
  assert collectives(all_reduce(groups), mesh) == []


def test_a_group_of_replicas_is_all_devices(mesh):
  replicas = all_reduce("{{0}}", more="channel_id=1")
  assert [c.axes for c in collectives(replicas, mesh)] == [("data", "tensor")]
  assert collectives(all_reduce("{{0}}"), mesh) == []


@pytest.mark.parametrize(
  ("pairs", "axes", "whole"),
  [
    ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("data",), True),
    ("{{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}", ("data",), True),
    ("{{0,2},{2,0},{4,6},{6,4}}", ("data",), False),
    ("{{4,6},{0,2},{2,4},{7,7}}", ("data",), True),
    ("{{0,3},{3,0}}", ("data", "tensor"), False),
  ],
)
def test_permute_pairs(mesh, pairs, axes, whole):
  line = f"ROOT %r = f32[6] collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
  (record,) = collectives(entry("%p = f32[6] parameter(0)", line), mesh)
  assert (record.axes, record.whole, record.bytes) == (axes, whole, 24)


def test_permutes_to_oneself_are_left_out(mesh):
  line = "ROOT %r = f32[6] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
  assert collectives(entry("%p = f32[6] parameter(0)", line), mesh) == []


def test_the_wrong_mesh_is_named():
  with pytest.raises(ValueError, match=r"instruction r: names device 7, and the mesh \(data=4\)"):
    collectives(all_reduce("[4,2]<=[8]"), make_mesh(jax.devices()[:4], data=4))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "no ENTRY computation"),
    (all_reduce("@somewhere"), "instruction r: replica_groups=@somewhere, .* no known syntax"),
    (all_reduce("mesh['a'=8] {'b'}"), "instruction r: .* names an axis that it does not have"),
    (all_reduce("{}", shape="f7[3]"), "instruction r: HLO shape f7.* unknown element type f7"),
    (all_reduce("{}").replace("(%p)", "(%q)"), "operand q is not defined in computation main"),
  ],
)
def test_what_cannot_be_read_is_refused(mesh, text, message):
  with pytest.raises(ValueError, match=message):
    collectives(text, mesh)


# ---- Bytes ----


@pytest.mark.parametrize(
  ("shape", "size"),
  [
    ("f32[]", 4),
    ("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}", 30),
    ("f64[7]{0}", 56),
    ("c64[7]", 56),
    ("pred[7]", 7),
    ("f8e4m3fn[7]", 7),
    ("f8e5m2[2,3]", 6),
    ("s4[7]{0:E(4)}", 4),
    ("u4[2,3]", 3),
    ("s32[<=9,2]", 72),
    ("f32[0,3]", 0),
    ("(f32[3]{0:T(128)}, /*index=1*/bf16[5], token[])", 22),
    ("((f32[3]), (s8[5], u16[2]))", 21),
  ],
)
def test_shape_bytes(shape, size):
  assert hlo.shape_bytes(shape) == size


@pytest.mark.parametrize(
  ("line", "kind", "size"),
  [
    ("f32[6] all-reduce-start(%p)", "all-reduce", 24),
    ("(f32[6], bf16[5]) all-reduce-start(%p, %h)", "all-reduce", 34),
    ("(f32[6], f32[12]) all-gather-start(f32[6]{0} %p)", "all-gather", 48),
    ("((f32[6], bf16[5]), (f32[12], bf16[10])) all-gather-start(%p, %h)", "all-gather", 68),
    ("((f32[6]), f32[3], u32[]{:S(2)}) reduce-scatter-start(%p)", "reduce-scatter", 24),
    ("((f32[6]), f32[6], u32[]) all-reduce-start(%p)", "all-reduce", 24),
    ("(f32[6], f32[6], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)", None, 24),
    ("(f32[6], bf16[5]) all-to-all(%p, %h)", "all-to-all", 34),
    ("f32[3] reduce-scatter(%p)", "reduce-scatter", 24),
    ("(f32[3], bf16[2]) reduce-scatter(%p, /*index=1*/%h)", "reduce-scatter", 34),
    ("f32[6] collective-broadcast(%p)", "collective-broadcast", 24),
    ("f32[6] ragged-all-to-all(%p)", "ragged-all-to-all", 24),
  ],
)
def test_payload(mesh, line, kind, size):
  groups = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
  if kind is None:
    kind, groups = "collective-permute", "source_target_pairs={{0,1},{1,0}}"
  opcode = re.search(r"([a-z-]+)\(%|([a-z-]+)\(f32\[6\]\{0\} %", line)
  done = (opcode[1] or opcode[2]).replace("-start", "-done")
  text = entry(
    "%p = f32[6]{0} parameter(0)",
    "%h = bf16[5]{0} parameter(1)",
    f"%s = {line}, channel_id=1, {groups}, to_apply=%add",
    f"ROOT %d = f32[6] {done}(%s)" if done.endswith("-done") else "ROOT %d = f32[6] copy(%s)",
  )
  assert told(text, mesh) == [(kind, ("tensor",), size, 1)]


def test_a_combined_all_reduce_counts_once(mesh):
  text = compiled_text(lambda x: lax.psum(x, "data") @ lax.psum(x * 2, "data").T @ x, mesh)
  assert told(text, mesh) == [("all-reduce", ("data",), 2 * SHARD, 1)]


# ---- What accelerators print ----

ASYNC = """
HloModule async

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%wrapped (w: f32[8,6]) -> f32[2,6] {
  %w = f32[8,6]{1,0} parameter(0)
  ROOT %rs = f32[2,6]{1,0} reduce-scatter(%w), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}, execution_thread="other"

ENTRY %main (p: f32[8,6]) -> f32[2,6] {
  %p = f32[8,6]{1,0} parameter(0)
  %start = ((f32[8,6]{1,0}), f32[2,6]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %update = ((f32[8,6]{1,0}), f32[2,6]{1,0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[2,6]{1,0} async-done(%update), calls=%wrapped, metadata={op_name="f" \
source_file="/a/b.py" source_line=7}
}
"""


def test_an_async_collective_counts_once(mesh):
  assert told(ASYNC, mesh) == [("reduce-scatter", ("data",), 192, 1)]


# The gather of one asynchronous collective stands in each fusion that it overlaps with; the
# reduce-scatter is an all-reduce fused with a slice; the limit of the loop stands in its
# condition, and its start behind copies; channel ids repeat.
TPU = """
HloModule tpu, is_scheduled=true, num_partitions=8

FileNames
1 "/a/train.py"
2 "/a/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=2 end_column=2}
2 {file_name_id=2 function_name_id=1 line=33 end_line=33 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
4 {file_location_id=2 parent_frame_id=2}


%add.3.clone (x.9: bf16[], y.7: bf16[]) -> bf16[] {
  %x.9 = bf16[]{:T(256)} parameter(0)
  %y.7 = bf16[]{:T(256)} parameter(1)
  ROOT %add.29 = bf16[]{:T(256)} add(%x.9, %y.7)
}

%fused_computation.29 (param_0.93: bf16[24,4]) -> (bf16[24,4], bf16[24,16], /*index=2*/u32[]) {
  %param_0.93 = bf16[24,4]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.34 = bf16[24,16]{1,0:T(8,128)(2,1)} all-gather(%param_0.93), channel_id=7, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true, \
frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/while/body/dot" stack_frame_id=4}
  ROOT %custom-call.2 = (bf16[24,4]{1,0:T(8,128)(2,1)S(1)}, bf16[24,16]{1,0}, \
/*index=2*/u32[]{:S(2)}) custom-call(%all-gather.34), custom_call_target="AsyncCollectiveStart"
}

%fused_computation.32 (param_0.102: bf16[24,4], param_1.86: bf16[24,16]) -> bf16[24,16] {
  %param_0.102 = bf16[24,4]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.86 = bf16[24,16]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.40 = bf16[24,16]{1,0:T(8,128)(2,1)} all-gather(%param_0.102), channel_id=7, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true, \
frontend_attributes={chain_id="0"}
  ROOT %custom-call.4 = bf16[24,16]{1,0:T(8,128)(2,1)S(1)} custom-call(%param_0.102, %param_1.86, \
%all-gather.40), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.clone.1 (input.5: bf16[24,16]) -> bf16[6,16] {
  %input.5 = bf16[24,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.15 = bf16[24,16]{1,0:T(8,128)(2,1)} all-reduce(%input.5), channel_id=7, \
replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add.3.clone
  %constant.199 = u32[] constant(6)
  ROOT %dynamic-slice.61 = bf16[6,16]{1,0} dynamic-slice(%all-reduce.15, %constant.199, \
%constant.199), dynamic_slice_sizes={6,16}
}

%body (wide.param.4: (s32[], bf16[24,4], s32[])) -> (s32[], bf16[24,4], s32[]) {
  %wide.param.4 = (s32[]{:T(128)}, bf16[24,4]{1,0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%wide.param.4), index=0
  %w = bf16[24,4]{1,0} get-tuple-element(%wide.param.4), index=1
  %one = s32[]{:T(128)} get-tuple-element(%wide.param.4), index=2
  %async-collective-start = (bf16[24,4]{1,0}, bf16[24,16]{1,0}, /*index=2*/u32[]) fusion(%w), \
kind=kCustom, calls=%fused_computation.29
  %held = bf16[24,16]{1,0} get-tuple-element(%async-collective-start), index=1
  %async-collective-done = bf16[24,16]{1,0} fusion(%w, %held), kind=kCustom, \
calls=%fused_computation.32
  %fusion.70 = bf16[6,16]{1,0} fusion(%async-collective-done), kind=kCustom, \
calls=%all-reduce-scatter.clone.1, metadata={op_name="jit(step)/dot" stack_frame_id=1}
  %sum = bf16[6,16]{1,0} all-reduce(%fusion.70), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}, use_global_device_ids=true, \
to_apply=%add.3.clone, backend_config={"debug":" source_target_pairs={}"}
  %constant.2 = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%constant.2, %i)
  ROOT %tuple.9 = (s32[]{:T(128)}, bf16[24,4]{1,0}, s32[]{:T(128)}) tuple(%next, %w, %one)
}

%condition (wide.param.1: (s32[], bf16[24,4], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(9)
  %wide.param.1 = (s32[]{:T(128)}, bf16[24,4]{1,0}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (p: bf16[24,4]) -> bf16[24,4] {
  %p = bf16[24,4]{1,0} parameter(0)
  %constant.1 = s32[]{:T(128)} constant(1)
  %copy.26 = s32[]{:T(128)} copy(%constant.1)
  %tuple.51 = (s32[]{:T(128)}, bf16[24,4]{1,0}, s32[]{:T(128)}) tuple(%copy.26, %p, %constant.1)
  %while.28 = (s32[]{:T(128)}, bf16[24,4]{1,0}, s32[]{:T(128)}) while(%tuple.51), \
condition=%condition, body=%body
  ROOT %out = bf16[24,4]{1,0} get-tuple-element(%while.28), index=1
}
"""


def test_a_tpu_program(mesh):
  assert collectives(TPU, mesh) == [
    Collective(
      "all-gather.34",
      "all-gather",
      ("data",),
      24 * 16 * 2,
      4,
      "jit(step)/while/body/dot (/a/model.py:33)",
    ),
    Collective(
      "all-reduce.15", "reduce-scatter", ("data",), 24 * 16 * 2, 4, "jit(step)/dot (/a/train.py:10)"
    ),
    Collective("sum", "all-reduce", ("tensor",), 6 * 16 * 2, 4, ""),
  ]


@pytest.mark.parametrize(
  ("old", "new", "count"),
  [
    ("constant(9)", "constant(10)", 5),
    ("constant(9)", "constant(1)", 0),
    ("direction=LT", "direction=LE", 5),
    ("direction=LT", "direction=NE", 4),
    ("direction=LT", "direction=GT", None),
    ("compare(%j, %limit), direction=LT", "compare(%limit, %j), direction=GT", 4),
    ("s32[]{:T(128)} constant(1)", "s32[]{:T(128)} constant(5)", 2),
    ("s32[]{:T(128)} constant(1)", "s32[]{:T(128)} parameter(1)", None),
    ("constant(2)", "constant(4)", 2),
    ("compare(%j, %limit)", "compare(%limit, %j)", None),
    ("add(%constant.2, %i)", "subtract(%i, %constant.2)", None),
    ("constant(9)", "get-tuple-element(%wide.param.1), index=0", None),
    ("add(%constant.2, %i)", "multiply(%constant.2, %i)", None),
    ("add(%constant.2, %i)", "add(%one, %i)", None),
    ("%limit = s32[]{:T(128)} constant(9)", "%limit = s32[]{:T(128)} custom-call()", None),
  ],
)
def test_trip_counts(mesh, old, new, count):
  assert TPU.count(old) == 1
  assert {c.count for c in collectives(TPU.replace(old, new), mesh)} == {count}


def test_a_limit_that_the_loop_carries(mesh):
  text = TPU.replace(
    "%limit = s32[]{:T(128)} constant(9)",
    "%limit = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=2",
  ).replace("copy(%constant.1)", "copy(%zero)")
  text = text.replace("%copy.26 =", "%zero = s32[] constant(-6)\n  %copy.26 =")
  assert {c.count for c in collectives(text, mesh)} == {4}  # -6, -4, -2, 0 are below 1.


NESTED = """
%outer_condition (t: (s32[], s32[], bf16[24,4])) -> pred[] {
  %t = (s32[], s32[], bf16[24,4]) parameter(0)
  %k.1 = s32[] get-tuple-element(%t), index=0
  %three = s32[] constant(3)
  ROOT %lt.1 = pred[] compare(%k.1, %three), direction=LT
}

%outer_body (s: (s32[], s32[], bf16[24,4])) -> (s32[], s32[], bf16[24,4]) {
  %s = (s32[], s32[], bf16[24,4]) parameter(0)
  %k = s32[] get-tuple-element(%s), index=0
  %carried = s32[] get-tuple-element(%s), index=1
  %x = bf16[24,4] get-tuple-element(%s), index=2
  %unit = s32[] constant(1)
  %from = s32[] add(%carried, %unit)
  %k.next = s32[] add(%k, %unit)
  %state = (s32[], bf16[24,4], s32[]) tuple(%from, %x, %unit)
  %loop = (s32[], bf16[24,4], s32[]) while(%state), condition=%condition, body=%body
  ROOT %end = (s32[], s32[], bf16[24,4]) tuple(%k.next, %carried, %x)
}

ENTRY %main (p: bf16[24,4]) -> (s32[], s32[], bf16[24,4]) {
  %p = bf16[24,4] parameter(0)
  %zero = s32[] constant(0)
  %four = s32[] constant(4)
  %begin = (s32[], s32[], bf16[24,4]) tuple(%zero, %four, %p)
  ROOT %all = (s32[], s32[], bf16[24,4]) while(%begin), condition=%outer_condition, \
body=%outer_body
}
"""


@pytest.mark.parametrize(
  ("old", "new", "count"),
  [
    ("constant(3)", "constant(3)", 3 * 2),  # Each inner loop runs for 5 and 7.
    ("constant(4)", "constant(0)", 3 * 4),
    ("tuple(%k.next, %carried, %x)", "tuple(%k.next, %from, %x)", None),
  ],
)
def test_a_start_that_the_loop_around_carries(mesh, old, new, count):
  assert NESTED.count(old) == 1
  text = TPU.split("ENTRY")[0] + NESTED.replace(old, new)
  assert {c.count for c in collectives(text, mesh)} == {count}


def test_two_chains_and_the_source_in_older_text(mesh):
  # Other chains are other collectives, though channel and groups agree.
  text = TPU.replace('chain_id="0"}\n', 'chain_id="1"}\n')
  gathers = [c.name for c in collectives(text, mesh) if c.kind == "all-gather"]
  assert gathers == ["all-gather.34", "all-gather.40"]
  old = all_reduce("{}").replace(
    "to_apply=%add",
    'to_apply=%add, metadata={op_name="f/psum" source_file="/a/b.py" source_line=7}',
  )
  assert [c.source for c in collectives(old, mesh)] == ["f/psum (/a/b.py:7)"]


# ---- The table ----


def record(kind, axes, size, count):
  return Collective("name", kind, axes, size, count, "")


def test_summary():
  rows = summarize(
    [
      record("all-reduce", ("data",), 1024, 10),
      record("all-gather", ("data", "tensor"), 3 << 20, 5),
      record("all-reduce", ("data",), 4096, 2),
      record("all-reduce", ("tensor",), 512, 1),
      record("all-reduce", ("tensor",), 256, None),
    ]
  )
  assert rows == [
    Row("all-gather", ("data", "tensor"), 5, 15 << 20),
    Row("all-reduce", ("data",), 12, 18 << 10),
    Row("all-reduce", ("tensor",), 1, 512),
    Row("all-reduce", ("tensor",), None, 256),
  ]
  expected = """\
    all-gather  data+tensor   5 x    3.0 MiB =   15.0 MiB
    all-reduce  data         12 x    1.5 KiB =   18.0 KiB
    all-reduce  tensor        1 x  512 Bytes =  512 Bytes
    all-reduce  tensor        ? x  256 Bytes
    total                    18              =   15.0 MiB"""
  assert format_summary(rows) == textwrap.dedent(expected)


def test_summary_of_nothing():
  assert summarize([]) == []
  assert format_summary([]) == "no collectives"
