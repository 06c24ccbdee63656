"""One array over eight devices, in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import rules
from reports.drawings import blocks, picture
from reports.tour import scene
from reports.tour.scene import Scene, Shown, mesh_of

TITLE = "One array on eight devices"
OPENING = """
An array that is larger than one device's memory, or that many devices should work on at once, is
sharded: split into blocks. It stays one array. It has one shape, and a program reads as if
nothing were split.

Two things define its sharding. A **mesh** gives the devices coordinates along named axes. A
**PartitionSpec** names, for each dim of the array, the mesh axes that shard it; a dim without an
axis is not split. Every array of a training run is sharded in this way, and `python main.py
layout` draws it.
"""


def four_cuts():
  """Shards 16 x 8 numbers over 8 devices: rows along `data`, columns along `tensor`.

  The spec is the same four times. Only the mesh decides how rows and columns are split.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  meshes = [mesh_of(data=data, tensor=8 // data) for data in (8, 4, 2, 1)]
  return [jax.device_put(x, NamedSharding(mesh, P("data", "tensor"))) for mesh in meshes]


def _four_cuts(arrays) -> Shown:
  original = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
  [held] = {scene.held_bytes(x) for x in arrays}
  [equal] = {scene.same(x, original) for x in arrays}
  findings = [
    *(f"{scene.mesh_text(x)}: {scene.blocks(x)}." for x in arrays),
    f"Reassembled, each of them and the original array are {equal}.",
    f"A device holds {rules.size_text(held)} of the {rules.size_text(original.nbytes)}.",
  ]
  return Shown(findings, [_drawn(x) for x in arrays])


def copies():
  """Names one axis only: rows along `data`. Nothing is sharded along `tensor`."""
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  return jax.device_put(x, NamedSharding(mesh_of(data=4, tensor=2), P("data", None)))


def _copies(x) -> Shown:
  (rows, columns), ids = next(iter(blocks(x.shape, x.sharding).items()))
  total = sum(shard.data.nbytes for shard in x.addressable_shards)
  findings = [
    f"{scene.mesh_text(x)}: {scene.blocks(x)}.",
    f"Devices {' and '.join(map(str, ids))} hold the same block: rows {scene.span(rows)}, columns "
    f"{scene.span(columns)}. The spec does not name tensor.",
    f"All devices together store {rules.size_text(total)} for an array of "
    f"{rules.size_text(x.nbytes)}.",
  ]
  return Shown(findings, [_drawn(x)])


def two_axes_on_one_dim():
  """Shards the rows along both axes at once, in one order of the axes and in the other.

  The axis that is named first splits first, into the larger parts.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  mesh = mesh_of(data=4, tensor=2)
  specs = P(("data", "tensor"), None), P(("tensor", "data"), None)
  return [jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs]


def _two_axes_on_one_dim(arrays) -> Shown:
  first, second = (
    {device: place for place, ids in blocks(x.shape, x.sharding).items() for device in ids}
    for x in arrays
  )
  moved = sorted(device for device in first if first[device] != second[device])
  findings = [
    *(f"{scene.spec(x)}: {scene.blocks(x)}." for x in arrays),
    f"The order matters: {len(moved)} of {len(first)} devices hold different blocks. Device "
    f"{moved[0]} has rows {scene.span(first[moved[0]][0])} under the first spec and rows "
    f"{scene.span(second[moved[0]][0])} under the second.",
  ]
  return Shown(findings, [_drawn(x) for x in arrays])


def _drawn(x):
  title = f"{scene.spec(x)} on {scene.mesh_text(x)}"
  return picture(x.shape, x.sharding, title=title, dims=("row", "column"))


SCENES = (
  Scene("Four ways to shard it", four_cuts, _four_cuts),
  Scene("Replicas", copies, _copies),
  Scene("Two axes on one dim", two_axes_on_one_dim, _two_axes_on_one_dim),
)
