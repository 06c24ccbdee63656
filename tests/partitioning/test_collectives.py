"""What the collectives of a program are said to be, against programs that we know.

Most are compiled here for 8 simulated devices. What a CPU never prints is tried in
`test_collectives_accelerators.py`.
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
  assert [c.arrays for c in collectives(text, mesh)] == [2]


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
