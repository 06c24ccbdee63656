"""What collectives are written like: device groups in every syntax, pairs, shapes and payloads."""

import re

import jax
import pytest

from runtime import hlo
from runtime.collectives import collectives
from tests.runtime.programs import all_reduce, entry, make_mesh, told


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(data=4, tensor=2)


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
