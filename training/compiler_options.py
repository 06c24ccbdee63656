"""Compiler options: the best known ones of each kind of device, and the config's over them.

They are no part of a run's record: it resumes on another device with that device's. Those of
accelerators move communication and change no result; CPUs' change how sums are rounded.
`compiler_options` of the config is compared.
"""

import dataclasses
import os
import re
from collections.abc import Mapping

import jax

from runtime.chips import known

# The variables by which XLA is given flags; what is set there is left as it is.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# The compiler's message about an option that it does not know, or not with such a value.
_REFUSED = re.compile(
  r"No such compile option: '(\w+)'|While setting option (\w+),|into flag (\w+):"
)


@dataclasses.dataclass(frozen=True)
class Defaults:
  """The options of some kinds of devices.

  Attributes:
    devices: names of chips, as in `runtime.chips`; or `gpu`, for all of them.
    options: name -> value.
    reason: in words; docs/performance.md has what was measured.
  """

  devices: tuple[str, ...]
  options: Mapping[str, bool | float]
  reason: str


_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
_SPARSE_CORE = {
  "xla_enable_async_all_gather": True,
  "xla_tpu_prefer_async_allgather_to_allreduce": True,
  f"{_OFFLOAD}_all_gather": True,
  f"{_OFFLOAD}_2d_all_gather": True,
  f"{_OFFLOAD}_3d_all_gather": True,
  f"{_OFFLOAD}_reduce_scatter": True,
  f"{_OFFLOAD}_nd_reduce_scatter": True,
}
# XLA's scheduler starts the permutes of a ring as late as its own estimate of them allows, which is
# half of what the links of v6e take by the plan's clock. 0.3 hides more of them than 0.5 does
# (docs/performance.md).
_EARLIER = {
  "xla_lhs_output_fusion_latency_multiplier": 0.3,
  "xla_lhs_loop_fusion_latency_multiplier": 0.3,
}

TABLE = (
  Defaults(
    ("v5e",),
    _SPARSE_CORE,
    "all-gathers run beside matmuls, and reduce-scatters are no all-reduces; it has no SparseCore",
  ),
  Defaults(
    ("v5p",),
    _SPARSE_CORE,
    "all-gathers and reduce-scatters run on the SparseCores, beside the matrix units",
  ),
  Defaults(
    ("v6e",),
    {**_SPARSE_CORE, **_EARLIER},
    "likewise; and the scheduler counts work at 0.3 of its time, so that transfers start earlier",
  ),
  Defaults(
    ("gpu",),
    {"xla_gpu_enable_latency_hiding_scheduler": True},
    "collectives start early and end late in the schedule",
  ),
)

# For GPUs that are not attached: XLA runs its own kernels and cuBLAS's to see which is faster, and
# has cuBLAS for all matmuls where it cannot.
WITHOUT_GPU = {"xla_gpu_enable_triton_gemm": False}

_dropped: dict[str, None] = {}  # by the compiler of this process, in the order it named them


def of_device(device: jax.Device) -> dict[str, bool | float]:
  """Returns the default options of a device; {} for CPUs and for kinds without a row."""
  chip = known(device)
  names = {chip.name if chip else "", *(("gpu",) if device.platform in ("gpu", "cuda") else ())}
  given = " ".join(os.environ.get(variable, "") for variable in _VARIABLES)
  return {
    name: value
    for row in TABLE
    if names & {*row.devices}
    for name, value in row.options.items()
    if f"--{name}" not in given
  }


def of_config(text: str) -> dict[str, str | bool]:
  """Returns name -> value of the config's `compiler_options`; "" leaves a default out.

  As in XLA_FLAGS, booleans are `true` and `false`.
  """
  pairs = (option.partition("=") for option in text.split(",") if option)
  return {
    name.strip(): {"true": True, "false": False}.get(value.lower(), value)
    for name, _, value in pairs
  }


def resolved(
  config_text: str, defaults: Mapping[str, str | bool]
) -> tuple[dict[str, str | bool], dict[str, str | bool]]:
  """Returns the defaults that the config leaves in place, and its own options."""
  given = of_config(config_text)
  kept = {name: value for name, value in defaults.items() if name not in given | _dropped}
  return kept, {name: value for name, value in given.items() if value != ""}


def compile_with(
  lowered: jax.stages.Lowered,
  defaults: Mapping[str, str | bool],
  given: Mapping[str, str | bool],
) -> jax.stages.Compiled:
  """Compiles; a default that the compiler refuses is left out, in this process from now on.

  Args:
    lowered: the program.
    defaults: options that may be left out.
    given: options that may not.

  Raises:
    jax.errors.JaxRuntimeError: it does not compile; or the compiler refuses a given option.
  """
  defaults = dict(defaults)
  while True:
    try:
      return lowered.compile(compiler_options={**defaults, **given} or None)
    except jax.errors.JaxRuntimeError as error:
      found = _REFUSED.search(str(error))
      name = next(filter(None, found.groups()), "") if found else ""
      if name not in defaults or name in given:
        raise
      del defaults[name]
      _dropped[name] = None


def dropped() -> tuple[str, ...]:
  """Returns the defaults that this process's compiler has refused."""
  return tuple(_dropped)


def text(options: Mapping[str, str | bool]) -> str:
  """Returns options as `compiler_options` has them."""
  return ",".join(
    f"{name}={str(value).lower() if isinstance(value, bool) else value}"
    for name, value in options.items()
  )
