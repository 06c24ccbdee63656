"""Peak speed of accelerators by the exact device name that JAX reports, for MFU and for `plan`.

This is the one table of peaks. Variants of a product differ by up to a third (H100 SXM, PCIe and
NVL), so a name is matched whole: of a name that is not in the table no MFU is reported, rather than
a wrong one. Peaks are dense: data sheets that give sparse ones say twice as much.

Sources: [1] the Cloud TPU system pages (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x), names
from JAX's `mesh_utils`; [3] NVIDIA's data sheets, names as the CUDA driver reports them.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """A kind of device.

  Attributes:
    name: as in a topology, `h100-pcie:8`.
    device_kinds: what JAX's `device_kind` may say, in lower case.
    bfloat16_tflops: dense peak of one JAX device.
    source: of the peak.
  """

  name: str
  device_kinds: tuple[str, ...]
  bfloat16_tflops: float
  source: str


_ALL = (
  Accelerator("v4", ("tpu v4",), 275.0, "[1]"),
  Accelerator("v5e", ("tpu v5 lite", "tpu v5e"), 197.0, "[1]"),
  Accelerator("v5p", ("tpu v5", "tpu v5p"), 459.0, "[1]"),
  Accelerator("v6e", ("tpu v6 lite", "tpu v6e"), 918.0, "[1]"),
  Accelerator("tpu7x", ("tpu7x",), 2307.0 / 2, "[1], a chip is two JAX devices"),
  Accelerator("a100", ("nvidia a100-sxm4-80gb",), 312.0, "[3] A100"),
  Accelerator("a100-40gb", ("nvidia a100-sxm4-40gb",), 312.0, "[3] A100"),
  Accelerator("a100-pcie", ("nvidia a100 80gb pcie",), 312.0, "[3] A100"),
  Accelerator("a100-pcie-40gb", ("nvidia a100-pcie-40gb",), 312.0, "[3] A100"),
  Accelerator("h100", ("nvidia h100 80gb hbm3",), 1979.0 / 2, "[3] H100 SXM, half of sparse"),
  Accelerator("h100-pcie", ("nvidia h100 pcie",), 1513.0 / 2, "[3] H100 PCIe, half of sparse"),
  Accelerator("h100-nvl", ("nvidia h100 nvl",), 1671.0 / 2, "[3] H100 NVL, half of sparse"),
  Accelerator("h200", ("nvidia h200",), 1979.0 / 2, "[3] H200 SXM, half of sparse"),
  Accelerator("h200-nvl", ("nvidia h200 nvl",), 1671.0 / 2, "[3] H200 NVL, half of sparse"),
  Accelerator(
    "gh200",
    ("nvidia gh200 480gb", "nvidia gh200 120gb"),
    1979.0 / 2,
    "[3] GH200 with 96 GB of HBM3 (the name counts the processor's memory), half of sparse",
  ),
  Accelerator("gh200-144gb", ("nvidia gh200 144g hbm3e",), 1979.0 / 2, "[3] GH200, half of sparse"),
  Accelerator("b200", ("nvidia b200",), 2250.0, "[3] HGX B200, half of sparse"),
  Accelerator("gb200", ("nvidia gb200",), 2500.0, "[3] GB200 NVL72, half of sparse"),
  Accelerator("l4", ("nvidia l4",), 242.0 / 2, "[3] L4, half of sparse"),
  Accelerator("l40s", ("nvidia l40s",), 362.0, "[3] L40S"),
  Accelerator("a10", ("nvidia a10",), 125.0, "[3] A10"),
)
ACCELERATORS = {one.name: one for one in _ALL}
_BY_KIND = {kind: one for one in _ALL for kind in one.device_kinds}


def known(device: jax.Device) -> Accelerator | None:
  """Returns what a device is; None where its name is not in the table (CPUs)."""
  return _BY_KIND.get(device.device_kind.lower())


def peak_flops(device: jax.Device) -> float | None:
  """Returns the device's dense bfloat16 FLOP/s; None where its name is not in the table (CPUs)."""
  found = known(device)
  return None if found is None else found.bfloat16_tflops * 1e12
