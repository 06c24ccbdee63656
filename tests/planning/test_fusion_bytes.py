"""The bytes that instructions read and write, against what is counted by hand."""

import pytest

from tests.runtime.instructions import entry, work_of


def nested(body: str, result: str, inner: str) -> float:
  """Returns the bytes of `fusion(stack, update, i)`, whose body calls fusions of `inner`."""
  text = f"""HloModule m

{inner}

%outer (s: bf16[32,8,64], u: f32[1,8,64], i: s32[]) -> {result} {{
  %s = bf16[32,8,64]{{2,1,0}} parameter(0)
  %u = f32[1,8,64]{{2,1,0}} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
{body}
}}

ENTRY %main (s: bf16[32,8,64], u: f32[1,8,64], i: s32[]) -> {result} {{
  %s = bf16[32,8,64]{{2,1,0}} parameter(0)
  %u = f32[1,8,64]{{2,1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %fused = {result} fusion(%s, %u, %i), kind=kOutput, calls=%outer
}}
"""
  return work_of(text, "fused").bytes


SLICING = """
%slicing (p: bf16[32,8,64], j: s32[]) -> f32[8,64] {
  %p = bf16[32,8,64]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  %zero = s32[] constant(0)
  %wide = f32[32,8,64]{2,1,0} convert(%p)
  %chunk = f32[1,8,64]{2,1,0} dynamic-slice(%wide, %j, %zero, %zero), dynamic_slice_sizes={1,8,64}
  ROOT %matrix = f32[8,64]{1,0} bitcast(%chunk)
}
"""
UPDATING = """
%updating (v: f32[1,8,64], j: s32[], p: bf16[32,8,64]) -> bf16[32,8,64] {
  %v = f32[1,8,64]{2,1,0} parameter(0)
  %j = s32[] parameter(1)
  %p = bf16[32,8,64]{2,1,0} parameter(2)
  %narrow = bf16[1,8,64]{2,1,0} convert(%v)
  %zero = s32[] constant(0)
  ROOT %new = bf16[32,8,64]{2,1,0} dynamic-update-slice(%p, %narrow, %j, %zero, %zero)
}
"""
CHUNK = 8 * 64  # elements
PRODUCT = "dot(%chunk, %chunk), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


# What a scan over layers saves: one fusion computes several arrays, and writes each into its stack.
SLICE = "dynamic-slice(%s, %i, %zero, %zero), dynamic_slice_sizes={1,8,64}"
UPDATE = "dynamic-update-slice(%s, %narrow, %i, %zero, %zero)"


@pytest.mark.parametrize(
  ("body", "result", "inner", "size"),
  [
    # A slice is read; of the update nothing is used.
    (f"  ROOT %one = bf16[1,8,64]{{2,1,0}} {SLICE}", "bf16[1,8,64]{2,1,0}", "", 4 * CHUNK + 4),
    # As a matmul of a chunk is compiled for TPUs: a convolution beside the fusion that slices.
    (
      "  %chunk = f32[8,64]{1,0} fusion(%s, %i), kind=kLoop, calls=%slicing\n"
      f"  ROOT %p = f32[8,8]{{1,0}} {PRODUCT}",
      *("f32[8,8]{1,0}", SLICING, 2 * CHUNK + 4 + 4 * 8 * 8),
    ),
    # Of what is updated in place the slice is written, directly or by a fusion inside, and of
    # several results each.
    (
      "  %narrow = bf16[1,8,64]{2,1,0} convert(%u)\n"
      f"  ROOT %new = bf16[32,8,64]{{2,1,0}} {UPDATE}",
      *("bf16[32,8,64]{2,1,0}", "", 4 * CHUNK + 4 + 2 * CHUNK),
    ),
    (
      "  %new = bf16[32,8,64]{2,1,0} fusion(%u, %i, %s), kind=kLoop, calls=%updating\n"
      "  ROOT %same = bf16[32,8,64]{2,1,0} bitcast(%new)",
      *("bf16[32,8,64]{2,1,0}", UPDATING, 4 * CHUNK + 4 + 2 * CHUNK),
    ),
    (
      "  %narrow = bf16[1,8,64]{2,1,0} convert(%u)\n"
      f"  %new = bf16[32,8,64]{{2,1,0}} {UPDATE}\n"
      "  %cast = bf16[32,8,64]{2,1,0} bitcast(%new)\n"
      "  %sine = f32[1,8,64]{2,1,0} sine(%u)\n"
      "  ROOT %all = (bf16[32,8,64]{2,1,0}, f32[1,8,64]{2,1,0}) tuple(%cast, %sine)",
      "(bf16[32,8,64]{2,1,0}, f32[1,8,64]{2,1,0})",
      *("", 4 * CHUNK + 4 + (2 + 4) * CHUNK),
    ),
  ],
)
def test_of_slices_and_updates_in_place_only_the_slice_counts(body, result, inner, size):
  assert nested(body, result, inner) == size


def test_an_array_that_is_read_and_updated_in_place_counts_both_slices():
  body = """  %old = f32[8,64]{1,0} fusion(%s, %i), kind=kLoop, calls=%slicing
  %both = f32[1,8,64]{2,1,0} bitcast(%old)
  %sum = f32[1,8,64]{2,1,0} add(%both, %u)
  ROOT %new = bf16[32,8,64]{2,1,0} fusion(%sum, %i, %s), kind=kLoop, calls=%updating"""
  found = nested(body, "bf16[32,8,64]{2,1,0}", SLICING + UPDATING)
  assert found == 2 * CHUNK + 4 * CHUNK + 4 + 2 * CHUNK


@pytest.mark.parametrize(
  "other",
  [
    "%t = bf16[32,8,64]{2,1,0} negate(%s)",  # all elements are needed
    "%t = bf16[32,8,64]{0,1,2} copy(%s)",  # moved to another layout, not updated in place
    "%t = bf16[32,8,64]{2,1,0} broadcast(%zero), dimensions={}",  # a new array
  ],
)
def test_an_update_of_something_else_writes_all_of_it(other):
  body = f"""  {other}
  ROOT %new = bf16[32,8,64]{{2,1,0}} fusion(%u, %i, %t), kind=kLoop, calls=%updating"""
  found = nested(body, "bf16[32,8,64]{2,1,0}", UPDATING)
  read = 0 if "broadcast" in other else 2 * 32 * CHUNK
  assert found == read + 4 * CHUNK + 4 + 2 * 32 * CHUNK


def test_an_array_that_a_fusion_only_converts_is_read_and_written():
  body = "  ROOT %wide = f32[32,8,64]{2,1,0} convert(%s)"
  found = nested(body, "f32[32,8,64]{2,1,0}", "")
  assert found == (2 + 4) * 32 * CHUNK  # of the update and the index nothing is used


# As libtpu 0.0.42 writes a gather that overlaps with a matmul: it stands in each fusion of a chain.
CHAIN = """HloModule m

%start (w: bf16[16,64]) -> (bf16[16,64], bf16[64,64], u32[]) {
  %w = bf16[16,64]{1,0} parameter(0)
  %g = bf16[64,64]{1,0} all-gather(%w), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %s = (bf16[16,64]{1,0}, bf16[64,64]{1,0}, u32[]{:S(2)}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%both (w: bf16[16,64], held: bf16[64,64], x: bf16[8,64], v: bf16[64,64]) -> (bf16[8,64], \
bf16[16,64], bf16[64,64], bf16[64,64]) {
  %w = bf16[16,64]{1,0} parameter(0)
  %held = bf16[64,64]{1,0} parameter(1)
  %x = bf16[8,64]{1,0} parameter(2)
  %v = bf16[64,64]{1,0} parameter(3)
  %g = bf16[64,64]{1,0} all-gather(%w), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  %p = bf16[8,64]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (bf16[8,64]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}, bf16[64,64]{1,0}) \
tuple(%p, %w, %held, %g)
}

ENTRY %main (w: bf16[16,64], x: bf16[8,64], v: bf16[64,64]) -> bf16[8,64] {
  %w = bf16[16,64]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %v = bf16[64,64]{1,0} parameter(2)
  %first = (bf16[16,64]{1,0}, bf16[64,64]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, \
output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %a = bf16[16,64]{1,0} get-tuple-element(%first), index=0
  %b = bf16[64,64]{1,0} get-tuple-element(%first), index=1
  %second = (bf16[8,64]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}, bf16[64,64]{1,0}) \
fusion(%a, %b, %x, %v), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), \
{3}: (1, {})}, calls=%both
  ROOT %y = bf16[8,64]{1,0} get-tuple-element(%second), index=0
}
"""


def test_of_a_fused_transfer_only_the_compute_beside_it_counts():
  assert work_of(CHAIN, "first").bytes == 0
  found = work_of(CHAIN, "second")
  assert found.flops == 2 * 8 * 64 * 64
  assert found.bytes == 2 * (8 * 64 + 64 * 64 + 8 * 64)


@pytest.mark.parametrize(
  ("line", "size"),
  [
    # Brought into on-chip memory: read once. Brought back: written once.
    ("(f32[64]{0:S(1)}, f32[64]{0}, u32[]) copy-start(%a)", 4 * 64),
    ("(f32[64]{0}, f32[64]{0:S(1)}, u32[]) copy-start(%b)", 4 * 64),
    ("((f32[64]{0}), f32[16]{0:S(1)}, s32[]) slice-start(%a), slice={[0:16]}", 4 * 16),
    ("((f32[64]{0}), f32[16]{0}, s32[]) slice-start(%a), slice={[0:16]}", 2 * 4 * 16),
    ("f32[16]{0:S(1)} slice(%a), slice={[0:16]}", 4 * 16),
    ('f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    ('f32[64]{0} custom-call(%a), custom_call_target="ConcatBitcast"', 0),
    ('f32[64]{0} custom-call(%a), custom_call_target="kernel"', 2 * 4 * 64),
  ],
)
def test_copies_slices_and_names_of_memory(line, size):
  text = entry("%a = f32[64]{0} parameter(0)", "%b = f32[64]{0:S(1)} parameter(1)", f"%c = {line}")
  assert work_of(text, "c").bytes == size


def test_memory_on_the_chip_costs_nothing():
  text = entry(
    "%a = f32[64]{0:T(128)S(1)} parameter(0)",
    "%b = f32[64]{0:T(128)} parameter(1)",
    "ROOT %c = f32[64]{0:T(128)} add(%a, %b)",
  )
  assert work_of(text, "c").bytes == 2 * 4 * 64
