"""What a schedule hides: the clock goes through programs whose times are known by hand."""

import pytest

from tests.planning.programs import GROUPS, PRODUCT, START, times


def test_one_after_the_other():
  found = times(
    START
    + f"  %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}\n"
    + f"  ROOT %p = f32[1000,1000]{{1,0}} {PRODUCT}"
  )
  assert found.step == pytest.approx(2.0)
  assert found.compute == pytest.approx(1.0)
  [sent] = found.sent
  assert (sent.seconds, sent.exposed_seconds) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
  ("products", "step", "exposed"), [(1, 1.0, 0.0), (0, 1.0, 1.0), (3, 3.0, 0)]
)
def test_work_between_start_and_end_hides_it(products, step, exposed):
  lines = [f"  %p{i} = f32[1000,1000]{{1,0}} {PRODUCT}" for i in range(products)]
  found = times(
    START
    + f"  %s = f32[1000]{{0}} all-reduce-start(%v), {GROUPS}\n"
    + "\n".join(lines)
    + "\n  ROOT %d = f32[1000]{0} all-reduce-done(%s)"
  )
  assert found.step == pytest.approx(step)
  assert found.sent[0].seconds == pytest.approx(1.0)
  assert found.exposed == pytest.approx(exposed, abs=1e-9)


def test_two_collectives_share_the_links():
  found = times(
    START
    + f"  %s = f32[1000]{{0}} all-reduce-start(%v), {GROUPS}\n"
    + f"  %t = f32[1000]{{0}} all-reduce-start(%v), {GROUPS}\n"
    + f"  %p = f32[1000,1000]{{1,0}} {PRODUCT}\n"
    + "  %d = f32[1000]{0} all-reduce-done(%s)\n"
    + "  ROOT %e = f32[1000]{0} all-reduce-done(%t)"
  )
  assert found.step == pytest.approx(2.0)
  assert [one.exposed_seconds for one in found.sent] == pytest.approx([0.0, 1.0], abs=1e-9)


FETCH = """
  %h = f32[1000]{0:S(5)} parameter(2)
  %f = (f32[1000]{0}, f32[1000]{0:S(5)}, u32[]) copy-start(%h)
"""


@pytest.mark.parametrize(("products", "exposed"), [(1, 0.0), (0, 1.0)])
def test_what_is_fetched_from_the_host_is_hidden_by_work(products, exposed):
  """The link to the host is another than the one of the collective beside it."""
  lines = [f"  %p{i} = f32[1000,1000]{{1,0}} {PRODUCT}" for i in range(products)]
  found = times(
    f"{START}{FETCH}  %s = f32[1000]{{0}} all-reduce-start(%v), {GROUPS}\n"
    + "\n".join(lines)
    + "\n  %d = f32[1000]{0} all-reduce-done(%s)\n  ROOT %e = f32[1000]{0} copy-done(%f)"
  )
  assert found.step == pytest.approx(1.0)
  [host] = found.host
  assert (host.direction, host.bytes, host.seconds) == ("from host", 4000, pytest.approx(1.0))
  # Without a product the collective waits first, and the fetch is done by then.
  assert found.exposed == pytest.approx(exposed, abs=1e-9)
  assert found.host_exposed == pytest.approx(0.0, abs=1e-9)


def test_a_synchronous_copy_to_the_host_is_exposed():
  found = times(f"{START}  ROOT %h = f32[1000]{{0:S(5)}} copy(%v)")
  [host] = found.host
  assert (host.direction, host.exposed_seconds) == ("to host", pytest.approx(1.0))
  assert found.step == pytest.approx(1.0)


LOOP = f"""
%body (s: (s32[], f32[1000,1000], f32[1000])) -> (s32[], f32[1000,1000], f32[1000]) {{
  %s = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000,1000]{{1,0}} get-tuple-element(%s), index=1
  %v = f32[1000]{{0}} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %p = f32[1000,1000]{{1,0}} {PRODUCT}
  %r = f32[1000]{{0}} all-reduce(%v), {GROUPS}
  ROOT %t = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) tuple(%j, %p, %r)
}}

%condition (s: (s32[], f32[1000,1000], f32[1000])) -> pred[] {{
  %s = (s32[], f32[1000,1000]{{1,0}}, f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
"""


def test_loops_count_as_often_as_they_run():
  found = times(
    START
    + "  %zero = s32[] constant(0)\n"
    + "  %s = (s32[], f32[1000,1000]{1,0}, f32[1000]{0}) tuple(%zero, %x, %v)\n"
    + "  ROOT %w = (s32[], f32[1000,1000]{1,0}, f32[1000]{0}) while(%s), condition=%condition, "
    + "body=%body",
    LOOP,
  )
  assert found.step == pytest.approx(10.0)
  assert found.work.flops == pytest.approx(5 * 2e9)
  [sent] = found.sent
  assert (sent.runs, sent.seconds, sent.exposed_seconds) == pytest.approx((5, 5.0, 5.0))


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
  found = times(
    START
    + "  ROOT %f = (f32[1000,1000]{1,0}, f32[1000]{0}) fusion(%x, %v), kind=kCustom, calls=%both",
    fused,
  )
  assert found.step == pytest.approx(1.0)
  assert found.exposed == pytest.approx(0, abs=1e-9)
