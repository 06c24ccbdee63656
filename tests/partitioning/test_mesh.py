"""Mesh sizes: what is filled in, and what each wrong mesh is told."""

import jax
import pytest
from jax.sharding import AxisType

from partitioning.mesh import AXES, SIMULATED_DEVICES, make_mesh, product_text, resolve_sizes


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
      ["data=3 x tensor=2 asks for 6 devices and there are 8", "make the product 8", "axis to -1"],
    ),
    ({}, 8, ["1 device asks for 1 devices and there are 8"]),
    ({"data": 16}, 8, ["data=16 asks for 16 devices and there are 8"]),
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


def test_both_open_axes_are_named():
  with pytest.raises(ValueError, match=r"mesh\.stage and mesh\.context are both -1"):
    resolve_sizes({"stage": -1, "context": -1, "data": 3}, 6)


def test_sizes_are_written_as_people_write_them():
  assert product_text(whole(data=4, tensor=2)) == "data=4 x tensor=2"
  assert product_text(whole()) == "1 device"


def test_the_mesh_has_every_axis_and_leaves_the_layout_to_constraints():
  mesh = make_mesh(whole(fsdp=2, tensor=3), jax.devices()[:6])
  assert mesh.axis_names == AXES
  assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
  assert dict(mesh.shape) == whole(fsdp=2, tensor=3)
  assert mesh.size == 6


def test_a_mesh_uses_all_devices_unless_told_otherwise():
  assert make_mesh(whole(data=2, tensor=4)).size == jax.device_count()
