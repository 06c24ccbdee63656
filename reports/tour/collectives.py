"""Each collective, written explicitly: what each device holds before and after."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reports.drawings import holdings
from reports.tour import scene
from reports.tour.scene import Scene, Shown, mesh_of

TITLE = "Collectives"
OPENING = """
In a collective several devices take part: each sends something and receives something. Compilers
and papers use these names, and the application prints them. Inside `jax.shard_map` a function
sees the block of one device and names the mesh axis along which it communicates.

Most scenes use four devices along the axis `data`. Device d begins with the numbers 10 d, 10 d +
1 and so on, one row of x. In each scene NumPy computes the same on the full array.

JAX runs the same program on every device. Broadcast, scatter, reduce and gather, in which one
device (the root) is special, are therefore built from the others: all devices take part, and all
but the root contribute zeros or discard the result.
"""


@dataclasses.dataclass(frozen=True)
class Exchange:
  """What a collective did: the arrays before and after, and the program."""

  mesh: Mesh
  before: jax.Array
  after: jax.Array
  compiled: jax.stages.Compiled


def numbered(count, width):
  """Returns float32 [count, width]; row d holds 10 d, 10 d + 1, ..."""
  return (10 * np.arange(count)[:, None] + np.arange(width)[None, :]).astype(np.float32)


def exchange(function, x):
  """Gives each device one row of x, and runs the function on every device's row at once."""
  mesh = mesh_of(data=len(x))
  rows = jax.device_put(x, NamedSharding(mesh, P("data")))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  compiled = jax.jit(mapped).lower(rows).compile()
  return Exchange(mesh, rows, compiled(rows), compiled)


def broadcast(count=4):
  """All devices get the root's numbers. As an all-reduce to which all others contribute zeros."""

  def send(row):
    root = jax.lax.axis_index("data") == 0
    return jax.lax.psum(jnp.where(root, row, 0.0), "data")

  x = numbered(count, 2)
  return exchange(send, x), np.tile(x[0], (count, 1))


def scatter(count=4):
  """Each device gets one of the root's numbers. As a reduce-scatter with zeros from the others."""

  def send(row):
    root = jax.lax.axis_index("data") == 0
    row = jnp.where(root, row, 0.0)
    return jax.lax.psum_scatter(row, "data", scatter_dimension=1, tiled=True)

  x = numbered(count, count)
  return exchange(send, x), x[0][:, None]


def reduce(count=4):
  """The root gets the sum of all. As an all-reduce whose result only the root keeps."""

  def add(row):
    root = jax.lax.axis_index("data") == 0
    return jnp.where(root, jax.lax.psum(row, "data"), 0.0)

  x = numbered(count, 2)
  right = np.zeros_like(x)
  right[0] = x.sum(axis=0)
  return exchange(add, x), right


def all_reduce(count=4):
  """Every device gets the sum: this is how data parallelism sums gradients."""

  def add(row):
    return jax.lax.psum(row, "data")

  x = numbered(count, 2)
  return exchange(add, x), np.tile(x.sum(axis=0), (count, 1))


def gather(count=4):
  """The root gets the numbers of all. As an all-gather whose result only the root keeps."""

  def collect(row):
    root = jax.lax.axis_index("data") == 0
    return jnp.where(root, jax.lax.all_gather(row, "data", axis=1, tiled=True), 0.0)

  x = numbered(count, 2)
  right = np.zeros((count, x.size), np.float32)
  right[0] = x.reshape(-1)
  return exchange(collect, x), right


def all_gather(count=4):
  """Every device gets the numbers of all: this is how FSDP gathers the kernels of a layer."""

  def collect(row):
    return jax.lax.all_gather(row, "data", axis=1, tiled=True)

  x = numbered(count, 2)
  return exchange(collect, x), np.tile(x.reshape(-1), (count, 1))


def reduce_scatter(count=4):
  """Device d gets the sum of all numbers d: an all-reduce of which each device keeps one part."""

  def add(row):
    return jax.lax.psum_scatter(row, "data", scatter_dimension=1, tiled=True)

  x = numbered(count, count)
  return exchange(add, x), x.sum(axis=0)[:, None]


def all_to_all(count=4):
  """Device d gets number d of every device: rows become columns."""

  def swap(row):
    return jax.lax.all_to_all(row, "data", split_axis=1, concat_axis=1, tiled=True)

  x = numbered(count, count)
  return exchange(swap, x), x.T


def permute(count=4):
  """Each device sends its numbers to the next, the last one to the first: a ring."""

  def hand_on(row):
    ring = [(device, (device + 1) % count) for device in range(count)]
    return jax.lax.ppermute(row, "data", ring)

  x = numbered(count, 2)
  return exchange(hand_on, x), np.roll(x, 1, axis=0)


def normalise(count=4):
  """Divides all numbers by the sum of all, which is a psum over the named axis."""

  def divide(row):
    return row / jax.lax.psum(jnp.sum(row), "data")

  x = numbered(count, 2)
  return exchange(divide, x), x / x.sum()


def along_one_axis(axes=("tensor",)):
  """Sums along one axis of two: eight devices, four along `data` by two along `tensor`.

  Devices that differ only in `tensor` form a group, and each group computes its own sum. Each
  device begins with one number.
  """

  def add(number):
    return jax.lax.psum(number, axes)

  mesh = mesh_of(data=4, tensor=2)
  both = P("data", "tensor")
  x = numbered(4, 2)
  numbers = jax.device_put(x, NamedSharding(mesh, both))
  mapped = jax.shard_map(add, mesh=mesh, in_specs=both, out_specs=both)
  compiled = jax.jit(mapped).lower(numbers).compile()
  dims = tuple(("data", "tensor").index(axis) for axis in axes)
  right = np.broadcast_to(x.sum(axis=dims, keepdims=True), x.shape)
  return Exchange(mesh, numbers, compiled(numbers), compiled), right


def _exchange(result) -> Shown:
  moved, right = result
  places = 0 if np.array_equal(np.asarray(moved.after), np.round(moved.after)) else 3
  compared = scene.close if places else scene.same
  findings = [
    scene.communication(moved.compiled, moved.mesh),
    f"What the devices hold after it and what NumPy computes are {compared(moved.after, right)}.",
    _distinct(moved),
  ]
  drawn = (("before", moved.before, 0), ("after", moved.after, places))
  pictures = [holdings(title, moved.mesh, scene.held(x, p)) for title, x, p in drawn]
  return Shown(findings, pictures)


def _distinct(moved: Exchange) -> str:
  """Returns how many different things the devices hold, and how many numbers each."""
  texts = []
  for when, x in (("before", moved.before), ("after", moved.after)):
    count = len(set(scene.held(x, 6).values()))
    size = x.sharding.shard_shape(x.shape)
    numbers = int(np.prod(size))
    what = "the same everywhere" if count == 1 else f"{count} different"
    texts.append(f"{when}, {numbers} number{'s' * (numbers > 1)} a device, {what}")
  devices = f"{moved.mesh.size} device{'s' * (moved.mesh.size > 1)}"
  return f"On {devices}: {'; '.join(texts)}."


SCENES = (
  Scene("Broadcast", broadcast, _exchange, parts=(numbered, exchange)),
  Scene("Scatter", scatter, _exchange),
  Scene("Reduce", reduce, _exchange),
  Scene("All-reduce", all_reduce, _exchange),
  Scene("Gather", gather, _exchange),
  Scene("All-gather", all_gather, _exchange),
  Scene("Reduce-scatter", reduce_scatter, _exchange),
  Scene("All-to-all", all_to_all, _exchange),
  Scene("Permute", permute, _exchange),
  Scene("Normalising by a sum", normalise, _exchange),
  Scene("Along one axis of two", along_one_axis, _exchange),
)
