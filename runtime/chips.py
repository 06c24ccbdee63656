"""Constants of accelerators, with sources: what MFU, `plan` and the pages read; overridable.

Variants of a product differ by up to a third in their peak (H100 SXM, PCIe and NVL), so a device's
name is matched exactly: for a name that is not in the table, no MFU is reported rather than a wrong
one. Peaks are dense; data sheets that give sparse ones state twice as much. The numbers in brackets
are those of `SOURCES`. They differ by up to 15 % on v5p's memory bandwidth and on the links between
chips. TPU names are from JAX's `mesh_utils`, GPU names as the driver reports them.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from etils import epy

from runtime.suggest import nearest

with epy.lazy_imports():
  import jax


@dataclasses.dataclass(frozen=True)
class Chip:
  """One JAX device of a kind.

  Attributes:
    name: as in a topology, `v5p:4x4x4`.
    hbm_bytes: of memory; 0: what this machine has.
    hbm_bandwidth: bytes per second.
    link_bandwidth: bytes per second that a device sends along one axis of the torus, both links
      in use; of a GPU, over NVLink.
    slow_bandwidth: bytes per second of a device to those beyond the slice or the machine.
    flops: dense bfloat16 operations per second.
    device_kinds: what JAX's `device_kind` may be, in lower case.
    latency: seconds of a collective in addition to its bytes and hops.
    torus: dims of a TPU's torus; 0 for GPUs, where a switch connects all devices of a machine.
    devices_per_chip: JAX devices per chip.
    wraps: for three dims, the side of a cube whose multiples have wraparound links; for two dims,
      the size of an axis that has them.
    machine: number of devices connected by a switch, if there is no torus.
    network: the link between devices of a machine, if there is no torus.
    source: of the numbers except `flops`.
    flops_source: of `flops` and of the last two.
    host_bandwidth: bytes per second between a device's memory and its host's, each way.
    int8_flops: dense 8-bit integer operations per second; 0: not given, or XLA does not use them.
    float8_flops: likewise of 8-bit floating point.
    matmul: share of `flops` that large bfloat16 matmuls reach.
    matmul_source: of `matmul`.
    formula: share of `flops` that the matmuls of a step reach where it is planned by formula, with
      all that formulas leave out; 0: as `matmul`.
    attention: share of `flops` that a fused attention kernel reaches, forward and backward, each
      matmul counted once and only what the mask leaves; 0: as `matmul`.
    attention_source: of `attention`.
    memory: share of `hbm_bandwidth` that elementwise passes reach.
    memory_source: of `memory`.
  """

  name: str
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  slow_bandwidth: float
  flops: float
  device_kinds: tuple[str, ...] = ()
  latency: float = 0.0
  torus: int = 0
  devices_per_chip: int = 1
  wraps: int = 0
  machine: int = 8
  network: str = "NVLink"
  source: str = "[3]"
  flops_source: str = ""
  host_bandwidth: float = 64e9  # PCIe 5, 16 lanes
  int8_flops: float = 0.0
  float8_flops: float = 0.0
  matmul: float = 0.8
  matmul_source: str = "none published; as of H100"
  formula: float = 0.0
  attention: float = 0.0
  attention_source: str = "none published; as other matmuls"
  memory: float = 0.8
  memory_source: str = "none published"

  @property
  def eight_bit_flops(self) -> float:
    """Returns the operations per second of 8-bit matmuls: at least those of bfloat16."""
    return max(self.flops, self.int8_flops, self.float8_flops)


SOURCES = (
  "[1] the Cloud TPU system pages (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x); "
  "[2] the scaling book's chapters on TPUs and GPUs (jax-ml.github.io/scaling-book); "
  "[3] NVIDIA's data sheets; "
  "[4] JAX's guide to matmuls in Pallas (docs.jax.dev/en/latest/pallas/tpu/matmul.html), timed on "
  "v5e; "
  "[5] github.com/yangwhale/gpu-tpu-pedia, commit 6744fee, results_trace_test.csv, of a profile; "
  "[6] github.com/AI-Hypercomputer/accelerator-microbenchmarks, commit 0ddd4b8, Ironwood's readme "
  "and its guide to all-gathers; "
  "[7] github.com/stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS; "
  "[8] github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks/trillium/collectives; "
  "[9] github.com/pytorch/ao, torchao/float8/roofline_utils.py, of H100s with HBM2e; "
  "[10] FlashAttention-3, arXiv:2407.08608, figures 5 and 6; "
  "[11] Ragged Paged Attention, arXiv:2604.15464; "
  "[12] NVIDIA's white papers on GA102, Ada and RTX Blackwell, tables of tensor TFLOPS of bfloat16 "
  "with float32 accumulation, which GeForce cards have at half rate; "
  "[13] AMD's data sheets and white paper on CDNA 3"
)
# Sheets say GB; what a TPU's compiler and a GPU's driver find is as many GiB, or nearly: libtpu's
# messages of v4, v5e and v6e have 30.75, 15.75 and 31.25.
GIB = 2.0**30
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # bytes per second each way, 16 lanes
# "Typically around", and Trillium's: [2], chapter on TPUs, below the table of interconnects.
TPU_PCIE, V6E_PCIE = 15e9, 32e9


def _tpu(name: str, kinds: tuple[str, ...], torus: int, *numbers: float, int8: float) -> Chip:
  """Returns a TPU whose chip is one device; the numbers are in the order of the fields."""
  more = {
    "source": "[1], [2]",
    "flops_source": "[1], of int8 [1], [2]",
    "int8_flops": int8,
    "host_bandwidth": V6E_PCIE if name == "v6e" else TPU_PCIE,
  }
  return Chip(name, *numbers, kinds, torus=torus, wraps=4 if torus == 3 else 16, **more)


def _over_pcie(
  name: str, kind: str, hbm_bytes: float, hbm_bandwidth: float, link: float, flops: float, peak: str
) -> Chip:
  """Returns a card; a bridge, where there is one, joins only two of them and is left out."""
  numbers = (hbm_bytes, hbm_bandwidth, link, min(link, 25e9), flops)
  more = {"source": "[3]; over PCIe", "flops_source": peak, "host_bandwidth": link}
  return Chip(name, *numbers, (kind,), network="PCIe", **more)


# Chip -> share of its peak that bfloat16 matmuls reach, and where it was measured.
_V5E = "[4]: XLA's matmul of 8192 x 8192 x 8192 on v5e, 181.8 of 197 TFLOP/s"
_MATMUL = {
  "v4": (0.92, f"{_V5E}, whose matrix units are as large"),
  "v5e": (0.92, _V5E),
  "v5p": (0.92, f"{_V5E}, whose matrix units are as large"),
  "v6e": (0.79, "[5]: a matmul of 8192 x 8192 x 8192, 727.7 of 918 TFLOP/s"),
  "tpu7x": (0.83, "[6]: a matmul of 32768 x 32768 x 32768, 956.4 of 1153.5 TFLOP/s"),
  "a100": (0.87, "[7]: 271.2 of 312 TFLOP/s"),
  "a100-pcie": (0.81, "[7]: 252.9 of 312 TFLOP/s"),
  "h100": (0.80, "[7]: 794.5 of 989 TFLOP/s"),
  "h200": (0.80, "[7]: 794.5 of 989 TFLOP/s, of H100 and H200"),
  "gh200": (0.84, "[7]: 828.6 of 989 TFLOP/s"),
  "b200": (0.78, "[7]: 1745 of 2250 TFLOP/s"),
  "cpu": (0.8, "a guess at two cores, which the devices share"),
}
# Chip -> share of its peak that fused attention reaches, as cuDNN's kernels do; likewise.
_CUDNN = "[10]: cuDNN, rows of 8192, heads of 128: 529 (forward), 518 (backward) of 989 TFLOP/s"
_ATTENTION = {"h100": (0.53, _CUDNN), "h200": (0.53, _CUDNN), "gh200": (0.53, _CUDNN)}
# Chip -> share of its memory's bandwidth that elementwise passes reach; likewise.
_HBM = (
  "[9]: about 2.2 of 2.4 TB/s in elementwise kernels; [2], on GPUs, quiz 1: 94 % in an addition"
)
_DECODING = (
  "none published of training; in decoding, an attention kernel on tpu7x reaches 86 % [11]"
)
_MEMORY = {
  **dict.fromkeys(("h100", "h200", "gh200"), (0.92, _HBM)),
  **dict.fromkeys(("v4", "v5e", "v5p", "v6e", "tpu7x"), (0.8, _DECODING)),
}
# Fitted to half of the published runs: `python -m benchmarks.planner_accuracy --fit`.
_FORMULA = {
  **{"v5e": 0.891, "v5p": 0.845, "v6e": 0.79, "tpu7x": 0.762},
  **{"a100": 0.731, "a100-40gb": 0.795, "h100": 0.576},
}
_CHIPS = (
  _tpu("v4", ("tpu v4",), 3, 30.75 * GIB, 1.2e12, 90e9, 6.25e9, 275e12, int8=275e12),
  _tpu(
    *("v5e", ("tpu v5 lite", "tpu v5e"), 2, 15.75 * GIB, 0.82e12, 90e9, 25e9 / 8, 197e12),
    int8=394e12,
  ),
  _tpu(*("v5p", ("tpu v5", "tpu v5p"), 3, 95 * GIB, 2.77e12, 180e9, 50e9 / 8, 459e12), int8=918e12),
  _tpu(
    *("v6e", ("tpu v6 lite", "tpu v6e"), 2, 31.25 * GIB, 1.64e12, 180e9, 100e9 / 8, 918e12),
    int8=1836e12,
  ),
  Chip(
    *("tpu7x", 96 * GIB, 7.4e12 / 2, 200e9 / 2, 100e9 / 8 / 2, 2307e12 / 2, ("tpu7x",)),
    torus=3,
    devices_per_chip=2,
    wraps=4,
    source="[1]; a chip is two devices, which halves each number",
    host_bandwidth=TPU_PCIE,
    flops_source="[1], a chip is two JAX devices",
    float8_flops=4614e12 / 2,
  ),
  Chip(
    *("cpu", 0.0, 20e9, 4e9, 1e9, 100e9),
    latency=2e-4,
    machine=2**20,
    network="memory",
    host_bandwidth=20e9,
    source="a guess at two cores, which the devices share",
    flops_source="a guess at two cores, which the devices share",
  ),
  Chip(
    *("a100", 80 * GIB, 2.039e12, 300e9, 25e9, 312e12, ("nvidia a100-sxm4-80gb",)),
    flops_source="[3] A100",
    host_bandwidth=PCIE4,
  ),
  Chip(
    *("a100-40gb", 39.6 * GIB, 1.555e12, 300e9, 25e9, 312e12, ("nvidia a100-sxm4-40gb",)),
    flops_source="[3] A100",
    host_bandwidth=PCIE4,
  ),
  _over_pcie(
    *("a100-pcie", "nvidia a100 80gb pcie", 80 * GIB, 1.935e12, PCIE4, 312e12, "[3] A100")
  ),
  _over_pcie(
    *("a100-pcie-40gb", "nvidia a100-pcie-40gb", 39.6 * GIB, 1.555e12, PCIE4, 312e12, "[3] A100")
  ),
  Chip(
    *("h100", 80 * GIB, 3.35e12, 450e9, 50e9, 1979e12 / 2, ("nvidia h100 80gb hbm3",)),
    source="[2], [3]",
    flops_source="[3] H100 SXM, half of sparse",
  ),
  _over_pcie(
    *("h100-pcie", "nvidia h100 pcie", 80 * GIB, 2.0e12, PCIE5, 1513e12 / 2),
    "[3] H100 PCIe, half of sparse",
  ),
  _over_pcie(
    *("h100-nvl", "nvidia h100 nvl", 93.6 * GIB, 3.9e12, PCIE5, 1671e12 / 2),
    "[3] H100 NVL, half of sparse",
  ),
  Chip(
    *("h200", 140 * GIB, 4.8e12, 450e9, 50e9, 1979e12 / 2, ("nvidia h200",)),
    flops_source="[3] H200 SXM, half of sparse",
  ),
  Chip(
    *("h200-nvl", 140 * GIB, 4.8e12, 450e9, 50e9, 1671e12 / 2, ("nvidia h200 nvl",)),
    machine=4,
    source="[3]; bridges join four of them",
    flops_source="[3] H200 NVL, half of sparse",
  ),
  Chip(
    *("gh200", 95.6 * GIB, 4.0e12, 450e9, 50e9, 1979e12 / 2),
    ("nvidia gh200 480gb", "nvidia gh200 120gb"),
    machine=1,
    source="[3]; one per machine",
    host_bandwidth=450e9,
    flops_source="[3] GH200 with 96 GB of HBM3 (the name counts the processor's memory), half of "
    "sparse",
  ),
  Chip(
    *("gh200-144gb", 143 * GIB, 4.9e12, 450e9, 50e9, 1979e12 / 2, ("nvidia gh200 144g hbm3e",)),
    machine=1,
    source="[3]; one per machine",
    host_bandwidth=450e9,
    flops_source="[3] GH200, half of sparse",
  ),
  Chip(
    *("b200", 179 * GIB, 8.0e12, 900e9, 50e9, 2250e12, ("nvidia b200",)),
    source="[2], [3]",
    flops_source="[3] HGX B200, half of sparse",
  ),
  Chip(
    *("gb200", 185 * GIB, 8.0e12, 900e9, 50e9, 2500e12, ("nvidia gb200",)),
    machine=72,
    source="[3], of NVL72; two devices share a processor's link",
    host_bandwidth=225e9,
    flops_source="[3] GB200 NVL72, half of sparse",
  ),
  _over_pcie(*("l4", "nvidia l4", 22.5 * GIB, 0.3e12, PCIE4, 242e12 / 2, "[3] L4, half of sparse")),
  _over_pcie("l40s", "nvidia l40s", 44.9 * GIB, 0.864e12, PCIE4, 362e12, "[3] L40S"),
  _over_pcie("a10", "nvidia a10", 22.5 * GIB, 0.6e12, PCIE4, 125e12, "[3] A10"),
  _over_pcie("a10g", "nvidia a10g", 22.1 * GIB, 0.6e12, PCIE4, 70e12, "[3] A10G, of AWS"),
  *(
    _over_pcie(name, f"nvidia {kind}", gib * GIB, bandwidth, link, flops, f"[12] {kind}")
    for name, kind, gib, bandwidth, link, flops in (
      ("rtx3080", "geforce rtx 3080", 9.78, 0.760e12, PCIE4, 59.5e12),
      ("rtx3090", "geforce rtx 3090", 23.7, 0.936e12, PCIE4, 71e12),
      ("rtx3090ti", "geforce rtx 3090 ti", 23.7, 1.008e12, PCIE4, 80e12),
      ("rtx4080", "geforce rtx 4080", 15.7, 0.717e12, PCIE4, 97.5e12),
      ("rtx4090", "geforce rtx 4090", 23.6, 1.008e12, PCIE4, 165.2e12),
      ("rtx5080", "geforce rtx 5080", 15.5, 0.960e12, PCIE5, 112.6e12),
      ("rtx5090", "geforce rtx 5090", 31.4, 1.792e12, PCIE5, 209.5e12),
      ("a6000", "rtx a6000", 47.5, 0.768e12, PCIE4, 154.8e12),
      ("a40", "a40", 44.4, 0.696e12, PCIE4, 149.7e12),
      ("6000-ada", "rtx 6000 ada generation", 47.5, 0.960e12, PCIE4, 364.2e12),
    )
  ),
  # Before Ampere matmuls of bfloat16 have no tensor cores: theirs are those of float32.
  _over_pcie(*("t4", "tesla t4", 14.7 * GIB, 0.32e12, PCIE3, 8.1e12, "[3] T4, of float32")),
  *(
    Chip(
      *(name, gib * GIB, 0.9e12, 150e9, 6.25e9, 15.7e12, (f"tesla v100-sxm2-{size}gb",)),
      source="[3], of a DGX-1",
      flops_source="[3] V100 SXM2, of float32",
      host_bandwidth=PCIE3,
    )
    for name, gib, size in (("v100", 15.8, 16), ("v100-32gb", 31.7, 32))
  ),
  *(
    Chip(
      *(name, gib * GIB, bandwidth, 448e9, 50e9, 1307.4e12, (f"amd instinct {name}",)),
      network="Infinity Fabric",
      source="[13]; seven links of 64 GB/s each way",
      flops_source=f"[13] {name.upper()}",
    )
    for name, gib, bandwidth in (("mi300x", 192, 5.3e12), ("mi325x", 256, 6.0e12))
  ),
)
# Ada, Hopper and Blackwell multiply float8 at twice the rate of bfloat16, by the same sheets; XLA
# has no such path for int8.
_WITH_FLOAT8 = re.compile("h100|h200|gh200|b200|gb200|l4|rtx40|rtx50|6000-ada")

# Compute capability of NVIDIA's GPUs by architecture: developer.nvidia.com/cuda-gpus.
_CAPABILITIES = (
  ("v100", 7.0),
  ("t4", 7.5),
  ("a100", 8.0),
  ("a10|a40|a6000|rtx30", 8.6),
  ("l4|rtx40|6000-ada", 8.9),
  ("h100|h200|gh200", 9.0),
  ("b200|gb200", 10.0),
  ("rtx50", 12.0),
)


def compute_capability(chip: Chip) -> float:
  """Returns the compute capability of a GPU, such as 9.0; 0 of other chips."""
  return next((found for names, found in _CAPABILITIES if re.match(names, chip.name)), 0.0)


def _completed(chip: Chip) -> Chip:
  """Returns a chip of the table above with what further tables have of it."""
  more: dict[str, Any] = {}
  if _WITH_FLOAT8.match(chip.name):
    more["float8_flops"] = 2 * chip.flops
  more["formula"] = _FORMULA.get(chip.name, 0.0)
  tables = {"matmul": _MATMUL, "attention": _ATTENTION, "memory": _MEMORY}
  for share, table in tables.items():
    if chip.name in table:
      more[share], more[f"{share}_source"] = table[chip.name]
  return dataclasses.replace(chip, **more)


CHIPS = {chip.name: _completed(chip) for chip in _CHIPS}
_BY_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.device_kinds}


def known(device: "jax.Device") -> Chip | None:
  """Returns the chip that a device is; None where its name is not in the table (CPUs)."""
  return _BY_KIND.get(device.device_kind.lower())


def peak_flops(device: "jax.Device") -> float | None:
  """Returns the device's dense bfloat16 FLOP/s; None where its name is not in the table (CPUs)."""
  chip = known(device)
  return None if chip is None else chip.flops


@dataclasses.dataclass(frozen=True)
class Rates:
  """The achieved shares of the constants, and fixed overheads; the same for all chips.

  Attributes:
    matmul: of the operations per second, in matmuls as large as a model's; 0: `Chip.matmul`.
    memory: of the memory's bandwidth, in elementwise passes; 0: `Chip.memory`.
    link: of the links' bandwidth, in collectives of many MiB.
    slow_overlap: by formula, of the collectives between slices or machines that matmuls can hide,
      the share that they do; within one they hide all that lasts no longer.
    hop_seconds: from one chip to the next.
    spread: the range of a prediction: a step takes from `expected / (1 + spread)` to
      `expected * (1 + spread)`; 0: as published runs of its class differ from their predictions.
  """

  matmul: float = 0.0
  memory: float = 0.0
  link: float = 0.8
  slow_overlap: float = 0.257
  hop_seconds: float = 1e-6
  spread: float = 0.0

  def bandwidth(self, chip: Chip) -> float:
    """Returns the bytes per second that elementwise passes read and write in a chip's memory."""
    return chip.hbm_bandwidth * (self.memory or chip.memory)


REASONS = {
  "matmul": "0: each chip has its own, measured with large matmuls",
  "memory": "0: each chip has its own",
  "link": "published: 66 % in an all-reduce of 606 MB on v6e:16x16 ([8]), 89 % in an all-gather of "
  "403 MB on tpu7x:2x2x1 ([6]); small arrays are bound by the latency of hops",
  "slow_overlap": "fitted to published runs, as each chip's formula (docs/plan.md)",
  "hop_seconds": "about 1 microsecond ([2])",
  "spread": "0: as published runs of its class differ from their predictions (docs/plan.md)",
}


def overridden(text: str) -> tuple[dict[str, Chip], Rates]:
  """Returns the chips and the rates with the constants that a text replaces.

  Args:
    text: `matmul=0.7,v5p.hbm_bandwidth=2.6e12`; "" changes nothing.

  Raises:
    ValueError: an unknown constant, or a value that is not a positive number.
  """
  chips, rates = dict(CHIPS), Rates()
  for item in filter(None, text.split(",")):
    name, _, value = item.partition("=")
    number = _positive(name, value)
    chip, _, field = name.rpartition(".")
    if not chip and hasattr(rates, field):
      rates = dataclasses.replace(rates, **{field: number})
    elif chip in chips and isinstance(getattr(chips[chip], field, None), float):
      more = {"formula": number} if field == "matmul" else {}
      chips[chip] = dataclasses.replace(chips[chip], **{field: number}, **more)
    else:
      raise ValueError(f"planning.constants: there is no {name!r}{_near(name, _names(chips))}")
  return chips, rates


def _positive(name: str, value: str) -> float:
  if not re.fullmatch(r"([0-9]+[.]?[0-9]*|[.][0-9]+)(e[+-]?[0-9]+)?", value) or not float(value):
    raise ValueError(
      f"planning.constants: {name}={value!r} is not a positive number, as in "
      "matmul=0.7,v5p.hbm_bandwidth=2.6e12"
    )
  return float(value)


def _names(chips: Mapping[str, Chip]) -> list[str]:
  fields = [f.name for f in dataclasses.fields(Chip) if f.type is float]
  rates = [field.name for field in dataclasses.fields(Rates)]
  return rates + [f"{chip}.{field}" for chip in chips for field in fields]


def _near(name: str, names: list[str]) -> str:
  return nearest(name, names) or f"; there are {', '.join(names[:5])}, ..."
