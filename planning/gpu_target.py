"""NVIDIA's GPUs that are not attached, for which XLA's compiler compiles all the same.

It is part of JAX for these GPUs (`jax[cuda12]`), and needs no GPU but a description of one.
"""

import importlib.util
from typing import NamedTuple

from runtime.chips import Chip

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


class _Target(NamedTuple):
  """What the compiler reads of a GPU.

  Attributes:
    name: as the driver has it.
    cores: streaming multiprocessors.
    units: for float32 in a core.
    level_2: bytes of its cache.
    gigahertz: of its clock.
    shared: bytes of shared memory in a core.
  """

  name: str
  cores: int
  units: int
  level_2: int
  gigahertz: float
  shared: int


# Source: github.com/openxla/xla, xla/backends/gpu/target_config/specs.
TARGETS = {
  "a100": _Target("NVIDIA A100-SXM4-80GB", 108, 64, 41943040, 1.41, 167936),
  "a100-40gb": _Target("NVIDIA A100-SXM4-40GB", 108, 64, 41943040, 1.41, 167936),
  "h100": _Target("NVIDIA H100 80GB HBM3", 132, 128, 52428800, 1.98, 233472),
  "h200": _Target("NVIDIA H200", 132, 128, 52428800, 1.98, 233472),
  "b200": _Target("NVIDIA B200", 148, 128, 132644864, 1.965, 233472),
  "gb200": _Target("NVIDIA GB200", 152, 128, 135528448, 2.062, 233472),
}
_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048
  core_count: {target.cores}
  fpus_per_core: {target.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {target.level_2}
  clock_rate_ghz: {target.gigahertz}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{target.name}"
"""


def compiler_there(chip: Chip) -> bool:
  """Returns whether JAX for NVIDIA's GPUs is installed, and this GPU can be described to it."""
  if chip.name not in TARGETS or importlib.util.find_spec("jax_plugins") is None:
    return False
  return any(importlib.util.find_spec(name) is not None for name in _PLUGINS)


def description(chip: Chip, count: int) -> dict[str, str]:
  """Returns what JAX takes for GPUs that are not attached, of as many machines as they fill."""
  machines = count // chip.machine if count % chip.machine == 0 else 1
  shape = f"1x{machines}x{count // machines}"
  return {"platform": "cuda", "target_config": _described(chip), "topology": shape}


def _described(chip: Chip) -> str:
  """Returns XLA's GpuTargetConfigProto of a GPU, as text."""
  target, (major, _, minor) = TARGETS[chip.name], chip.capability.partition(".")
  return _TEXT.format(
    target=target,
    optin=target.shared - 1024,  # the driver's own
    bandwidth=int(chip.hbm_bandwidth),
    memory=int(chip.hbm_bytes),
    major=major,
    minor=minor or 0,
    features="ACCELERATED_FEATURES" if int(major) >= 9 else "NONE",
  )
