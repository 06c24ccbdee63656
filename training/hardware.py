"""Peak speeds by device kind, for MFU. Sources: the vendors' data sheets, without sparsity."""

import jax

# Prefix of `device_kind`, lower case -> bfloat16 TFLOP/s per JAX device. The longest match counts.
PEAK_BFLOAT16_TFLOPS = {
  "tpu v4": 275.0,
  "tpu v5 lite": 197.0,
  "tpu v5e": 197.0,
  "tpu v5": 459.0,
  "tpu v5p": 459.0,
  "tpu v6 lite": 918.0,
  "tpu v6e": 918.0,
  "tpu7x": 2307.0 / 2,  # two JAX devices per chip
  "nvidia a100": 312.0,
  "nvidia h100": 990.0,
  "nvidia h200": 990.0,
  "nvidia b200": 2250.0,
}


def kind(device: jax.Device) -> str | None:
  """Returns which of the kinds above a device is, or None (CPUs)."""
  name = device.device_kind.lower()
  matching = [prefix for prefix in PEAK_BFLOAT16_TFLOPS if name.startswith(prefix)]
  return max(matching, key=len, default=None)


def peak_flops(device: jax.Device) -> float | None:
  """Returns the device's bfloat16 FLOP/s, or None where its kind is not known (CPUs)."""
  found = kind(device)
  return None if found is None else PEAK_BFLOAT16_TFLOPS[found] * 1e12
