"""What a schedule hides: transfers of TPU programs beside compute, in times known by hand.

The programs have the forms that libtpu 0.0.42 writes.
"""

import dataclasses

import pytest

from tests.planning.programs import CHIP, GROUPS, PRODUCT, START, times

# Of a matmul of 1 s and a collective of 1 s, HBM is busy for a part only.
WITH_HBM = dataclasses.replace(CHIP, hbm_bandwidth=48e6)


def test_one_after_the_other():
  found = times(
    f"{START}  %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}\n"
    f"  ROOT %p = f32[1000,1000]{{1,0}} {PRODUCT}"
  )
  assert (found.step, found.compute) == pytest.approx((2.0, 1.0))
  [sent] = found.sent
  assert (sent.seconds, sent.exposed_seconds) == pytest.approx((1.0, 1.0))


def test_a_fusion_that_sends_and_computes_takes_the_longer_of_both():
  fused = f"""
%both (x: f32[1000,1000], v: f32[1000]) -> (f32[1000,1000], f32[1000]) {{
  %x = f32[1000,1000]{{1,0}} parameter(0)
  %v = f32[1000]{{0}} parameter(1)
  %p = f32[1000,1000]{{1,0}} {PRODUCT}
  %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}
  ROOT %t = (f32[1000,1000]{{1,0}}, f32[1000]{{0}}) tuple(%p, %r)
}}
"""
  call = "fusion(%x, %v), kind=kCustom, calls=%both"
  found = times(f"{START}  ROOT %f = (f32[1000,1000]{{1,0}}, f32[1000]{{0}}) {call}", fused)
  assert (found.step, found.exposed) == pytest.approx((1.0, 0), abs=1e-9)


def ring(way):
  """Returns the pairs of a permute by one place along the row, in one direction."""
  pairs = [(i, i + 1) if way > 0 else (i + 1, i) for i in range(7)]
  return "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}"


def permutes(*ways, products=0):
  """Returns the times of a program that sends 4 kB, 0.5 s by one link, each way that is given."""
  starts = [
    f"  %s{i} = (f32[1000]{{0}}, f32[1000]{{0}}, u32[], u32[]) collective-permute-start(%v), "
    f"channel_id={i + 1}, source_target_pairs={ring(way)}"
    for i, way in enumerate(ways)
  ]
  work = [f"  %p{i} = f32[1000,1000]{{1,0}} {PRODUCT}" for i in range(products)]
  ends = [f"  %d{i} = f32[1000]{{0}} collective-permute-done(%s{i})" for i in range(len(ways))]
  return times(START + "\n".join([*starts, *work, *ends]))


@pytest.mark.parametrize(
  ("ways", "step"), [([1], 0.5), ([-1], 0.5), ([1, -1], 0.5), ([1, 1], 1.0), ([1, -1, 1], 1.0)]
)
def test_permutes_in_opposite_directions_run_at_once_and_others_in_turn(ways, step):
  found = permutes(*ways)
  assert found.step == pytest.approx(step)
  assert [one.seconds for one in found.sent] == pytest.approx([0.5] * len(ways))
  assert found.exposed == pytest.approx(step)


def test_several_permutes_in_flight_are_hidden_by_one_matmul():
  assert permutes(1, -1, 1, -1, products=1).step == pytest.approx(1.0)
  found = permutes(1, 1, 1, products=1)
  assert (found.step, found.exposed) == pytest.approx((1.5, 0.5))
  # The third waits in line, and only its own half second is exposed.
  assert [one.exposed_seconds for one in found.sent] == pytest.approx([0, 0, 0.5], abs=1e-9)


CALLED = f"""
%called (v: f32[1000]) -> f32[1000] {{
  %v = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}
}}
"""
FUSED = f"""
%inner (v: f32[1000]) -> f32[1000] {{
  %v = f32[1000]{{0}} parameter(0)
  ROOT %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}
}}

%called (v: f32[1000]) -> f32[1000] {{
  %v = f32[1000]{{0}} parameter(0)
  ROOT %f = f32[1000]{{0}} fusion(%v), kind=kCustom, calls=%inner
}}
"""
ON_SPARSECORE = """
  %prepare = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %ready = token[] custom-call(%prepare), custom_call_target="PrepareAsyncCallDone"
  %s = ((f32[1000]{0}, token[]), f32[1000]{0}) call-start(%v, %ready), \
async_execution_thread="sparsecore", to_apply=%called
"""
ASYNC = "  %s = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-start(%v), calls=%called\n"
UPDATED = "  %u = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-update(%s), calls=%called\n"


@pytest.mark.parametrize(
  ("before", "start", "end"),
  [
    ("", f"  %s = f32[1000]{{0}} all-reduce-start(%v), {GROUPS}\n", "all-reduce-done(%s)"),
    (CALLED, ON_SPARSECORE, "call-done(%s)"),
    (CALLED, ASYNC, "async-done(%s), calls=%called"),
    (FUSED, ASYNC, "async-done(%s), calls=%called"),
    # What is between start and end does not wait.
    (CALLED, ASYNC + UPDATED, "async-done(%u), calls=%called"),
  ],
)
@pytest.mark.parametrize(("products", "step", "exposed"), [(0, 1.0, 1.0), (1, 1.0, 0.0), (2, 2, 0)])
def test_an_asynchronous_call_overlaps_with_what_follows(
  before, start, end, products, step, exposed
):
  work = "".join(f"  %p{i} = f32[1000,1000]{{1,0}} {PRODUCT}\n" for i in range(products))
  found = times(f"{START}{start}{work}  ROOT %d = f32[1000]{{0}} {end}", before)
  assert found.step == pytest.approx(step)
  assert found.exposed == pytest.approx(exposed, abs=1e-9)
  assert [one.seconds for one in found.sent] == pytest.approx([1.0])


def chain(products):
  """Returns the times of a collective that each fusion of a chain repeats beside a matmul."""
  repeated = f'all-reduce(%v), {GROUPS}, frontend_attributes={{chain_id="0"}}'
  before = f"""
%first (v: f32[1000]) -> (f32[1000], f32[1000], u32[]) {{
  %v = f32[1000]{{0}} parameter(0)
  %r = f32[1000]{{0}} {repeated}
  ROOT %s = (f32[1000]{{0}}, f32[1000]{{0}}, u32[]{{:S(2)}}) custom-call(%r), \
custom_call_target="AsyncCollectiveStart"
}}
"""
  body = f"""{START}  %f = (f32[1000]{{0}}, f32[1000]{{0}}, u32[]{{:S(2)}}) fusion(%v), \
kind=kCustom, output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%first
  %a = f32[1000]{{0}} get-tuple-element(%f), index=1
"""
  for i in range(products):
    before += f"""
%link{i} (v: f32[1000], x: f32[1000,1000]) -> (f32[1000,1000], f32[1000]) {{
  %v = f32[1000]{{0}} parameter(0)
  %x = f32[1000,1000]{{1,0}} parameter(1)
  %p{i} = f32[1000,1000]{{1,0}} {PRODUCT}
  %r{i} = f32[1000]{{0}} {repeated}
  ROOT %t{i} = (f32[1000,1000]{{1,0}}, f32[1000]{{0}}) tuple(%p{i}, %r{i})
}}
"""
    body += f"""  %l{i} = (f32[1000,1000]{{1,0}}, f32[1000]{{0}}) fusion(%a, %x), kind=kOutput, \
output_to_operand_aliasing={{{{1}}: (0, {{}})}}, calls=%link{i}
"""
  before += f"""
%last (v: f32[1000]) -> f32[1000] {{
  %v = f32[1000]{{0}} parameter(0)
  %q = f32[1000]{{0}} {repeated}
  ROOT %e = f32[1000]{{0}} custom-call(%q), custom_call_target="AsyncCollectiveDone"
}}
"""
  done = "  ROOT %d = f32[1000]{0} fusion(%a), kind=kCustom, calls=%last"
  return times(body + done, before)


@pytest.mark.parametrize(("products", "step", "exposed"), [(0, 1, 1), (1, 1, 0), (2, 2, 0)])
def test_a_chain_of_fusions_sends_one_collective_from_its_first_to_its_last(
  products, step, exposed
):
  found = chain(products)
  assert (found.step, found.exposed) == pytest.approx((step, exposed), abs=1e-9)
  assert [one.seconds for one in found.sent] == pytest.approx([1.0])
  assert found.work.flops == pytest.approx(2e9 * products)


REDUCE = (
  "  %s = ((f32[1000]{0}, token[]), f32[1000]{0}) call-start(%v), "
  'async_execution_thread="sparsecore", to_apply=%called\n'
)


def beside_a_pass(start, end, *, chip, before=CALLED):
  """Returns the times of a pass over 24 MB of HBM, read and written, beside a transfer."""
  big = "  %y = f32[6000,1000]{1,0} parameter(2)\n"
  work = "  %n = f32[6000,1000]{1,0} negate(%y)\n"
  return times(f"{START}{big}{start}{work}{end}", before, chip)


def test_an_elementwise_pass_is_slowed_by_what_a_transfer_takes_of_hbm():
  alone = beside_a_pass("", "  ROOT %z = f32[] constant(0)", chip=WITH_HBM)
  assert alone.step == pytest.approx(1.0)
  # Of 4 kB an all-reduce reads and writes 20 kB.
  found = beside_a_pass(REDUCE, "  ROOT %d = f32[1000]{0} call-done(%s)", chip=WITH_HBM)
  assert found.step == pytest.approx(1.0 + 20e3 / 48e6)
  assert found.slowed == pytest.approx(20e3 / 48e6)
  assert found.exposed == pytest.approx(0, abs=1e-9)


def test_a_matmul_is_not_slowed_while_hbm_has_room():
  """It moves 12 MB in its second; the transfer beside it 20 kB."""
  found = times(
    f"{START}{REDUCE}  %p = f32[1000,1000]{{1,0}} {PRODUCT}\n"
    "  ROOT %d = f32[1000]{0} call-done(%s)",
    CALLED,
    WITH_HBM,
  )
  assert found.step == pytest.approx(1.0)
  assert found.slowed == pytest.approx(0, abs=1e-9)


def test_a_copy_into_on_chip_memory_runs_beside_a_matmul_and_not_beside_a_pass():
  start = (
    "  %w = f32[6000,1000]{1,0} parameter(3)\n"
    "  %c = (f32[6000,1000]{1,0:S(1)}, f32[6000,1000]{1,0}, u32[]{:S(2)}) copy-start(%w)\n"
  )
  end = "  ROOT %e = f32[6000,1000]{1,0:S(1)} copy-done(%c)"
  # Read once: 24 MB, half a second of HBM; a matmul leaves it 36 of 48 MB per second.
  body = f"{START}{start}  %p = f32[1000,1000]{{1,0}} {PRODUCT}\n{end}"
  assert times(body, chip=WITH_HBM).step == pytest.approx(1.0)
  assert beside_a_pass(start, end, chip=WITH_HBM).step == pytest.approx(1.5)
  assert times(f"{START}{start}{end}", chip=WITH_HBM).step == pytest.approx(0.5)


def test_the_host_has_a_link_for_each_direction_and_takes_hbm_too():
  bring = (
    "  %h = f32[1000]{0:S(5)} parameter(3)\n"
    "  %f = (f32[1000]{0}, f32[1000]{0:S(5)}, u32[]) copy-start(%h)\n"
  )
  again = bring.replace("%h", "%h2").replace("%f", "%f2").replace("(3)", "(4)")
  send = "  %g = (f32[1000]{0:S(5)}, f32[1000]{0}, u32[]) copy-start(%v)\n"
  ends = "  %d = f32[1000]{0} copy-done(%f)\n"
  both = times(f"{START}{bring}{send}{ends}  ROOT %e = f32[1000]{{0:S(5)}} copy-done(%g)")
  assert both.step == both.host_exposed == pytest.approx(1.0)
  twice = times(f"{START}{bring}{again}{ends}  ROOT %e = f32[1000]{{0}} copy-done(%f2)")
  assert twice.step == twice.host_exposed == pytest.approx(2.0)
  [host] = times(f"{START}  ROOT %h = f32[1000]{{0:S(5)}} copy(%v)").host  # synchronous
  assert (host.direction, host.bytes) == ("to host", 4000)
  assert host.seconds == host.exposed_seconds == pytest.approx(1.0)
  found = beside_a_pass(bring, "  ROOT %d = f32[1000]{0} copy-done(%f)", chip=WITH_HBM)
  assert found.slowed == pytest.approx(4e3 / 48e6)
  assert found.host_exposed == pytest.approx(0, abs=1e-9)


def test_a_loop_beside_a_transfer_and_the_trace_of_its_body():
  inside = f"""{CALLED}
%body (s: (s32[], f32[1000,1000], f32[1000])) -> (s32[], f32[1000,1000], f32[1000]) {{
  %s = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000,1000]{{1,0}} get-tuple-element(%s), index=1
  %w = f32[1000]{{0}} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %p = f32[1000,1000]{{1,0}} {PRODUCT}
  %q = f32[1000]{{0}} all-reduce(%w), {GROUPS}
  ROOT %t = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) tuple(%j, %p, %q)
}}

%condition (s: (s32[], f32[1000,1000], f32[1000])) -> pred[] {{
  %s = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
"""
  loop = """  %zero = s32[] constant(0)
  %t = (s32[], f32[1000,1000]{1,0}, f32[1000]{0}) tuple(%zero, %x, %v)
  %l = (s32[], f32[1000,1000]{1,0}, f32[1000]{0}) while(%t), condition=%condition, body=%body
"""
  found = times(f"{START}{REDUCE}{loop}  ROOT %d = f32[1000]{{0}} call-done(%s)", inside)
  assert found.step == pytest.approx(3 * 2.0)  # the gather before it is hidden
  [one] = found.loops
  assert (one.site.name, one.trips, one.runs) == ("l", 3, 3)
  assert found.work.flops == pytest.approx(3 * 2e9)
  body = one.body
  assert body.seconds == pytest.approx(2.0)
  assert [i.names for i in body.transfers] == [i.names for i in body.waits] == [("q",)]
  [wait] = body.waits
  assert (wait.begin, wait.end) == pytest.approx((1.0, 2.0))
  matmul = next(i for i in body.compute if i.names == ("p",))
  assert (matmul.begin, matmul.end, matmul.bound) == (pytest.approx(0), pytest.approx(1), "matmul")


def test_of_a_conditional_the_slowest_branch_counts():
  def branch(name, products):
    work = "\n".join(f"  %{name}{i} = f32[1000,1000]{{1,0}} {PRODUCT}" for i in range(products))
    head = f"%{name} (x: f32[1000,1000]) -> f32[1000,1000] {{"
    return f"{head}\n  %x = f32[1000,1000]{{1,0}} parameter(0)\n{work}\n}}\n"

  before = branch("long", 2) + branch("short", 1)
  found = times(
    f"{START}  %w = pred[] constant(true)\n"
    "  ROOT %c = f32[1000,1000]{1,0} conditional(%w, %x, %x), branch_computations={%long, %short}",
    before,
  )
  assert (found.step, found.compute) == pytest.approx((2.0, 2.0))
