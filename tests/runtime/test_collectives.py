"""What the collectives of a program are said to be, against programs that we know.

Most are compiled here for 8 simulated devices. What a CPU never prints is tried in
`test_collectives_accelerators.py`.
"""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from runtime.collectives import Collective, Row, collectives, format_summary, summarize
from tests.runtime.programs import make_mesh, told

P = PartitionSpec
SHAPE = (24, 40)  # A shard on data=4, tensor=2 is [6, 20], 480 bytes.
SHARD = 6 * 20 * 4
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(data=4, tensor=2)


def compiled_text(function, mesh, spec=("data", "tensor"), shape=SHAPE, dtype=jnp.float32):
  """Compiles a function of each device's shard."""
  body = jax.shard_map(function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), check_vma=False)
  x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
  return jax.jit(body).lower(x).compile().as_text()


# ---- Kinds, axes and bytes of compiled programs ----


def scatter(x, axis):
  return jnp.tile(lax.psum_scatter(x, axis, tiled=True), (2, 1))


@pytest.mark.usefixtures("lines_of_python")
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


def test_half_an_axis_is_not_a_full_one(mesh):
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
  ("loop", "count"),
  [
    (lambda x: lax.while_loop(lambda c: c[0, 0] < 9, scan(5, lambda c: lax.psum(c, "data")), x), 5),
    (lambda x: lax.fori_loop(0, 3, until_seven, x), 3),
    (lambda x: until_seven(jnp.argmax(x[0]), x), 1),
  ],
)
def test_a_loop_that_depends_on_data_counts_once(mesh, loop, count):
  text = compiled_text(loop, mesh)
  assert told(text, mesh) == [("all-reduce", ("data",), SHARD, count)]
  assert [one.exact for one in collectives(text, mesh)] == [False]


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
      dataclasses.replace(record("all-reduce", ("tensor",), 256, 3), exact=False),
    ]
  )
  assert rows == [
    Row("all-gather", ("data", "tensor"), 5, 15 << 20),
    Row("all-reduce", ("data",), 12, 18 << 10),
    Row("all-reduce", ("tensor",), 3, 768, exact=False),
    Row("all-reduce", ("tensor",), 1, 512),
  ]
  expected = """\
    all-gather  data+tensor    5 x    3.0 MiB =   15.0 MiB
    all-reduce  data          12 x    1.5 KiB =   18.0 KiB
    all-reduce  tensor        3+ x  256 Bytes =  768 Bytes
    all-reduce  tensor         1 x  512 Bytes =  512 Bytes
    total                    21+              =   15.0 MiB"""
  assert format_summary(rows) == textwrap.dedent(expected)


def test_summary_of_nothing():
  assert summarize([]) == []
  assert format_summary([]) == "no collectives"
