"""From one example to a batch, and from a batch to many devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.drawings import picture
from reports.tour import scene
from reports.tour.scene import Scene, Shown, mesh_of

TITLE = "From vmap to a mesh"
OPENING = """
A function is easiest to write for one example. `jax.vmap` makes it a function of a batch, without
a loop. What is left is to shard the batch: the same function then runs on all devices.
"""


def smooth(signal, window):
  """Convolves one signal with a window: each number becomes a weighted sum of its neighbours."""
  return jnp.convolve(signal, window, mode="same")


def batch_by_vmap(batch=16, length=24):
  """Writes the convolution for one signal, and maps it over a batch of them on one device."""
  signals = np.random.default_rng(0).standard_normal((batch, length), np.float32)
  window = np.array([0.25, 0.5, 0.25], np.float32)
  return signals, window, jax.vmap(smooth, in_axes=(0, None))(signals, window)


def _batch_by_vmap(result) -> Shown:
  signals, window, smoothed = result
  right = np.stack([np.convolve(signal, window, mode="same") for signal in signals])
  ids = sorted(device.id for device in smoothed.devices())
  return Shown(
    [
      f"{smoothed.shape[0]} signals of {smoothed.shape[1]} numbers in one call, on device "
      f"{' and '.join(map(str, ids))}.",
      f"The result and that of a loop over np.convolve are {scene.close(smoothed, right)}.",
    ]
  )


def batch_over_devices(spec=("data", None)):
  """Shards the batch and calls the same function. Nothing else changes."""
  mesh = mesh_of(data=8)
  signals = np.random.default_rng(0).standard_normal((16, 24), np.float32)
  window = np.array([0.25, 0.5, 0.25], np.float32)
  placed = jax.device_put(signals, NamedSharding(mesh, P(*spec)))
  compiled = jax.jit(jax.vmap(smooth, in_axes=(0, None))).lower(placed, window).compile()
  return mesh, compiled, placed, compiled(placed, window), batch_by_vmap()[2]


def _batch_over_devices(result) -> Shown:
  mesh, compiled, placed, smoothed, on_one = result
  held = placed.sharding.shard_shape(placed.shape)
  whole = held[1] == placed.shape[1]
  if whole:
    reason = f"Each device has {held[0]} complete signals and needs no other device."
  else:
    reason = (
      f"Each device has {held[1]} numbers of each signal, and their neighbours are on other "
      "devices."
    )
  return Shown(
    [
      f"The batch is sharded as {scene.spec(placed)}: {scene.blocks(placed)}. The result is "
      f"sharded as {scene.spec(smoothed)}.",
      scene.communication(compiled, mesh),
      reason,
      f"The result and that of one device are {scene.close(smoothed, on_one)}.",
    ],
    [picture(placed.shape, placed.sharding, title="the batch", dims=("signal", "time"))],
  )


def batch_by_shard_map(axis="data"):
  """Writes the same with `jax.shard_map`: the function then sees the block of one device.

  This is the way to write collectives explicitly. The next chapter does.
  """
  mesh = mesh_of(data=8)
  signals = np.random.default_rng(0).standard_normal((16, 24), np.float32)
  window = np.array([0.25, 0.5, 0.25], np.float32)
  seen = []

  def on_one_device(signals, window):
    seen.append(signals.shape)
    return jax.vmap(smooth, in_axes=(0, None))(signals, window)

  mapped = jax.shard_map(
    on_one_device, mesh=mesh, in_specs=(P(axis, None), P(None)), out_specs=P(axis, None)
  )
  compiled = jax.jit(mapped).lower(signals, window).compile()
  return mesh, compiled, seen[-1], compiled(signals, window), batch_by_vmap()[2]


def _batch_by_shard_map(result) -> Shown:
  mesh, compiled, seen, smoothed, on_one = result
  return Shown(
    [
      f"The function was traced for {list(seen)}, the block of one device; the full shape is "
      f"{list(smoothed.shape)}.",
      scene.communication(compiled, mesh),
      f"The result and that of one device are {scene.close(smoothed, on_one)}.",
    ]
  )


SCENES = (
  Scene("A batch by vmap", batch_by_vmap, _batch_by_vmap, parts=(smooth,)),
  Scene("The same over devices", batch_over_devices, _batch_over_devices),
  Scene("The same by shard_map", batch_by_shard_map, _batch_by_shard_map),
)
