"""Rings of neighbouring chips in a torus of TPUs.

JAX gives a mesh axis complete axes of the torus. Where that is impossible, it takes part of one:
4 of a row of 16 chips are a line, whose ends are three links apart, so that a ring over them has
half the bandwidth. A block of 2 x 2 is a ring of neighbours, as is any block with an even side.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

# The axes whose collectives go around rings, innermost first: matmuls and attention.
RING_AXES = ("tensor", "context")
# The length of an axis of a two-dimensional torus (v5e, v6e) that has wraparound links, and the
# side of the cubes of which a three-dimensional one with wraparound links consists.
_POD, _CUBE = 16, 4


def in_rings(grid: np.ndarray, axes: Sequence[str]) -> np.ndarray:
  """Returns the devices of a mesh, in an order in which the innermost ring axis is a ring.

  Where JAX has placed that axis in a block of the torus, only the order inside of it changes; from
  a line it becomes a block, and the other axes take what is left, outermost first.

  Args:
    grid: the devices of a slice by mesh axis, as JAX places them.
    axes: of the mesh.
  """
  ring = next((axis for axis in RING_AXES if grid.shape[axes.index(axis)] > 1), None)
  torus = _torus(grid.reshape(-1))
  if ring is None or torus is None:
    return grid
  count = grid.shape[axes.index(ring)]
  groups = grid.reshape(-1, count)  # the axes inside of this one have size 1
  sides = _sides(groups[0])
  if count == 2 or _closed(sides, torus.shape):
    return grid
  if math.prod(sides) != count or sum(side > 1 for side in sides) != 2:
    sides = _block(torus.shape, count)
    if sides is None:
      return grid
    groups = _blocks(torus, sides)
  if all(side % 2 for side in sides):
    return grid
  return np.stack([_around(group, sides) for group in groups]).reshape(grid.shape)


def _torus(devices: Sequence[jax.Device]) -> np.ndarray | None:
  """Returns the devices by the coordinates of their chips; None if they do not fill a torus."""
  if not hasattr(devices[0], "coords"):
    return None
  shape = tuple(int(size) for size in _places(devices).max(axis=0) + 1)
  if math.prod(shape) != len(devices):  # part of a slice, or two devices to a chip
    return None
  torus = np.empty(shape, object)
  for device in devices:
    torus[tuple(device.coords)] = device
  return None if (torus == None).any() else torus  # noqa: E711, elementwise


def _places(devices: Sequence[jax.Device]) -> np.ndarray:
  return np.array([device.coords for device in devices])


def _sides(group: Sequence[jax.Device]) -> tuple[int, ...]:
  """Returns the sides of the smallest block with these devices."""
  return tuple(int(side) for side in np.ptp(_places(group), axis=0) + 1)


def _closed(sides: tuple[int, ...], torus: tuple[int, ...]) -> bool:
  """Returns whether a block is one complete axis of the torus with wraparound links."""
  flat = torus[2] == 1
  long = [dim for dim, side in enumerate(sides) if side > 1]
  if len(long) != 1 or sides[long[0]] != torus[long[0]]:
    return False
  return torus[long[0]] == _POD if flat else all(size % _CUBE == 0 for size in torus)


def _block(torus: tuple[int, ...], count: int) -> tuple[int, ...] | None:
  """Returns the sides of a block of so many chips, 2 by half of them, that tiles the torus.

  Along the longest axes, since shorter ones may be complete for others.
  """
  by_length = sorted(range(len(torus)), key=lambda dim: -torus[dim])
  for one in by_length:
    for other in by_length:
      sides = [1] * len(torus)
      sides[one], sides[other] = 2, count // 2
      fits = all(size % side == 0 for size, side in zip(torus, sides, strict=True))
      if one != other and math.prod(sides) == count and fits:
        return tuple(sides)
  return None


def _blocks(torus: np.ndarray, sides: tuple[int, ...]) -> np.ndarray:
  """Returns [blocks, chips of one], the blocks in the order of their places."""
  split = [x for size, side in zip(torus.shape, sides, strict=True) for x in (size // side, side)]
  dims = range(0, len(split), 2)
  cut = torus.reshape(split).transpose([*dims, *(dim + 1 for dim in dims)])
  return cut.reshape(-1, math.prod(sides))


def _around(group: np.ndarray, sides: tuple[int, ...]) -> np.ndarray:
  """Returns the chips of a block, each a neighbour of the one before; the last of the first.

  Row by row there and back, leaving out the first column, which leads back to the first row.
  """
  rows, columns = (dim for dim, side in enumerate(sides) if side > 1)
  if sides[rows] % 2:
    rows, columns = columns, rows
  last = sides[columns] - 1

  def place(device: jax.Device) -> tuple[int, int]:
    corner = _places(group).min(axis=0)
    row, column = (int(device.coords[dim] - corner[dim]) for dim in (rows, columns))
    if column == 0 and row > 0:
      return sides[rows], -row
    return row, column if row % 2 == 0 else last - column

  ordered = np.empty(len(group), object)
  ordered[:] = sorted(group, key=place)
  return ordered
