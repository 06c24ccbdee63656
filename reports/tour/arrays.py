"""One array over eight devices, in several ways."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.drawings import blocks as places
from reports.tour.scene import Scene, blocks, draw, held_text, mesh_of, mesh_text, same, say, spec

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
  for data in (8, 4, 2, 1):
    mesh = mesh_of(data=data, tensor=8 // data)
    y = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    draw(y)
    say(f"{mesh_text(y)}: {blocks(y)} ({held_text(y)}). Reassembled, y and x are {same(y, x)}.")


def copies():
  """Names one axis only: rows along `data`. Nothing is sharded along `tensor`.

  Devices that differ only along `tensor` hold the same block.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  y = jax.device_put(x, NamedSharding(mesh_of(data=4, tensor=2), P("data", None)))
  draw(y)
  stored = sum(shard.data.nbytes for shard in y.addressable_shards)
  say(f"{mesh_text(y)}: {blocks(y)}.")
  say(f"All devices together store {stored} Bytes for an array of {y.nbytes} Bytes.")


def two_axes_on_one_dim():
  """Shards the rows along both axes at once, in one order of the axes and in the other.

  The axis that is named first splits first, into the larger parts. So the order matters.
  """
  x = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
  mesh = mesh_of(data=4, tensor=2)
  for axes in (("data", "tensor"), ("tensor", "data")):
    y = jax.device_put(x, NamedSharding(mesh, P(axes, None)))
    draw(y)
    [rows] = [rows for (rows, _), ids in places(y.shape, y.sharding).items() if 1 in ids]
    say(f"{spec(y)}: {blocks(y)}. Device 1 has rows {rows[0]} to {rows[1] - 1}.")


SCENES = (
  Scene("Four ways to shard it", four_cuts),
  Scene("Replicas", copies),
  Scene("Two axes on one dim", two_axes_on_one_dim),
)
