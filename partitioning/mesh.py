"""The device mesh: its axes, their sizes, and what a size of -1 means."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

# Outermost first. Neighbouring devices differ in the last axis, so the axis that
# communicates most (tensor) gets the shortest links.
AXES = ("data", "fsdp", "stage", "expert", "context", "tensor")

# What `-1` means where the application makes its own (simulated) devices.
SIMULATED_DEVICES = 8


def product_text(sizes: Mapping[str, int]) -> str:
  """Returns the sizes as people write them, `data=4 x tensor=2`; axes of size 1 are left out."""
  return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1 device"


def resolve_sizes(sizes: Mapping[str, int], device_count: int | None) -> dict[str, int]:
  """Returns the size of every axis, with at most one -1 filled in.

  Args:
    sizes: axis name -> size, all of `AXES`; -1 stands for "what is left".
    device_count: devices that the mesh must use, or None where they are simulated: then
      the product decides, and -1 fills up to `SIMULATED_DEVICES`.

  Raises:
    ValueError: an unknown axis, a size of 0, two sizes of -1, or a product that is not
      the device count.
  """
  if unknown := [axis for axis in sizes if axis not in AXES]:
    raise ValueError(f"mesh: unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
  sizes = {axis: int(sizes.get(axis, 1)) for axis in AXES}
  wrong = [f"mesh.{axis}={size}" for axis, size in sizes.items() if size < 1 and size != -1]
  if wrong:
    raise ValueError(f"{', '.join(wrong)}: a size is at least 1, or -1 for all devices left")
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    names = " and ".join(f"mesh.{axis}" for axis in open_axes)
    raise ValueError(f"{names} are both -1; at most one axis can take what is left")
  fixed = math.prod(size for size in sizes.values() if size != -1)
  devices = SIMULATED_DEVICES if device_count is None else device_count
  if open_axes:
    if devices % fixed:
      rest = product_text({axis: size for axis, size in sizes.items() if size != -1})
      raise ValueError(
        f"mesh.{open_axes[0]}=-1: {devices} devices cannot be divided by {rest} = {fixed}"
      )
    sizes[open_axes[0]] = devices // fixed
  elif device_count is not None and fixed != device_count:
    raise ValueError(
      f"mesh: {product_text(sizes)} asks for {fixed} devices and there are {device_count}; "
      f"make the product {device_count}, or set one axis to -1"
    )
  return sizes


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Returns a mesh with all of `AXES`, over `devices` (default: all).

  Axis types are Auto: from jax 0.11 on `make_mesh` defaults to Explicit, where
  `with_sharding_constraint` only asserts.
  """
  shape = tuple(sizes[axis] for axis in AXES)
  return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
