"""The device mesh: which device is where, also over several slices."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

# Experimental: jax.make_mesh places devices within one slice, and raises for several (jax#37769).
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from partitioning.mesh_sizes import AXES, product_text


def make_mesh(
  sizes: Mapping[str, int],
  devices: Sequence[jax.Device] | None = None,
  slices: Mapping[str, int] | None = None,
) -> Mesh:
  """Returns a mesh with all of `AXES`, over `devices` (default: all).

  Axis types are Auto: from jax 0.11 on `make_mesh` defaults to Explicit, where
  `with_sharding_constraint` only asserts.

  Args:
    sizes: of every axis, over all slices.
    devices: as many.
    slices: axis name -> number of slices that it spans. Along such an axis, neighbours are within
      one slice. On CPUs consecutive devices make a slice.

  Raises:
    ValueError: the hardware has a different number of slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  over = [(slices or {}).get(axis, 1) for axis in AXES]
  shape = [sizes[axis] for axis in AXES]
  types = (AxisType.Auto,) * len(AXES)
  _check_slices(devices, math.prod(over), slices or {})
  if math.prod(over) == 1:
    return Mesh(_placed(shape, devices), AXES, axis_types=types)
  within = [size // count for size, count in zip(shape, over, strict=True)]
  if devices[0].platform == "cpu":
    return Mesh(_grouped(devices, within, over), AXES, axis_types=types)
  number = "slice_index" if hasattr(devices[0], "slice_index") else "process_index"
  by_slice = sorted(devices, key=lambda device: getattr(device, number))
  each = len(devices) // math.prod(over)
  slices_devices = [by_slice[start : start + each] for start in range(0, len(devices), each)]
  placed = [device for one in slices_devices for device in _placed(within, one).flat]
  return Mesh(_grouped(placed, within, over), AXES, axis_types=types)


def _placed(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
  """Returns the devices of a slice in mesh order, each mesh axis taking axes of the torus.

  Where that is impossible (16 by 16 chips as 64 by 4), axes of the torus are split.
  """
  try:
    grid = mesh_utils.create_device_mesh(shape, devices)
  except NotImplementedError:
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  if devices[0].platform != "tpu":
    return grid
  from partitioning import torus  # of TPUs alone

  return torus.in_rings(grid, AXES)


def _check_slices(devices: Sequence[jax.Device], asked: int, slices: Mapping[str, int]) -> None:
  """Raises ValueError if the hardware reports slices, and not as many as asked for."""
  there = {getattr(device, "slice_index", None) for device in devices} - {None}
  if there and len(there) != asked:
    raise ValueError(
      f"mesh_dcn: {product_text(slices) if asked > 1 else 'all 1'} asks for {asked} slices, and "
      f"the devices are in {len(there)}; make the product of mesh_dcn.* {len(there)}, such as "
      f"mesh_dcn.data={len(there)}"
    )


def _grouped(devices: Sequence[jax.Device], within: list[int], over: list[int]) -> np.ndarray:
  """Returns the devices by their coordinates, those of a slice following one another."""
  grid = np.empty(len(devices), object)
  grid[:] = devices
  grid = grid.reshape(*over, *within)
  count = len(within)
  order = [dim for axis in range(count) for dim in (axis, count + axis)]
  return grid.transpose(order).reshape([a * b for a, b in zip(over, within, strict=True)])
