"""Each collective, written explicitly: what each device holds before and after."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.tour.scene import Scene, close, draw_held, held, mesh_of, same, say, sent_text

TITLE = "Collectives"
OPENING = """
In a collective several devices take part: each sends something and receives something. Compilers
and papers use these names, and the application prints them. Inside `jax.shard_map` a function
sees the block of one device and names the mesh axis along which it communicates.

Each function below runs on four devices along the axis `data`, at once, on one row of x each:
device d begins with the numbers 10 d, 10 d + 1 and so on. NumPy computes the same on the full
array.

JAX runs the same program on every device. Broadcast, scatter, reduce and gather, in which one
device (the root) is special, are therefore built from the others: all devices take part, and all
but the root contribute zeros or discard the result.
"""
COUNT = 4


def numbered(count, width):
  """Returns float32 [count, width]; row d holds 10 d, 10 d + 1, ..."""
  return (10 * np.arange(count)[:, None] + np.arange(width)[None, :]).astype(np.float32)


def exchange(function, x):
  """Gives each device one row of x, and runs the function on every device's row at once."""
  mesh = mesh_of(data=len(x))
  rows = jax.device_put(x, NamedSharding(mesh, P("data")))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  compiled = jax.jit(mapped).lower(rows).compile()
  return mesh, compiled, rows, compiled(rows)


def broadcast(row):
  """All devices get the root's numbers. As an all-reduce to which all others contribute zeros."""
  root = jax.lax.axis_index("data") == 0
  return jax.lax.psum(jnp.where(root, row, 0.0), "data")


def scatter(row):
  """Each device gets one of the root's numbers. As a reduce-scatter with zeros from the others."""
  root = jax.lax.axis_index("data") == 0
  row = jnp.where(root, row, 0.0)
  return jax.lax.psum_scatter(row, "data", scatter_dimension=1, tiled=True)


def reduce(row):
  """The root gets the sum of all. As an all-reduce whose result only the root keeps."""
  root = jax.lax.axis_index("data") == 0
  return jnp.where(root, jax.lax.psum(row, "data"), 0.0)


def all_reduce(row):
  """Every device gets the sum: this is how data parallelism sums gradients."""
  return jax.lax.psum(row, "data")


def gather(row):
  """The root gets the numbers of all. As an all-gather whose result only the root keeps."""
  root = jax.lax.axis_index("data") == 0
  return jnp.where(root, jax.lax.all_gather(row, "data", axis=1, tiled=True), 0.0)


def all_gather(row):
  """Every device gets the numbers of all: this is how FSDP gathers the kernels of a layer."""
  return jax.lax.all_gather(row, "data", axis=1, tiled=True)


def reduce_scatter(row):
  """Device d gets the sum of all numbers d: an all-reduce of which each device keeps one part."""
  return jax.lax.psum_scatter(row, "data", scatter_dimension=1, tiled=True)


def all_to_all(row):
  """Device d gets number d of every device: rows become columns."""
  return jax.lax.all_to_all(row, "data", split_axis=1, concat_axis=1, tiled=True)


def permute(row):
  """Each device sends its numbers to the next, the last one to the first: a ring."""
  count = jax.lax.axis_size("data")
  return jax.lax.ppermute(row, "data", [(d, (d + 1) % count) for d in range(count)])


def normalise(row):
  """Divides all numbers by the sum of all, which is a psum over the named axis."""
  return row / jax.lax.psum(jnp.sum(row), "data")


def along_one_axis():
  """Sums along one axis of two: eight devices, four along `data` by two along `tensor`.

  Devices that differ only in `tensor` form a group, and each group computes its own sum. Each
  device begins with one number.
  """
  mesh, both = mesh_of(data=4, tensor=2), P("data", "tensor")
  x = numbered(4, 2)
  numbers = jax.device_put(x, NamedSharding(mesh, both))
  add = lambda number: jax.lax.psum(number, "tensor")  # noqa: E731
  mapped = jax.shard_map(add, mesh=mesh, in_specs=both, out_specs=both)
  compiled = jax.jit(mapped).lower(numbers).compile()
  _tell(mesh, compiled, numbers, compiled(numbers), np.tile(x.sum(axis=1, keepdims=True), 2))


def _tell(mesh, compiled, before, after, right: np.ndarray) -> None:
  """Draws and says what a collective did: arrays before and after, and what NumPy computes."""
  places = 0 if np.array_equal(right, np.round(right)) else 3
  draw_held("before", mesh, held(before))
  draw_held("after", mesh, held(after, places))
  say(f"Sent: {sent_text(compiled, mesh)}.")
  compared = (close if places else same)(after, right)
  say(f"What the devices hold after it and what NumPy computes are {compared}.")
  say(f"On {mesh.size} devices: before, {_distinct(before)}; after, {_distinct(after)}.")


def _distinct(x: jax.Array) -> str:
  """Returns how many numbers a device holds, and how many devices differ in them."""
  count, size = len(set(held(x, 6).values())), x.addressable_shards[0].data.size
  what = "the same everywhere" if count == 1 else f"{count} different"
  return f"{size} number{'s' * (size > 1)} a device, {what}"


def _only_root(row: np.ndarray) -> np.ndarray:
  """Returns what the devices hold where the root has a row, and the others zeros."""
  return np.stack([row, *[np.zeros_like(row)] * (COUNT - 1)])


def _scene(
  title: str, function: Callable, width: int, right: Callable, parts: tuple[Callable, ...] = ()
) -> Scene:
  """Returns the scene of a collective of `width` numbers a device, and the same by NumPy."""
  x = numbered(COUNT, width)
  return Scene(title, function, parts, run=lambda: _tell(*exchange(function, x), right(x)))


SCENES = (
  _scene(
    "Broadcast", broadcast, 2, lambda x: np.tile(x[0], (COUNT, 1)), parts=(numbered, exchange)
  ),
  _scene("Scatter", scatter, COUNT, lambda x: x[0][:, None]),
  _scene("Reduce", reduce, 2, lambda x: _only_root(x.sum(axis=0))),
  _scene("All-reduce", all_reduce, 2, lambda x: np.tile(x.sum(axis=0), (COUNT, 1))),
  _scene("Gather", gather, 2, lambda x: _only_root(x.reshape(-1))),
  _scene("All-gather", all_gather, 2, lambda x: np.tile(x.reshape(-1), (COUNT, 1))),
  _scene("Reduce-scatter", reduce_scatter, COUNT, lambda x: x.sum(axis=0)[:, None]),
  _scene("All-to-all", all_to_all, COUNT, lambda x: x.T),
  _scene("Permute", permute, 2, lambda x: np.roll(x, 1, axis=0)),
  _scene("Normalising by a sum", normalise, 2, lambda x: x / x.sum()),
  Scene("Along one axis of two", along_one_axis),
)
