"""The order of TPU chips: which mesh axes are rings of neighbours, and that all chips are used."""

import itertools
import math

import numpy as np
import pytest

from partitioning import mesh as module
from partitioning import torus as rings
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from tests.partitioning.test_mesh import Chip, whole

FLAT = "TPU v6 lite"
KINDS = {2: FLAT, 3: "TPU v5"}


def torus(*shape):
  """Returns the chips of a slice, in the order of their coordinates."""
  places = itertools.product(*map(range, shape))
  return [
    Chip(
      id=number,
      slice_index=0,
      process_index=number // 4,
      platform="tpu",
      device_kind=KINDS[len(shape)],
      coords=(*place, 0)[:3],
      core_on_chip=0,
    )
    for number, place in enumerate(places)
  ]


@pytest.fixture
def placed(monkeypatch):
  """Returns a function: a torus and mesh sizes -> (its shape, coordinates by mesh axis)."""
  monkeypatch.setattr(module, "Mesh", lambda grid, axes, axis_types: grid)

  def place(shape, **sizes):
    grid = make_mesh(whole(**sizes), torus(*shape))
    coordinates = np.array([device.coords for device in grid.flat])
    assert len({*map(tuple, coordinates)}) == math.prod(shape)
    return coordinates.reshape(*grid.shape, 3)

  return place


def links(coordinates, axis, shape, closed):
  """Returns the links between each device and the next one around a mesh axis."""
  dim = AXES.index(axis)
  apart = np.abs(coordinates - np.roll(coordinates, -1, axis=dim))
  if closed:
    apart = np.minimum(apart, np.array((*shape, 1))[:3] - apart)
  return apart.sum(axis=-1)


@pytest.mark.parametrize(
  ("shape", "sizes", "closed"),
  [
    ((16, 16), {"fsdp": 64, "tensor": 4}, False),
    ((16, 16), {"fsdp": 32, "tensor": 8}, False),
    ((16, 16), {"data": 8, "fsdp": 8, "tensor": 4}, False),
    ((16, 16), {"fsdp": 16, "tensor": 16}, True),  # a complete axis, with its wraparound link
    ((16, 16), {"fsdp": 64, "context": 4}, False),
    ((4, 4), {"fsdp": 4, "tensor": 4}, False),
    ((2, 4), {"tensor": 8}, False),
    ((8, 8, 8), {"fsdp": 128, "tensor": 4}, False),
    ((4, 4, 4), {"fsdp": 16, "tensor": 4}, True),
    ((4, 4, 4), {"fsdp": 8, "tensor": 8}, False),
    ((4, 4, 4), {"fsdp": 4, "tensor": 16}, False),
    ((2, 2, 2), {"fsdp": 2, "tensor": 4}, False),
    ((8, 8, 8), {"fsdp": 32, "context": 4, "tensor": 4}, False),
    ((16, 16), {"fsdp": 128, "tensor": 2}, False),
  ],
  ids=str,
)
def test_the_innermost_ring_axis_is_a_ring_of_neighbours(placed, shape, sizes, closed):
  ring = "tensor" if "tensor" in sizes else "context"
  assert links(placed(shape, **sizes), ring, shape, closed).max() == 1


def test_tensor_in_a_pod_is_a_square_of_chips(placed):
  coordinates = placed((16, 16), fsdp=64, tensor=4).reshape(64, 4, 3)
  assert coordinates[0].tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0]]
  # The squares follow one another along the rows: fsdp is 8 of 8.
  assert coordinates[1, 0].tolist() == [0, 2, 0]
  assert coordinates[8, 0].tolist() == [2, 0, 0]
  of_axes = placed((16, 16), data=8, fsdp=8, tensor=4).reshape(8, 8, 4, 3)
  assert {*of_axes[3, :, 0, 0]} == {6}
  assert {*of_axes[:, 3, 0, 1]} == {6}


@pytest.mark.parametrize(
  ("shape", "sizes"),
  [
    ((16, 16), {"fsdp": 256}),
    ((4, 4, 4), {"fsdp": 64}),
    ((4, 4, 4), {"fsdp": 16, "tensor": 4}),
    ((6, 4), {"fsdp": 8, "tensor": 3}),  # no block with an even side
  ],
)
def test_other_meshes_stay_as_jax_places_them(placed, shape, sizes, monkeypatch):
  ours = placed(shape, **sizes)
  monkeypatch.setattr(rings, "in_rings", lambda grid, axes: grid)
  np.testing.assert_array_equal(ours, placed(shape, **sizes))


def test_each_slice_has_its_own_rings(monkeypatch):
  monkeypatch.setattr(module, "Mesh", lambda grid, axes, axis_types: grid)
  chips = [*torus(4, 4), *torus(4, 4)]
  for number, chip in enumerate(chips):
    chip.id, chip.slice_index, chip.process_index = number, number // 16, number // 4
  grid = make_mesh(whole(data=2, fsdp=4, tensor=4), chips, {"data": 2})
  assert [{chip.slice_index for chip in part.flat} for part in grid] == [{0}, {1}]
  coordinates = np.array([chip.coords for chip in grid.flat]).reshape(*grid.shape, 3)
  assert links(coordinates, "tensor", (4, 4), False).max() == 1
