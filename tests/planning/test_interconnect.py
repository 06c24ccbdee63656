"""How long collectives take: over which links a group speaks, against the formulas by hand."""

import pytest

from planning import interconnect
from planning.interconnect import Wire, in_order
from planning.topology import parse
from tests.planning.programs import IDEAL


@pytest.mark.parametrize(
  ("kind", "passes"),
  [
    ("all-gather", 1),
    ("reduce-scatter", 1),
    ("all-reduce", 2),
    ("all-to-all", 0.25),
    ("collective-permute", 1),
  ],
)
def test_kinds(kind, passes):
  found = interconnect.seconds(kind, 9e9, Wire("ICI", 90e9, 1), IDEAL)
  assert found == pytest.approx(0.1 * passes)


V5P = 180e9  # per axis of the torus


@pytest.mark.parametrize(
  ("topology", "group", "bandwidth", "hops"),
  [
    ("v5p:4x4x4", range(4), V5P, 2),  # one axis, which is a ring
    ("v5p:4x4x4", range(16), 2 * V5P, 4),  # two of them
    ("v5p:4x4x4", range(64), 3 * V5P, 6),
    ("v5p:4x4x4", range(0, 64, 16), V5P, 2),  # along the first dim
    ("v5p:4x4x4", range(2), V5P / 2, 1),  # half of an axis is no ring
    ("v5p:2x2x2", range(8), 3 * V5P / 2, 3),  # too small to have rings
    ("v5e:4x4", range(4), 45e9, 3),
    ("v5e:16x16", range(16), 90e9, 8),
    ("tpu7x:2x2x2", range(2), 200e9, 1),  # two devices of one chip
    ("tpu7x:2x2x2", range(4), 50e9, 1),
  ],
)
def test_a_group_uses_the_axes_that_it_spans(topology, group, bandwidth, hops):
  wire = in_order(parse(topology), parse(topology).devices).wire(group)
  assert (wire.network, wire.bandwidth, wire.hops) == ("ICI", bandwidth, hops)


def test_slices_speak_over_the_slow_network():
  two = in_order(parse("v5e:2x2"), 8)
  assert two.wire([0, 1]).network == "ICI"
  assert two.wire([0, 4]) == Wire("DCN", 25e9 / 8, 1)


def test_gpus_of_a_machine_communicate_over_its_switch():
  assert in_order(parse("h100:8"), 8).wire(range(8)) == Wire("NVLink", 450e9, 1)
  assert in_order(parse("h100:16"), 16).wire([0, 8]) == Wire("DCN", 50e9, 1)
