"""The devices of a run: their kinds and their memory."""

from collections.abc import Iterator

import humanize
import jax

from analysis.chips import Chip, known
from diagnosis.finding import Finding, ok, warning, wrong
from runtime.devices import Devices

# Shares of the memory on the data sheet. JAX takes 0.75 of a GPU's by default.
LOW, BROKEN = 0.7, 0.4


def check(devices: Devices) -> Iterator[Finding]:
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
      "add the chip to analysis/chips.py",
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
  if share < BROKEN:
    yield wrong(text, fix)
  else:
    yield warning(text, fix) if share < LOW else ok(text)
