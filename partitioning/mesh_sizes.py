"""Sizes of the mesh axes: their names and order, what a size of -1 means, and several slices.

It imports no JAX: a config is checked before that is imported.
"""

import math
from collections.abc import Mapping

# Outermost first. Neighbouring devices differ in the last axis, so the axis that
# communicates most (tensor) gets the shortest links.
AXES = ("data", "fsdp", "stage", "expert", "context", "tensor")
STAGE = "stage"  # of a pipeline

# The axes that may also cross slices, over DCN: they communicate once a step, or can prefetch a
# layer ahead.
SLOW_AXES = ("data", "fsdp", "stage")

# The number of devices that `-1` fills up to where devices are simulated.
SIMULATED_DEVICES = 8


def product_text(sizes: Mapping[str, int]) -> str:
  """Returns the sizes as `data=4 x tensor=2`; axes of size 1 are left out."""
  return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1 device"


def mesh_text(sizes: Mapping[str, int], slices: Mapping[str, int]) -> str:
  """Returns the sizes, `data=4 x tensor=2`, and along which axes slices differ, if any do."""
  text, count = product_text(sizes), math.prod(slices.values())
  return f"{text} ({count} slices along {product_text(slices)})" if count > 1 else text


def resolve_sizes(
  sizes: Mapping[str, int],
  device_count: int | None,
  slices: Mapping[str, int] | None = None,
) -> dict[str, int]:
  """Returns the size of every axis, with at most one -1 filled in.

  Args:
    sizes: axis name -> size, all of `AXES`, within a slice; -1 stands for "what is left".
    device_count: devices that the mesh must use, or None where they are simulated: then
      the product decides, and -1 fills up to `SIMULATED_DEVICES`.
    slices: axis name -> number of slices that it spans, of `SLOW_AXES`; one slice by default. An
      axis' size is the product of both.

  Raises:
    ValueError: an unknown axis, a size of 0, two sizes of -1, or a product that is not
      the device count.
  """
  slices = {axis: int(size) for axis, size in (slices or {}).items()}
  if fast := [axis for axis, size in slices.items() if axis not in SLOW_AXES and size != 1]:
    raise ValueError(
      f"mesh_dcn.{fast[0]}={slices[fast[0]]}: the axes between slices are {', '.join(SLOW_AXES)}"
    )
  if wrong := [f"mesh_dcn.{axis}={size}" for axis, size in slices.items() if size < 1]:
    raise ValueError(f"{', '.join(wrong)}: a number of slices is at least 1")
  count = math.prod(slices.values())
  if device_count is not None and device_count % count:
    raise ValueError(
      f"mesh_dcn: {product_text(slices)} asks for {count} slices, and {device_count} devices "
      f"cannot be divided by them"
    )
  within = _resolve(sizes, None if device_count is None else device_count // count, count)
  return {axis: size * slices.get(axis, 1) for axis, size in within.items()}


def _resolve(sizes: Mapping[str, int], device_count: int | None, slices: int) -> dict[str, int]:
  """Returns the sizes within one of the slices, which has so many devices."""
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
  each = " in each slice" if slices > 1 else ""
  fixed = math.prod(size for size in sizes.values() if size != -1)
  devices = max(1, SIMULATED_DEVICES // slices) if device_count is None else device_count
  if open_axes:
    if devices % fixed:
      rest = product_text({axis: size for axis, size in sizes.items() if size != -1})
      raise ValueError(
        f"mesh.{open_axes[0]}=-1: {devices} devices{each} cannot be divided by {rest} = {fixed}"
      )
    sizes[open_axes[0]] = devices // fixed
  elif device_count is not None and fixed != device_count:
    raise ValueError(
      f"mesh: {product_text(sizes)} asks for {fixed} devices{each} and there are {device_count}; "
      f"give {_fitting(sizes, device_count)}"
    )
  return sizes


def with_fewer_replicas(
  sizes: Mapping[str, int], slices: Mapping[str, int], count: int
) -> tuple[dict[str, int], dict[str, int]]:
  """Returns a mesh and its slices with so few data replicas that they have `count` devices.

  Whole slices are left out where replicas are on several.

  Args:
    sizes: axis name -> size within a slice, none of them -1.
    slices: axis name -> number of slices that it spans.
    count: devices that there are; with all of the mesh, or more, nothing changes.

  Raises:
    ValueError: they are no whole number of replicas.
  """
  sizes, slices = dict(sizes), dict(slices)
  whole = math.prod(sizes.values()) * math.prod(slices.values())
  of = slices if slices.get("data", 1) > 1 else sizes
  replicas, rest = divmod(of["data"] * count, whole)
  if rest or not replicas:
    raise ValueError(
      f"training.elastic=True: the mesh has {of['data']} data replicas of {whole // of['data']} "
      f"devices each, and the {count} devices that there are hold no whole number of them"
    )
  of["data"] = min(replicas, of["data"])
  return sizes, slices


def _fitting(sizes: Mapping[str, int], device_count: int) -> str:
  """Returns the overrides of one axis that make a mesh fit, and the config that always does."""
  fixed = math.prod(sizes.values())
  larger = [axis for axis, size in sizes.items() if size > 1] or ["data"]
  rests = {axis: fixed // sizes[axis] for axis in larger}
  overrides = [
    f"--config.mesh.{axis}={device_count // rest}"
    for axis, rest in rests.items()
    if device_count % rest == 0
  ]
  return " or ".join([*overrides, "--config=configs/fsdp.py, which takes all devices there are"])
