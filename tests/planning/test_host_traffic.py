"""Transfers to and from host memory, in texts as libtpu's compiler prints them."""

import dataclasses
import functools

import pytest

from planning import step_time
from planning.interconnect import in_order
from planning.step_time import FROM_HOST, TO_HOST
from planning.topology import parse
from runtime import hlo
from runtime.chips import CHIPS
from tests.planning.programs import IDEAL

# The loop of an update, shortened: a layer's moment is fetched by a slice, and written back.
SHAPES = {
  "HOST": "f32[8,256,512]{2,1,0:T(8,128)S(5)}",
  "LAYER": "f32[1,256,512]{2,1,0:T(8,128)}",
  "HERE": "f32[4,256]{1,0:T(4,128)}",
  "NEAR": "f32[4,256]{1,0:T(4,128)S(1)}",
  "AWAY": "f32[4,256]{1,0:T(4,128)S(5)}",
  "INDEX": "s32[]{:T(128)}",
  "CONTEXT": "u32[]{:S(2)}",
}
TEXT = functools.reduce(
  lambda text, pair: text.replace(*pair),
  SHAPES.items(),
  """HloModule jit_step, is_scheduled=true

%body (s: (s32[], f32[8,256,512], f32[4,256])) -> (s32[], f32[8,256,512], f32[4,256]) {
  %s = (INDEX, HOST, NEAR) parameter(0)
  %i = INDEX get-tuple-element(%s), index=0
  %h = HOST get-tuple-element(%s), index=1
  %near = NEAR get-tuple-element(%s), index=2
  %zero = INDEX constant(0)
  %one = INDEX constant(1)
  %j = INDEX add(%i, %one)
  %get = ((HOST, INDEX), LAYER, CONTEXT) dynamic-slice-start(%h, %i)
  %got = LAYER dynamic-slice-done(%get)
  %new = LAYER add(%got, %got)
  %put = ((HOST, LAYER, INDEX), HOST, CONTEXT) dynamic-update-slice-start(%h, %new, %i)
  %done = HOST dynamic-update-slice-done(%put)
  ROOT %t = (INDEX, HOST, NEAR) tuple(%j, %done, %near)
}

%condition (s: (s32[], f32[8,256,512], f32[4,256])) -> pred[] {
  %s = (INDEX, HOST, NEAR) parameter(0)
  %i = INDEX get-tuple-element(%s), index=0
  %n = INDEX constant(8)
  ROOT %c = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (h: f32[8,256,512], v: f32[4,256]) -> f32[8,256,512] {
  %h = HOST parameter(0)
  %v = HERE parameter(1)
  %zero = INDEX constant(0)
  %start = (NEAR, HERE, CONTEXT) copy-start(%v)
  %near = NEAR copy-done(%start)
  %out = (AWAY, HERE, CONTEXT) copy-start(%v), metadata={op_name="away"}
  %away = AWAY copy-done(%out)
  %again = HERE copy(%away)
  %s = (INDEX, HOST, NEAR) tuple(%zero, %h, %near)
  %w = (INDEX, HOST, NEAR) while(%s), condition=%condition, body=%body
  ROOT %r = HOST get-tuple-element(%w), index=1
}
""",
)


def timed(text):
  """Returns the times of a program on a v5e, whose link to the host moves 1 kB per second."""
  chip = dataclasses.replace(CHIPS["v5e"], host_bandwidth=1e3)
  return step_time.times(hlo.parse(text), [], in_order(parse("v5e:1x1"), 1), chip, IDEAL)


def test_copies_and_slices_count_as_often_as_their_loop_runs():
  """Not those to the fast memory on the chip, space 1."""
  program, found = hlo.parse(TEXT), timed(TEXT)
  layer = 256 * 512 * 4
  moved = step_time.host_transfers(program)
  assert {name: (*moved[name], found.runs[name]) for name in moved} == {
    "out": (TO_HOST, 4 * 256 * 4, 1),
    "again": (FROM_HOST, 4 * 256 * 4, 1),
    "get": (FROM_HOST, layer, 8),
    "put": (TO_HOST, layer, 8),
  }
  assert found.moved == {name: direction for name, (direction, _) in moved.items()}
  sizes = {one.direction: (one.bytes, pytest.approx(one.seconds)) for one in found.host}
  size = 8 * layer + 4 * 256 * 4
  assert sizes == {TO_HOST: (size, size / 1e3), FROM_HOST: (size, size / 1e3)}


def test_without_host_memory_there_is_none():
  text = TEXT.replace("S(5)", "")
  assert step_time.host_transfers(hlo.parse(text)) == {}
  assert timed(text).host == ()
