"""How long collectives take: over which links a group speaks, against the formulas by hand."""

import numpy as np
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
    # Squares of 2 x 2: each side is a line of two. Their counterparts: every second chip of both
    # axes, which are rings of eight with the links of two groups each.
    ("v5e:16x16", [0, 1, 16, 17], 90e9, 2),
    ("v5e:16x16", [16 * i + j for i in range(0, 16, 2) for j in range(0, 16, 2)], 90e9, 16),
    # A fourth of a row, and the other three fourths' counterpart: columns, and every fourth chip.
    ("v5e:16x16", range(4), 45e9, 3),
    ("v5e:16x16", range(0, 256, 4), 90e9 * 5 / 4, 16),
    ("tpu7x:2x2x2", range(2), 200e9, 1),  # two devices of one chip
    ("tpu7x:2x2x2", range(4), 50e9, 1),
  ],
)
def test_a_group_uses_the_axes_that_it_spans(topology, group, bandwidth, hops):
  wire = in_order(parse(topology), parse(topology).devices).wire(group)
  assert (wire.network, wire.bandwidth, wire.hops) == ("ICI", bandwidth, hops)


def links(*names):
  return frozenset(names)


def along(link):
  """Returns a link's dim and direction, without its chip."""
  return link.rpartition(" ")[0] or link


def test_slices_speak_over_the_slow_network():
  two = in_order(parse("v5e:2x2"), 8)
  assert two.wire([0, 1]).network == "ICI"
  slow = Wire("DCN", 25e9 / 8, 1, links=links("DCN"))
  assert two.wire([0, 4]) == two.route([(0, 4), (4, 0)]) == slow


def test_gpus_of_a_machine_communicate_over_its_switch():
  near, far = in_order(parse("h100:8"), 8), in_order(parse("h100:16"), 16)
  switch = Wire("NVLink", 450e9, 1, links=links("NVLink"))
  assert near.wire(range(8)) == near.route([(0, 7), (7, 0)]) == switch
  assert far.wire([0, 8]) == Wire("DCN", 50e9, 1, links=links("DCN"))


def around(places, step=1):
  """Returns the pairs of a permute by `step` around a ring of places."""
  return [(one, places[(i + step) % len(places)]) for i, one in enumerate(places)]


@pytest.mark.parametrize(
  ("topology", "pairs", "bandwidth", "hops", "taken"),
  [
    # By one place along the last dim, in each direction; a link is used one way only.
    ("v5p:4x4x4", around([0, 1, 2, 3]), V5P / 2, 1, ["ICI 2+"]),
    ("v5p:4x4x4", around([0, 1, 2, 3], -1), V5P / 2, 1, ["ICI 2-"]),
    ("v5p:4x4x4", around([0, 16, 32, 48]), V5P / 2, 1, ["ICI 0+"]),
    # By two places: each link carries what passes through from two devices.
    ("v5p:4x4x4", around([0, 1, 2, 3], 2), V5P / 4, 2, ["ICI 2+"]),
    # Without wraparound the last sends back to the first over all the others' links.
    ("v5e:4x4", around([0, 1, 2, 3]), 45e9, 3, ["ICI 1+", "ICI 1-"]),
    # Around a square all links are used once.
    ("v5e:4x4", around([0, 1, 5, 4]), 45e9, 1, ["ICI 0+", "ICI 0-", "ICI 1+", "ICI 1-"]),
    ("tpu7x:2x2x2", [(0, 1), (1, 0)], 200e9, 1, ["chip"]),
    ("v5p:4x4x4", [(0, 0), (1, 20)], V5P / 2, 3, ["ICI 0+", "ICI 1+", "ICI 2-"]),
  ],
)
def test_a_permute_goes_the_shorter_way_and_shares_the_links_on_it(
  topology, pairs, bandwidth, hops, taken
):
  wire = in_order(parse(topology), parse(topology).devices).route(pairs)
  assert (wire.network, wire.bandwidth, wire.hops) == ("ICI", bandwidth, hops)
  assert {along(link) for link in wire.links} == {*taken}


def test_groups_take_both_directions_of_the_axes_that_they_span():
  places = in_order(parse("v5p:4x4x4"), 64)
  row, plane = places.wire(range(4)).links, places.wire(range(16)).links
  assert {along(link) for link in row} == {"ICI 2+", "ICI 2-"}
  assert {along(link) for link in plane} == {"ICI 1+", "ICI 1-", "ICI 2+", "ICI 2-"}
  # Those of all groups at once: 64 chips, two directions.
  assert (len(row), len(plane)) == (128, 256)


def test_around_a_square_both_directions_run_at_the_same_time():
  # Each chip has one neighbour along each axis: it sends forwards by the one, backwards by the
  # other. In a line of four what leads back to its first chip takes the links of the other ring.
  places = in_order(parse("v6e:16x16"), 256)

  def rings(*chips):
    return [places.route(around(chips, step)).links for step in (1, -1)]

  forwards, backwards = rings(0, 1, 17, 16)
  assert not forwards & backwards
  assert len(forwards) == len(backwards) == 4
  forwards, backwards = rings(0, 1, 2, 3)
  assert forwards == backwards
  assert not forwards & places.wire(range(0, 256, 16)).links  # columns


def test_rings_within_slices_do_not_cross_them():
  two = in_order(parse("v5e:2x2"), 8)
  within = [*around([0, 1, 3, 2]), *around([4, 5, 7, 6])]
  assert two.route(within).bandwidth == 45e9
  assert two.route([*within, (0, 4)]).network == "DCN"


@pytest.mark.parametrize(
  ("kind", "times"), [("all-gather", 2), ("reduce-scatter", 3), ("all-reduce", 5)]
)
def test_what_a_ring_reads_and_writes_in_a_device(kind, times):
  """Counted step by step, for a large ring: of n parts of an array each device passes n - 1 on."""
  count = 1000
  gather = {"written": count - 1, "read": count - 1}  # each part that is received, each passed on
  # Each partial sum that is received is written, and read to add the device's own part to it.
  scatter = {"written": count - 1, "read": 2 * (count - 1)}
  parts = {
    "all-gather": gather.values(),
    "reduce-scatter": scatter.values(),
    "all-reduce": [*gather.values(), *scatter.values()],
  }[kind]
  assert interconnect.memory_bytes(kind, 1.0) == pytest.approx(sum(parts) / count, rel=2e-3)
  assert interconnect.memory_bytes(kind, 1.0) == times


def test_the_gpus_of_a_machine_send_to_others_side_by_side():
  """Eight cards of 50 GB/s; an all-to-all sends from each GPU over its own."""
  far = in_order(parse("h100:16"), 16)
  alone, all_of_them = far.wire([0, 8]), far.wire(range(16))
  assert (alone.bandwidth, all_of_them.bandwidth) == (50e9, 8 * 50e9)
  assert far.wire(range(4, 12)).bandwidth == 4 * 50e9
  seconds = [interconnect.seconds("all-to-all", 50e9, wire, IDEAL) for wire in (alone, all_of_them)]
  assert seconds == pytest.approx([1, 1])
  near = in_order(parse("h100:8"), 8).wire(range(8))
  assert interconnect.seconds("all-to-all", 450e9, near, IDEAL) == pytest.approx(1)
  fast = in_order(parse("gb200:144"), 144).wire(range(144))  # no faster than NVLink inside
  assert fast.bandwidth == 900e9


def test_the_slowest_pair_of_a_ring_over_machines_counts():
  machines = in_order(parse("h100:16"), 16)
  inside, ring = [(0, 4), (8, 12)], [(0, 4), (4, 8), (8, 12), (12, 0)]
  assert machines.route(inside).network == "NVLink"
  assert machines.route(ring) == machines.wire([4, 8])


def test_of_groups_the_slowest_link_counts():
  machines = in_order(parse("h100:16"), 16)
  assert machines.slowest(np.array([[0, 1], [7, 8]])) == machines.wire([7, 8])
  assert machines.slowest(np.array([[0, 1], [8, 9]])) == machines.wire([0, 1])
