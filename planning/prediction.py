"""The plan's prediction for the step that a run has compiled, on the devices that it runs on."""

import dataclasses
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from planning import aot, step_time
from planning.topology import of_devices, parse
from runtime import hlo
from runtime.chips import overridden
from runtime.collectives import collectives

# How accurate plans are known to be: what docs/plan.md measures, in sentences.
#
# Tests keep the numbers here those of the page.


@dataclasses.dataclass(frozen=True)
class Record:
  """How the predictions of a class of published runs compare with what was published.

  An error of 0.25 is a predicted speed of 1.25, or of 1 / 1.25, times the published one.

  Attributes:
    runs: how many.
    median: their median error.
    worst: their largest.
    range: the error that bounds a prediction: nine of ten runs to which constants were fitted, or
      all where they are fewer, are within it.
  """

  runs: int
  median: float
  worst: float
  range: float


RECORDS = {
  "GPU, 8 bits": Record(15, 0.17, 1.29, 1.29),
  "GPU, compiled": Record(5, 0.02, 0.11, 0.11),
  "GPU, context": Record(4, 0.95, 1.63, 0.57),
  "GPU, dense": Record(36, 0.04, 0.12, 0.12),
  "GPU, experts": Record(2, 0.74, 0.99, 1.0),
  "GPU, stages": Record(2, 1.65, 2.18, 2.18),
  "TPU, 8 bits": Record(5, 0.24, 0.27, 0.27),
  "TPU, compiled": Record(8, 0.11, 0.33, 0.33),
  "TPU, context": Record(2, 0.44, 0.46, 0.47),
  "TPU, dense": Record(49, 0.04, 0.35, 0.19),
  "TPU, experts": Record(12, 0.09, 0.71, 0.72),
}
# Of docs/plan.md: how many configs have a peak within MEMORY_WITHIN, of how many.
MEMORY, MEMORY_WITHIN = (13, 14), 0.1
# Of what no run was published of.
_UNKNOWN = 0.2


def class_of(platform: str, config: ConfigDict, *, compiled: bool) -> str:
  """Returns the class of runs, in RECORDS or not, whose predictions are made as those of a run.

  Args:
    platform: of the topology.
    config: of the run.
    compiled: whether its times are those of a compiled program.
  """
  if compiled:
    return f"{platform.upper()}, compiled"
  for axis, name in (("stage", "stages"), ("context", "context")):
    if config.mesh[axis] != 1:
      return f"{platform.upper()}, {name}"
  if "experts" in config.model and config.model.experts:
    return f"{platform.upper()}, experts"
  narrow = "matmul_dtype" in config.training and config.training.matmul_dtype != "compute"
  return f"{platform.upper()}, {'8 bits' if narrow else 'dense'}"


def range_of(seconds: float, name: str, spread: float) -> tuple[float, float, float]:
  """Returns low, expected, high.

  Args:
    seconds: expected.
    name: of the class.
    spread: of `planning.constants`; 0: that of the class.
  """
  spread = spread or (RECORDS[name].range if name in RECORDS else _UNKNOWN)
  return seconds / (1 + spread), seconds, seconds * (1 + spread)


def accuracy_of_times(name: str) -> str:
  """Returns how accurate the times of a plan of a class are."""
  if name.startswith("CPU"):
    return "simulated devices share one machine; compare plans, not times"
  if name not in RECORDS:
    return f"unknown: no published run was predicted of {name}"
  record, how = RECORDS[name], "" if name.endswith(", compiled") else ", by formula"
  return (
    f"of {record.runs} published runs ({name}{how}) half are predicted to "
    f"{_percent(record.median)} and all to {_percent(record.worst)}; the range of the step is "
    f"that of nine in ten, {_percent(record.range)} (docs/plan.md)"
  )


def _percent(share: float) -> str:
  return f"{100 * share:.0f} %"


def accuracy_of_memory() -> str:
  """Returns how accurate the peak memory by formula is."""
  close, every = MEMORY
  return (
    f"by formula, the peak memory is within 10 % of the TPU compiler's on {close} of {every} "
    "configs (docs/plan.md)"
  )


def of_program(program: Any, mesh: Mesh, platform: str, constants: str = "") -> dict[str, Any]:
  """Returns the prediction for a compiled step, as JSON has it.

  Args:
    program: the step, a `jax.stages.Compiled`.
    mesh: that it is compiled for.
    platform: of its devices.
    constants: `planning.constants`.

  Returns:
    The name of the devices' topology; seconds of a step (low, expected, high); the sums of its
    collectives; bytes of a device that the compiler has allocated, and that it has by its data
    sheet; how accurate times of this platform are known to be.

  Raises:
    ValueError: no constants are known for the devices.
  """
  chips, rates = overridden(constants)
  topology = parse(of_devices(list(mesh.devices.flat)), chips)
  text = program.as_text()
  where = aot.places(mesh, topology)
  times = step_time.times(hlo.parse(text), collectives(text, mesh), where, topology.chip, rates)
  name = f"{topology.platform.upper()}, compiled"
  peak, _ = aot.memory_of(program, platform)
  return {
    "topology": topology.name,
    "step_seconds": range_of(times.step, name, rates.spread),
    "sent": step_time.by_axes(times.sent),
    "peak_bytes": peak,
    "limit_bytes": int(topology.chip.hbm_bytes),
    "accuracy": accuracy_of_times(name),
  }
