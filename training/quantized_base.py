"""Frozen kernels of other runs and of model folders, quantized while they are read.

A process quantizes the shards of its devices on the host, layer by layer, so that neither has more
than one kernel of the model in its own dtype, and the codes are the same bits on every accelerator.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from models.quantized import CODES, Format
from models.spec import QUANTIZED_PARTS
from partitioning.rules import partition_spec, spec_entries

Bounds = tuple[tuple[int, int], ...]  # first, and behind the last, of each dim
_WANTED = Mapping[str, jax.ShapeDtypeStruct]


def split_parts(wanted: _WANTED) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
  """Returns the arrays that are no part of a quantized kernel; kernel -> its parts by name."""
  others, kernels = {}, {}
  for name, leaf in wanted.items():
    layer, _, part = name.rpartition("/")
    if part in QUANTIZED_PARTS:
      kernels.setdefault(f"{layer}/kernel", {})[part] = leaf
    else:
      others[name] = leaf
  return others, kernels


def whole_kernel(kind: Format, parts: _WANTED, dtype: np.dtype) -> jax.ShapeDtypeStruct:
  """Returns the kernel of these parts, unquantized, sharded as they are."""
  shape, sharding = kind.shape_of(parts), parts[CODES].sharding
  spec = kind.moved(spec_entries(sharding.spec, len(shape)))
  placed = NamedSharding(sharding.mesh, partition_spec(spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)


def quantize(
  kind: Format, kernel: str, parts: _WANTED, shard: Callable[[Bounds], np.ndarray]
) -> dict[str, jax.Array]:
  """Returns name -> array of a kernel's parts, placed.

  Args:
    kind: how it is stored.
    kernel: its name.
    parts: name in the layer -> shape and sharding.
    shard: returns a part of the kernel: of one layer, and of the other dims a device's.
  """
  whole, layer = whole_kernel(kind, parts, np.dtype(np.float32)), kernel.removesuffix("kernel")
  placed: dict[str, list] = {part: [] for part in parts}
  for index, devices in addressable(whole.sharding, whole.shape):
    each = [
      kind.encoded(shard(((number, number + 1), *index[1:])), np) for number in range(*index[0])
    ]
    for part in parts:
      one = np.concatenate([arrays[part] for arrays in each])
      placed[part] += [jax.block_until_ready(jax.device_put(one, device)) for device in devices]
  return {
    layer + part: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed[part])
    for part, leaf in parts.items()
  }


def addressable(
  sharding: NamedSharding, shape: tuple[int, ...]
) -> Iterator[tuple[Bounds, list[jax.Device]]]:
  """Yields the bounds of each shard of this process's devices, and the devices that have it."""
  found: dict[Bounds, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
    found.setdefault(bounds, []).append(device)
  yield from found.items()


def of_array(kernel: jax.Array) -> Callable[[Bounds], np.ndarray]:
  """Returns `shard` of `quantize`, of a placed kernel."""
  shards = {}
  for one in kernel.addressable_shards:
    pairs = zip(one.index, kernel.shape, strict=True)
    shards.setdefault(tuple(part.indices(size)[:2] for part, size in pairs), one.data)

  def shard(index: Bounds) -> np.ndarray:
    layer, _ = index[0]
    for bounds, data in shards.items():
      if bounds[1:] == index[1:] and bounds[0][0] <= layer < bounds[0][1]:
        return np.asarray(data[layer - bounds[0][0]])[None]
    raise AssertionError(index)

  return shard


def decoded(spec: Any, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns parameters by name, with quantized kernels decoded to float32 arrays."""
  others, kernels = split_parts(arrays)
  for kernel, parts in kernels.items():
    kind = spec.format_of(kernel)
    whole = whole_kernel(kind, parts, np.dtype(np.float32))
    others[kernel] = jax.jit(kind.decoded, out_shardings=whole.sharding)(parts)
  return others
