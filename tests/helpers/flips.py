"""Bits of an array that differ on one device, as a fault of its memory would leave them."""

import jax
import numpy as np


def altered(array: jax.Array, device: int, *bits: tuple[int, int]) -> jax.Array:
  """Returns the array with each (byte, bit) flipped in the copy of one device, by its id."""
  shards = []
  for shard in array.addressable_shards:
    data = np.array(shard.data)
    if shard.device.id == device:
      for byte, bit in bits:
        data.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)
    shards.append(jax.device_put(data, shard.device))
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
