"""The devices of a run: their kinds, their memory, and collectives along each mesh axis.

Of collectives, whether they are right, and their speed beside data sheets.
"""

import functools
import time
from collections.abc import Iterator

import humanize
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from commands.machine import Finding, by_share, ok, warning, wrong
from planning import aot, interconnect, topology
from runtime.chips import Chip, Rates, known
from runtime.devices import Devices

# ------------------------------ kinds and memory ------------------------------

# Shares of the memory on the data sheet. JAX takes 0.75 of a GPU's by default.
LOW_MEMORY, BROKEN_DEVICE = 0.7, 0.4


def check_devices(devices: Devices) -> Iterator[Finding]:
  """Yields what is found about this process' devices."""
  local = jax.local_devices()
  kinds = sorted({device.device_kind for device in jax.devices()})
  if devices.simulated:
    yield ok(f"{jax.device_count()} simulated CPU devices")
    return
  if len(kinds) > 1:
    yield wrong(
      f"devices of several kinds: {', '.join(kinds)}",
      "use devices of one kind (CUDA_VISIBLE_DEVICES, or one type of machine)",
    )
  yield ok(f"{jax.device_count()} x {kinds[0]}, {len(local)} of this process")
  if known(local[0]) is None:
    yield warning(
      f"no data sheet of {local[0].device_kind!r} is known: no MFU, and no plan without --topology",
      "add the chip to runtime/chips.py",
    )
  for device in local:
    stats = device.memory_stats() or {}
    yield from memory(device.id, stats.get("bytes_limit"), known(device))


def memory(number: int, limit: int | None, chip: Chip | None) -> Iterator[Finding]:
  """Yields whether a device has the memory that its data sheet says.

  Args:
    number: of the device.
    limit: bytes that JAX may use; None: unknown.
    chip: of the device; None: unknown.
  """
  if limit is None:
    return
  text = f"device {number}: {humanize.naturalsize(limit, binary=True)} of memory for JAX"
  if chip is None or not chip.hbm_bytes:
    yield ok(text)
    return
  share = limit / chip.hbm_bytes
  text = f"{text}, {share:.0%} of {humanize.naturalsize(chip.hbm_bytes, binary=True)}"
  fix = (
    "end other programs on the device (nvidia-smi shows them), and look at "
    "XLA_PYTHON_CLIENT_MEM_FRACTION"
  )
  yield by_share(text, share, LOW_MEMORY, BROKEN_DEVICE, fix)


# ------------------------------ collectives along each mesh axis ------------------------------

# Bytes of an all-gather's result: enough for bandwidth to decide, on simulated devices little.
BYTES, SIMULATED_BYTES = 2**28, 2**22
_RUNS = 5
# Shares of the data sheet's bandwidth. Plans assume 0.8.
LOW_INTERCONNECT, BROKEN_INTERCONNECT = 0.5, 0.25


def check_interconnect(mesh: Mesh, *, simulated: bool) -> Iterator[Finding]:
  """Yields a finding for each axis larger than 1; all processes call it, each for its devices.

  Args:
    mesh: over all devices.
    simulated: they are simulated CPU devices, for which there is no data sheet.
  """
  axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
  if not axes:
    yield ok("one device: there are no collectives")
  for axis in axes:
    count, size = mesh.shape[axis], SIMULATED_BYTES if simulated else BYTES
    seconds, right = measure(mesh, axis, size)
    received = size * (count - 1) / count / seconds  # by each device
    text = f"all-gather over {axis} ({count} devices): {received / 1e9:.2f} GB/s per device"
    if not right:
      yield wrong(
        f"{text}; the result is wrong", "a device or a link is broken: replace the machine"
      )
    else:
      yield judged(text, received, None if simulated else expected(mesh, axis))


def judged(text: str, bandwidth: float, of_sheet: tuple[float, str] | None) -> Finding:
  """Returns the finding about a bandwidth, beside that of the data sheet where it is known.

  Args:
    text: what was measured.
    bandwidth: in bytes per second.
    of_sheet: bytes per second, and the network.
  """
  if of_sheet is None:
    return ok(text)
  sheet, network = of_sheet
  share = bandwidth / sheet
  text = f"{text}, {share:.0%} of {network}'s {sheet / 1e9:.0f} GB/s"
  fix = (
    "look for a link that is down (nvidia-smi nvlink -s; NCCL_DEBUG=INFO shows the transport), "
    "for other jobs on these machines, and for an order of devices that does not follow the links"
  )
  return by_share(text, share, LOW_INTERCONNECT, BROKEN_INTERCONNECT, fix)


def measure(mesh: Mesh, axis: str, size: int) -> tuple[float, bool]:
  """Returns the seconds of an all-gather along an axis, the fastest, and whether it was right.

  Args:
    mesh: over all devices.
    axis: along which; the groups along it run at the same time.
    size: bytes of the result on each device.
  """
  count = mesh.shape[axis]
  shape = (count, size // 4 // count)
  split = NamedSharding(mesh, PartitionSpec(axis))
  whole = NamedSharding(mesh, PartitionSpec())

  def part(index: tuple[slice, ...]) -> np.ndarray:
    rows = np.arange(count, dtype=np.float32)[index[0]]
    return np.broadcast_to(rows[:, None], (len(rows), shape[1])) + 1

  array = jax.make_array_from_callback(shape, split, part)
  gather = jax.jit(functools.partial(jax.lax.with_sharding_constraint, shardings=whole))
  result = jax.block_until_ready(gather(array))
  times = []
  for _ in range(_RUNS):
    began = time.perf_counter()
    jax.block_until_ready(gather(array))
    times.append(time.perf_counter() - began)
  rows = np.arange(1, count + 1, dtype=np.float32)[:, None]
  right = all((np.asarray(shard.data) == rows).all() for shard in result.addressable_shards)
  return min(times), right


def expected(mesh: Mesh, axis: str) -> tuple[float, str] | None:
  """Returns the bytes per second of a device along an axis by the data sheet, and the network.

  None: no constants are known for these devices.
  """
  flat = list(mesh.devices.flat)
  if known(flat[0]) is None:
    return None
  there = topology.parse(topology.of_devices(flat))
  places = aot.places(mesh, there)
  numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
  groups = np.moveaxis(numbers, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
  wire = min(map(places.wire, groups), key=lambda wire: wire.bandwidth)
  seconds = interconnect.seconds("all-gather", BYTES, wire, Rates(link=1.0))
  return BYTES / seconds, wire.network
