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


def batch_by_vmap():
  """Writes the convolution for one signal, and maps it over a batch of them on one device."""
  signals = np.random.default_rng(0).standard_normal((16, 24), np.float32)
  window = np.array([0.25, 0.5, 0.25], np.float32)
  return signals, window, jax.vmap(smooth, in_axes=(0, None))(signals, window)


def _batch_by_vmap(result) -> Shown:
  signals, window, smoothed = result
  right = np.stack([np.convolve(signal, window, mode="same") for signal in signals])
  [device] = smoothed.devices()
  findings = [
    f"{smoothed.shape[0]} signals of {smoothed.shape[1]} numbers in one call, on device "
    f"{device.id}.",
    f"The result and that of a loop over np.convolve are {scene.close(smoothed, right)}.",
  ]
  return Shown(findings)


def batch_over_devices():
  """Shards the batch and calls the same function. Nothing else changes."""
  mesh, (signals, window, on_one) = mesh_of(data=8), batch_by_vmap()
  placed = jax.device_put(signals, NamedSharding(mesh, P("data", None)))
  compiled = jax.jit(jax.vmap(smooth, in_axes=(0, None))).lower(placed, window).compile()
  return mesh, compiled, placed, compiled(placed, window), on_one


def _batch_over_devices(result) -> Shown:
  mesh, compiled, placed, smoothed, on_one = result
  findings = [
    f"The batch is sharded as {scene.spec(placed)}: {scene.blocks(placed)}. The result is sharded "
    f"as {scene.spec(smoothed)}.",
    scene.communication(compiled, mesh),
    f"Each device has {scene.shard(placed)[0]} complete signals and needs no other device.",
    f"The result and that of one device are {scene.close(smoothed, on_one)}.",
  ]
  drawn = picture(placed.shape, placed.sharding, title="the batch", dims=("signal", "time"))
  return Shown(findings, [drawn])


def batch_by_shard_map():
  """Writes the same with `jax.shard_map`: the function then sees the block of one device.

  This is the way to write collectives explicitly. The next chapter does.
  """
  mesh, (signals, window, on_one) = mesh_of(data=8), batch_by_vmap()
  seen = []

  def on_one_device(signals, window):
    seen.append(signals.shape)
    return jax.vmap(smooth, in_axes=(0, None))(signals, window)

  mapped = jax.shard_map(
    on_one_device, mesh=mesh, in_specs=(P("data", None), P(None)), out_specs=P("data", None)
  )
  compiled = jax.jit(mapped).lower(signals, window).compile()
  return mesh, compiled, seen[-1], compiled(signals, window), on_one


def _batch_by_shard_map(result) -> Shown:
  mesh, compiled, seen, smoothed, on_one = result
  findings = [
    f"The function was traced for {list(seen)}, the block of one device; the full shape is "
    f"{list(smoothed.shape)}.",
    scene.communication(compiled, mesh),
    f"The result and that of one device are {scene.close(smoothed, on_one)}.",
  ]
  return Shown(findings)


SCENES = (
  Scene("A batch by vmap", batch_by_vmap, _batch_by_vmap, parts=(smooth,)),
  Scene("The same over devices", batch_over_devices, _batch_over_devices),
  Scene("The same by shard_map", batch_by_shard_map, _batch_by_shard_map),
)
