"""One array over eight devices, in several ways."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import rules
from partitioning.rules import spec_axes
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

DIMS = ("row", "column")


def four_cuts(sizes=((8, 1), (4, 2), (2, 4), (1, 8)), spec=("data", "tensor")):
  """Shards 16 x 8 numbers over 8 devices: rows along `data`, columns along `tensor`.

  The spec is the same four times. Only the mesh decides how rows and columns are split.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  meshes = [mesh_of(data=data, tensor=tensor) for data, tensor in sizes]
  return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for mesh in meshes]


def _four_cuts(arrays) -> Shown:
  findings = [f"{scene.mesh_text(x)}: {scene.blocks(x)}." for x in arrays]
  right = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
  equal = [np.array_equal(x, right) for x in arrays]
  which = f"all {len(equal)}" if all(equal) else f"only {sum(equal)} of {len(equal)}"
  findings.append(f"Reassembled, {which} are the original array.")
  sizes = {scene.held_bytes(x) for x in arrays}
  sizes_text = " or ".join(rules.size_text(size) for size in sorted(sizes))
  findings.append(f"A device holds {sizes_text} of the {rules.size_text(arrays[0].nbytes)}.")
  return Shown(findings, [_drawn(x) for x in arrays])


def copies(spec=("data", None)):
  """Names one axis only: rows along `data`. Nothing is sharded along `tensor`."""
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  return jax.device_put(x, NamedSharding(mesh_of(data=4, tensor=2), P(*spec)))


def _copies(x) -> Shown:
  found = blocks(x.shape, x.sharding)
  findings = [f"{scene.mesh_text(x)}: {scene.blocks(x)}."]
  (rows, columns), ids = next(iter(found.items()))
  if len(ids) > 1:
    findings.append(
      f"Devices {' and '.join(map(str, ids))} hold the same block: rows {scene.span(rows)}, "
      f"columns {scene.span(columns)}. The spec does not name {' and '.join(_unnamed(x))}."
    )
  else:
    findings.append("No two devices hold the same block: the spec names every axis of the mesh.")
  total = sum(shard.data.nbytes for shard in x.addressable_shards)
  findings.append(
    f"All devices together store {rules.size_text(total)} for an array of "
    f"{rules.size_text(x.nbytes)}."
  )
  return Shown(findings, [_drawn(x)])


def _unnamed(x) -> list[str]:
  """Returns the axes of the mesh along which nothing is cut."""
  named = spec_axes(x.sharding.spec)
  return [a for a, size in x.sharding.mesh.shape.items() if size > 1 and a not in named]


def two_axes_on_one_dim(specs=((("data", "tensor"), None), (("tensor", "data"), None))):
  """Shards the rows along both axes at once, in one order of the axes and in the other.

  The axis that is named first splits first, into the larger parts.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  mesh = mesh_of(data=4, tensor=2)
  return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for spec in specs]


def _two_axes_on_one_dim(arrays) -> Shown:
  findings = [f"{scene.spec(x)}: {scene.blocks(x)}." for x in arrays]
  first, second = (
    {device: place for place, ids in blocks(x.shape, x.sharding).items() for device in ids}
    for x in arrays
  )
  moved = sorted(device for device in first if first[device] != second[device])
  if moved:
    device = moved[0]
    findings.append(
      f"The order matters: {len(moved)} of {len(first)} devices hold different blocks. Device "
      f"{device} has rows {scene.span(first[device][0])} under the first spec and rows "
      f"{scene.span(second[device][0])} under the second."
    )
  else:
    findings.append("Every device holds the same block under both.")
  return Shown(findings, [_drawn(x) for x in arrays])


def _drawn(x):
  title = f"{scene.spec(x)} on {scene.mesh_text(x)}"
  return picture(x.shape, x.sharding, title=title, dims=DIMS)


SCENES = (
  Scene("Four ways to shard it", four_cuts, _four_cuts),
  Scene("Replicas", copies, _copies),
  Scene("Two axes on one dim", two_axes_on_one_dim, _two_axes_on_one_dim),
)
