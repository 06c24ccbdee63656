"""The mesh: every axis, all devices, and several slices."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from partitioning import mesh as module
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES


def whole(**sizes):
  """Returns all axes, those that are not given at 1."""
  return {axis: sizes.get(axis, 1) for axis in AXES}


def test_the_mesh_has_every_axis_and_leaves_the_layout_to_constraints():
  mesh = make_mesh(whole(fsdp=2, tensor=3), jax.devices()[:6])
  assert mesh.axis_names == AXES
  assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
  assert dict(mesh.shape) == whole(fsdp=2, tensor=3)
  assert mesh.size == 6


def test_a_mesh_uses_all_devices_by_default():
  assert make_mesh(whole(data=2, tensor=4)).size == jax.device_count()


# ------------------------------ slices ------------------------------


def test_simulated_slices_are_groups_of_devices_that_follow_one_another():
  mesh = make_mesh(whole(data=4, tensor=2), slices={"data": 2})
  ids = np.vectorize(lambda device: device.id)(mesh.devices).squeeze()
  assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
  mesh = make_mesh(whole(data=2, fsdp=4), slices={"fsdp": 2})
  ids = np.vectorize(lambda device: device.id)(mesh.devices).squeeze()
  # Devices 0 to 3 are a slice: along fsdp its devices come first, then those of the other.
  assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
  mesh = make_mesh(whole(data=2, fsdp=4), slices={"data": 2, "fsdp": 2})
  ids = np.vectorize(lambda device: device.id)(mesh.devices).squeeze()
  assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Chip(types.SimpleNamespace):
  """A device of a TPU, as far as its place goes."""

  def __hash__(self):
    """Returns its number."""
    return self.id


def pod(slices, chips):
  """Returns the devices of slices of v5e chips in a row."""
  return [
    Chip(
      id=slice_index * chips + i,
      slice_index=slice_index,
      process_index=slice_index,
      platform="tpu",
      device_kind="TPU v5 lite",
      coords=(i, 0, 0),
      core_on_chip=0,
    )
    for slice_index in range(slices)
    for i in range(chips)
  ]


def test_where_the_hardware_has_slices_only_the_slow_axis_crosses_them(monkeypatch):
  monkeypatch.setattr(module, "Mesh", lambda grid, axes, axis_types: grid)
  grid = make_mesh(whole(data=2, tensor=4), pod(2, 4), {"data": 2}).squeeze()
  found = np.vectorize(lambda device: device.slice_index)(grid)
  assert found.tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize("slices", [{}, {"data": 4}])
def test_another_number_of_slices_than_the_hardware_has_is_refused(slices):
  with pytest.raises(ValueError, match=r"the devices are in 2; .* such as mesh_dcn.data=2"):
    make_mesh(whole(data=4, tensor=2), pod(2, 4), slices)
