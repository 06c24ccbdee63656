"""What CPU never prints: started, fused and chained collectives, loops without a known trip count.

The texts are cut down from what the compilers for TPU printed.
"""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from runtime.collectives import Collective, collectives
from tests.runtime.programs import all_reduce, make_mesh, told


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(data=4, tensor=2)


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
  found = [dataclasses.replace(one, groups=()) for one in collectives(TPU, mesh)]
  assert found == [
    Collective(
      "all-gather.34",
      "all-gather",
      ("data",),
      24 * 16 * 2,
      4,
      "jit(step)/while/body/dot (/a/model.py:33)",
      in_loop=True,
    ),
    Collective(
      "all-reduce.15",
      "reduce-scatter",
      ("data",),
      24 * 16 * 2,
      4,
      "jit(step)/dot (/a/train.py:10)",
      in_loop=True,
    ),
    Collective("sum", "all-reduce", ("tensor",), 6 * 16 * 2, 4, "", in_loop=True),
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
  found = {(c.count, c.exact) for c in collectives(TPU.replace(old, new), mesh)}
  assert found == {(1, False) if count is None else (count, True)}


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
    # The inner loop's trip count is unknown: it counts once.
    ("tuple(%k.next, %carried, %x)", "tuple(%k.next, %from, %x)", None),
  ],
)
def test_a_start_that_the_loop_around_carries(mesh, old, new, count):
  assert NESTED.count(old) == 1
  text = TPU.split("ENTRY")[0] + NESTED.replace(old, new)
  found = {(c.count, c.exact) for c in collectives(text, mesh)}
  assert found == ({(3, False)} if count is None else {(count, True)})


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


class Placed(NamedTuple):
  """A TPU of one of two slices."""

  slice_index: int
  coords: tuple[int, int, int]


TRANSFER = """
HloModule slices

ENTRY %main (x: bf16[12]) -> bf16[12] {
  %x = bf16[12]{0} parameter(0)
  %after = token[] after-all()
  %send = (bf16[12]{0}, u32[], token[]) send(%x, %after), channel_id=6, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=6, is_host_transfer=true
  %recv = (bf16[12]{0}, u32[], token[]) recv(%after), channel_id=5, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %received = (bf16[12]{0}, token[]) recv-done(%recv), channel_id=5, is_host_transfer=true
  ROOT %y = bf16[12]{0} get-tuple-element(%received), index=0
}
"""


def test_a_transfer_between_slices_is_a_collective_over_them():
  array = np.empty(8, object)
  array[:] = [Placed(i, (place % 2, place // 2, 0)) for i in range(2) for place in (0, 1, 3, 2)]
  mesh = SimpleNamespace(
    devices=array, size=8, shape={"data": 2, "fsdp": 4}, axis_names=("data", "fsdp")
  )
  [found] = collectives(TRANSFER, mesh)
  assert (found.kind, found.axes, found.bytes, found.count) == ("all-reduce", ("data",), 24, 1)
  assert found.whole
  assert found.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
  unknown = TRANSFER.replace("ALL_REDUCE", "SOMETHING")
  with pytest.raises(ValueError, match="instruction send: unknown transfer type SOMETHING"):
    collectives(unknown, mesh)
