"""From one example to a batch, and from a batch to many devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.tour.scene import Scene, blocks, close, draw, mesh_of, say, sent_text, spec

TITLE = "From vmap to a mesh"
OPENING = """
A function is easiest to write for one example. `jax.vmap` makes it a function of a batch, without
a loop. What is left is to shard the batch: the same function then runs on all devices.
"""

SIGNALS = np.random.default_rng(0).standard_normal((16, 24), np.float32)
WINDOW = np.array([0.25, 0.5, 0.25], np.float32)


def smooth(signal, window):
  """Convolves one signal with a window: each number becomes a weighted sum of its neighbours."""
  return jnp.convolve(signal, window, mode="same")


def batch_by_vmap():
  """Writes the convolution for one signal, and maps it over a batch of them on one device."""
  smoothed = jax.vmap(smooth, in_axes=(0, None))(SIGNALS, WINDOW)
  by_loop = np.stack([np.convolve(signal, WINDOW, mode="same") for signal in SIGNALS])
  say(f"{len(smoothed)} signals of {smoothed.shape[1]} numbers in one call.")
  say(f"The result and that of a loop over np.convolve are {close(smoothed, by_loop)}.")


def batch_over_devices():
  """Shards the batch and calls the same function. Nothing else changes.

  Each device has complete signals and needs no other device.
  """
  mesh = mesh_of(data=8)
  placed = jax.device_put(SIGNALS, NamedSharding(mesh, P("data", None)))
  compiled = jax.jit(jax.vmap(smooth, in_axes=(0, None))).lower(placed, WINDOW).compile()
  smoothed = compiled(placed, WINDOW)
  draw(placed, "the batch", ("signal", "time"))
  say(
    f"The batch is sharded as {spec(placed)}: {blocks(placed)}. The result is sharded as "
    f"{spec(smoothed)}. Sent: {sent_text(compiled, mesh)}."
  )
  on_one = jax.vmap(smooth, in_axes=(0, None))(SIGNALS, WINDOW)
  say(f"The result and that of one device are {close(smoothed, on_one)}.")


def batch_by_shard_map():
  """Writes the same with `jax.shard_map`: the function then sees the block of one device.

  This is the way to write collectives explicitly. The next chapter does.
  """
  mesh = mesh_of(data=8)

  def on_one_device(signals, window):
    say(f"The function was traced for {list(signals.shape)}, the block of one device.")
    return jax.vmap(smooth, in_axes=(0, None))(signals, window)

  mapped = jax.shard_map(
    on_one_device, mesh=mesh, in_specs=(P("data", None), P(None)), out_specs=P("data", None)
  )
  compiled = jax.jit(mapped).lower(SIGNALS, WINDOW).compile()
  smoothed = compiled(SIGNALS, WINDOW)
  say(f"The result has shape {list(smoothed.shape)}. Sent: {sent_text(compiled, mesh)}.")
  on_one = jax.vmap(smooth, in_axes=(0, None))(SIGNALS, WINDOW)
  say(f"It and the result of one device are {close(smoothed, on_one)}.")


SCENES = (
  Scene("A batch by vmap", batch_by_vmap, parts=(smooth,)),
  Scene("The same over devices", batch_over_devices),
  Scene("The same by shard_map", batch_by_shard_map),
)
