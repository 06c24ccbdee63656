"""Mesh sizes: what is filled in, and what each wrong mesh is told."""

import pytest

from partitioning.mesh_sizes import (
  AXES,
  SIMULATED_DEVICES,
  mesh_text,
  product_text,
  resolve_sizes,
  with_fewer_replicas,
)


def whole(**sizes):
  """Returns all axes, those that are not given at 1."""
  return {axis: sizes.get(axis, 1) for axis in AXES}


def test_every_axis_is_there_and_in_the_order_that_gives_tensor_the_shortest_links():
  assert AXES == ("data", "fsdp", "stage", "expert", "context", "tensor")
  sizes = resolve_sizes({"tensor": 2, "data": 3}, 6)
  assert list(sizes.items()) == list(whole(data=3, tensor=2).items())


@pytest.mark.parametrize(
  ("given", "devices", "axis", "filled"),
  [
    ({"data": -1}, 7, "data", 7),
    ({"data": 3, "fsdp": -1, "tensor": 5}, 30, "fsdp", 2),
    ({"data": 6, "tensor": -1}, 6, "tensor", 1),
    ({"fsdp": -1}, None, "fsdp", SIMULATED_DEVICES),
    ({"fsdp": -1, "tensor": 2}, None, "fsdp", SIMULATED_DEVICES // 2),
  ],
)
def test_minus_one_takes_what_is_left(given, devices, axis, filled):
  sizes = resolve_sizes(given, devices)
  assert sizes == whole(**{**given, axis: filled})


def test_simulated_devices_are_as_many_as_the_mesh_asks_for():
  assert resolve_sizes({"data": 3, "tensor": 5}, None) == whole(data=3, tensor=5)


@pytest.mark.parametrize(
  ("given", "devices", "said"),
  [
    ({"tensr": 2}, 2, ["unknown axis 'tensr'", *AXES]),
    ({"data": 0, "tensor": -2}, 8, ["mesh.data=0, mesh.tensor=-2", "at least 1, or -1"]),
    ({"data": -1, "fsdp": -1}, 8, ["mesh.data and mesh.fsdp are both -1", "at most one axis"]),
    (
      {"data": 3, "tensor": 2},
      8,
      [
        "data=3 x tensor=2 asks for 6 devices and there are 8",
        "give --config.mesh.data=4 or --config=configs/fsdp.py, which takes all devices",
      ],
    ),
    ({}, 8, ["1 device asks for 1 devices and there are 8; give --config.mesh.data=8 or --config"]),
    ({"data": 16}, 8, ["data=16 asks for 16 devices and there are 8; give --config.mesh.data=8"]),
    (
      {"data": 4, "tensor": 2},
      4,
      ["give --config.mesh.data=2 or --config.mesh.tensor=1 or --config=configs/fsdp.py, which"],
    ),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 6, ["there are 6; give --config=configs/fsdp.py"]),
    (
      {"data": -1, "fsdp": 3, "tensor": 2},
      8,
      ["mesh.data=-1: 8 devices cannot be divided by fsdp=3 x tensor=2 = 6"],
    ),
    ({"data": -1, "tensor": 16}, 8, ["8 devices cannot be divided by tensor=16 = 16"]),
    ({"fsdp": -1, "tensor": 3}, None, ["8 devices cannot be divided by tensor=3 = 3"]),
  ],
)
def test_a_wrong_mesh_is_refused_with_its_numbers(given, devices, said):
  with pytest.raises(ValueError, match="mesh") as refusal:
    resolve_sizes(given, devices)
  for part in said:
    assert part in str(refusal.value)


def test_sizes_are_written_as_people_write_them():
  assert product_text(whole(data=4, tensor=2)) == "data=4 x tensor=2"
  assert product_text(whole()) == "1 device"


@pytest.mark.parametrize(
  ("given", "slices", "devices", "sizes"),
  [
    ({"data": 2, "tensor": 2}, {"data": 2}, 8, {"data": 4, "tensor": 2}),
    ({"fsdp": -1}, {"data": 2}, 12, {"data": 2, "fsdp": 6}),
    ({"fsdp": -1}, {"fsdp": 2, "data": 2}, None, {"data": 2, "fsdp": 4}),
    ({"tensor": 3}, {"data": 2, "fsdp": 1, "stage": 1}, None, {"data": 2, "tensor": 3}),
  ],
)
def test_the_size_of_an_axis_is_the_product_of_that_in_a_slice_and_the_slices(
  given, slices, devices, sizes
):
  assert resolve_sizes(given, devices, slices) == whole(**sizes)


@pytest.mark.parametrize(
  ("given", "slices", "devices", "said"),
  [
    ({}, {"tensor": 2}, 8, "mesh_dcn.tensor=2: the axes between slices are data, fsdp, stage"),
    ({}, {"data": 0}, 8, "mesh_dcn.data=0: a number of slices is at least 1"),
    ({}, {"data": 3}, 8, "data=3 asks for 3 slices, and 8 devices cannot be divided by them"),
    ({"fsdp": 3}, {"data": 2}, 8, "fsdp=3 asks for 3 devices in each slice and there are 4"),
    ({"fsdp": -1, "tensor": 3}, {"data": 2}, 8, "fsdp=-1: 4 devices in each slice cannot be divid"),
  ],
)
def test_wrong_slices_are_refused_with_their_numbers(given, slices, devices, said):
  with pytest.raises(ValueError, match="mesh") as refusal:
    resolve_sizes(given, devices, slices)
  assert said in str(refusal.value)


def test_slices_are_written_beside_the_sizes():
  assert mesh_text(whole(data=4, tensor=2), {}) == "data=4 x tensor=2"
  text = mesh_text(whole(data=4, tensor=2), {"data": 2})
  assert text == "data=4 x tensor=2 (2 slices along data=2)"


@pytest.mark.parametrize(
  ("sizes", "slices", "count", "expected"),
  [
    ({"data": 4, "tensor": 2}, {}, 6, ({"data": 3, "tensor": 2}, {})),
    ({"data": 4, "tensor": 2}, {}, 2, ({"data": 1, "tensor": 2}, {})),
    ({"data": 2, "fsdp": 2}, {"data": 3}, 8, ({"data": 2, "fsdp": 2}, {"data": 2})),
    ({"data": 4, "tensor": 2}, {}, 5, "4 data replicas of 2 devices each, and the 5 devices"),
    ({"data": 4, "tensor": 2}, {}, 1, "hold no whole number"),
    ({"data": 2, "fsdp": 2}, {"data": 3}, 6, "3 data replicas of 4 devices each"),
  ],
)
def test_fewer_devices_have_fewer_data_replicas(sizes, slices, count, expected):
  if isinstance(expected, str):
    with pytest.raises(ValueError, match=expected):
      with_fewer_replicas(sizes, slices, count)
  else:
    assert with_fewer_replicas(sizes, slices, count) == expected
