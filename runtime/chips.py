"""Constants of accelerators, with sources: what MFU, `plan` and the pages read; overridable.

Variants of a product differ by up to a third in their peak (H100 SXM, PCIe and NVL), so a device's
name is matched exactly: for a name that is not in the table, no MFU is reported rather than a wrong
one. Peaks are dense; data sheets that give sparse ones state twice as much. The numbers in brackets
are those of `SOURCES`. They differ by up to 15 % on v5p's memory bandwidth and on the links between
chips. TPU names are from JAX's `mesh_utils`, GPU names as the driver reports them.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
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
    capability: the compute capability of NVIDIA's GPUs (developer.nvidia.com/cuda-gpus); else 0.
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
  capability: str = "0"

  @property
  def eight_bit_flops(self) -> float:
    """Returns the operations per second of 8-bit matmuls: at least those of bfloat16."""
    return max(self.flops, self.int8_flops, self.float8_flops)

  @property
  def compute_capability(self) -> float:
    """Returns the compute capability of a GPU, such as 9.0; 0 of other chips."""
    return float(self.capability)


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
# messages of a program that is too large have those of TPUs.
GIB = 2.0**30

# name | GiB of memory | its TB/s | GB/s of links, beyond the slice or machine, and to the host |
# TFLOP/s of bfloat16 | compute capability | names that JAX reports | source of TFLOP/s (sparse/2:
# the sheet has that of sparse matrices, half of which it is).
# The host is at the other end of PCIe 3, 4 or 5: 16, 32 or 64 GB/s each way. TPUs have "typically
# around" 15, Trillium 32: [2], chapter on TPUs, below the table of interconnects.
_TPUS = """
v4  | 30.75 | 1.2  | 90  6.25  15 | 275 | 0 | tpu v4               | [1], of int8 [1], [2]
v5e | 15.75 | 0.82 | 90  3.125 15 | 197 | 0 | tpu v5 lite, tpu v5e | [1], of int8 [1], [2]
v5p | 95.74 | 2.77 | 180 6.25  15 | 459 | 0 | tpu v5, tpu v5p      | [1], of int8 [1], [2]
v6e | 31.25 | 1.64 | 180 12.5  32 | 918 | 0 | tpu v6 lite, tpu v6e | [1], of int8 [1], [2]
"""
_TPU7X = "tpu7x | 94.75 | 3.7 | 100 6.25 15 | 1153.5 | 0 | tpu7x | [1], a chip is two JAX devices"
_CPU = "cpu | 0 | 0.02 | 4 1 20 | 0.1 | 0 | | a guess at two cores, which the devices share"
_NVLINK = """
a100      | 80   | 2.039 | 300 25 32  | 312   | 8  | nvidia a100-sxm4-80gb | [3] A100
a100-40gb | 39.6 | 1.555 | 300 25 32  | 312   | 8  | nvidia a100-sxm4-40gb | [3] A100
h100      | 80   | 3.35  | 450 50 64  | 989.5 | 9  | nvidia h100 80gb hbm3 | [3] H100 SXM, sparse/2
h200      | 140  | 4.8   | 450 50 64  | 989.5 | 9  | nvidia h200           | [3] H200 SXM, sparse/2
h200-nvl  | 140  | 4.8   | 450 50 64  | 835.5 | 9  | nvidia h200 nvl       | [3] H200 NVL, sparse/2
b200      | 179  | 8.0   | 900 50 64  | 2250  | 10 | nvidia b200         | [3] B200, sparse/2
gb200     | 185  | 8.0   | 900 50 225 | 2500  | 10 | nvidia gb200        | [3] GB200, sparse/2
v100      | 15.8 | 0.9   | 150 6.25 16 | 15.7 | 7 | tesla v100-sxm2-16gb | [3] V100 SXM2, of float32
v100-32gb | 31.7 | 0.9   | 150 6.25 16 | 15.7 | 7 | tesla v100-sxm2-32gb | [3] V100 SXM2, of float32
"""
# One per machine; JAX's name counts the processor's memory, too.
_GH200 = """
gh200       | 95.6 | 4.0 | 450 50 450 | 989.5 | 9 | nvidia gh200 480gb, nvidia gh200 120gb | [3]
gh200-144gb | 143  | 4.9 | 450 50 450 | 989.5 | 9 | nvidia gh200 144g hbm3e | [3]
"""
# A bridge, where there is one, joins only two of these cards and is left out.
_PCIE = """
a100-pcie      | 80   | 1.935 | 32 25 32 | 312   | 8   | nvidia a100 80gb pcie | [3] A100
a100-pcie-40gb | 39.6 | 1.555 | 32 25 32 | 312   | 8   | nvidia a100-pcie-40gb | [3] A100
h100-pcie      | 80   | 2.0   | 64 25 64 | 756.5 | 9   | nvidia h100 pcie      | [3] PCIe, sparse/2
h100-nvl       | 93.6 | 3.9   | 64 25 64 | 835.5 | 9   | nvidia h100 nvl       | [3] NVL, sparse/2
l4             | 22.5 | 0.3   | 32 25 32 | 121   | 8.9 | nvidia l4             | [3] L4, sparse/2
l40s           | 44.9 | 0.864 | 32 25 32 | 362   | 8.9 | nvidia l40s           | [3] L40S
a10            | 22.5 | 0.6   | 32 25 32 | 125   | 8.6 | nvidia a10            | [3] A10
a10g           | 22.1 | 0.6   | 32 25 32 | 70    | 8.6 | nvidia a10g           | [3] A10G, of AWS
t4             | 14.7 | 0.32  | 16 16 16 | 8.1   | 7.5 | tesla t4              | [3] T4, of float32
rtx3080        | 9.78 | 0.760 | 32 25 32 | 59.5  | 8.6 | nvidia geforce rtx 3080        | [12]
rtx3090        | 23.7 | 0.936 | 32 25 32 | 71    | 8.6 | nvidia geforce rtx 3090        | [12]
rtx3090ti      | 23.7 | 1.008 | 32 25 32 | 80    | 8.6 | nvidia geforce rtx 3090 ti     | [12]
rtx4080        | 15.7 | 0.717 | 32 25 32 | 97.5  | 8.9 | nvidia geforce rtx 4080        | [12]
rtx4090        | 23.6 | 1.008 | 32 25 32 | 165.2 | 8.9 | nvidia geforce rtx 4090        | [12]
rtx5080        | 15.5 | 0.960 | 64 25 64 | 112.6 | 12  | nvidia geforce rtx 5080        | [12]
rtx5090        | 31.4 | 1.792 | 64 25 64 | 209.5 | 12  | nvidia geforce rtx 5090        | [12]
a6000          | 47.5 | 0.768 | 32 25 32 | 154.8 | 8.6 | nvidia rtx a6000               | [12]
a40            | 44.4 | 0.696 | 32 25 32 | 149.7 | 8.6 | nvidia a40                     | [12]
6000-ada       | 47.5 | 0.960 | 32 25 32 | 364.2 | 8.9 | nvidia rtx 6000 ada generation | [12]
"""
_AMD = """
mi300x | 192 | 5.3 | 448 50 64 | 1307.4 | 0 | amd instinct mi300x | [13] MI300X
mi325x | 256 | 6.0 | 448 50 64 | 1307.4 | 0 | amd instinct mi325x | [13] MI325X
"""
# Chip -> fields in which it differs from what is common to its table.
_OWN: dict[str, dict[str, Any]] = {
  "v4": {"torus": 3, "wraps": 4, "int8_flops": 275e12},
  "v5e": {"int8_flops": 394e12},
  "v5p": {"torus": 3, "wraps": 4, "int8_flops": 918e12},
  "v6e": {"int8_flops": 1836e12},
  "h100": {"source": "[2], [3]"},
  "h200-nvl": {"machine": 4, "source": "[3]; bridges join four of them"},
  "b200": {"source": "[2], [3]"},
  "gb200": {"machine": 72, "source": "[3], of NVL72; two devices share a processor's link"},
  "v100": {"source": "[3], of a DGX-1"},
  "v100-32gb": {"source": "[3], of a DGX-1"},
}

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
  **{"v5e": 0.874, "v5p": 0.845, "v6e": 0.75, "tpu7x": 0.664},
  **{"a100": 0.767, "a100-40gb": 0.72, "h100": 0.547},
}


def _chips(table: str, **common: Any) -> Iterator[Chip]:
  """Yields the chips of a table above, with what is common to them and what further tables have."""
  for line in table.strip().splitlines():
    name, gib, rate, links, teraflops, capability, kinds, peak = map(str.strip, line.split("|"))
    link, slow, host = (float(f"{one}e9") for one in links.split())
    flops = float(f"{teraflops}e12")
    fields = {
      "hbm_bytes": float(gib) * GIB,
      "hbm_bandwidth": float(f"{rate}e12"),
      "link_bandwidth": link,
      "slow_bandwidth": slow,
      "host_bandwidth": host,
      "flops": flops,
      "capability": capability,
      "device_kinds": tuple(filter(None, map(str.strip, kinds.split(",")))),
      "flops_source": peak,
      # Ada, Hopper and Blackwell multiply float8 at twice the rate of bfloat16, by the same sheets;
      # XLA has no such path for int8.
      "float8_flops": 2 * flops if float(capability) >= 8.9 else 0.0,
      "formula": _FORMULA.get(name, 0.0),
    }
    for share, known in (("matmul", _MATMUL), ("attention", _ATTENTION), ("memory", _MEMORY)):
      if name in known:
        fields[share], fields[f"{share}_source"] = known[name]
    yield Chip(name, **{**fields, **common, **_OWN.get(name, {})})


CHIPS = {
  chip.name: chip
  for chip in (
    *_chips(_TPUS, torus=2, wraps=16, source="[1], [2]"),
    *_chips(
      _TPU7X,
      torus=3,
      wraps=4,
      devices_per_chip=2,
      float8_flops=2307e12,
      source="[1]; a chip is two devices, which halves each number",
    ),
    *_chips(
      _CPU,
      latency=2e-4,
      machine=2**20,
      network="memory",
      source="a guess at two cores, which the devices share",
    ),
    *_chips(_NVLINK),
    *_chips(_GH200, machine=1, source="[3]; one per machine", flops_source="[3] GH200, sparse/2"),
    *_chips(_PCIE, network="PCIe", source="[3]; over PCIe"),
    *_chips(_AMD, network="Infinity Fabric", source="[13]; seven links of 64 GB/s each way"),
  )
}
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
  slow_overlap: float = 0.588
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
