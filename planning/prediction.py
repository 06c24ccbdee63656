"""The plan's prediction for the step that a run has compiled, on the devices that it runs on."""

import dataclasses
from typing import Any

from planning import aot, step_time
from planning.topology import of_devices, parse
from runtime import hlo
from runtime.chips import overridden
from runtime.collectives import collectives
from training.setup import Job

# How accurate plans are known to be: what docs/plan.md measures, in sentences.
#
# Tests keep the numbers here those of the page.

# Predicted / published throughput, least and most, of docs/plan.md: of TPUs by compiled
# programs, of GPUs by formula.
PUBLISHED, PUBLISHED_BY_FORMULA = (1.05, 1.13), (0.97, 1.08)
# HBM traffic by formula / in compiled programs, least and most, of docs/plan.md.
TRAFFIC = (2.11, 3.17)
# Of docs/plan.md: how many configs have a peak within 10 %, of how many.
MEMORY = (13, 14)


def accuracy_of_times(platform: str, *, compiled: bool) -> str:
  """Returns how accurate the times of a plan are.

  Args:
    platform: of the topology.
    compiled: whether they are those of a compiled program.
  """
  if platform == "cpu":
    return "simulated devices share one machine; compare plans, not times"
  if compiled:
    return (
      f"predictions are {_range(PUBLISHED)} of published TPU throughputs; nothing was measured "
      "here (docs/plan.md)"
    )
  traffic = (
    "next to compiled TPU programs the FLOPs agree and HBM traffic is "
    f"{_range(TRAFFIC)} of theirs (docs/plan.md)"
  )
  if platform == "tpu":
    return f"unknown by formula, without the compiler; {traffic}"
  return (
    f"by formula, predictions are {_range(PUBLISHED_BY_FORMULA)} of two published throughputs of "
    "eight H100, with the share of the peak that was measured of matmuls on them "
    f"(docs/plan.md); {traffic}"
  )


def accuracy_of_memory() -> str:
  """Returns how accurate the peak memory by formula is."""
  close, every = MEMORY
  return (
    f"by formula, the peak memory is within 10 % of the TPU compiler's on {close} of {every} "
    "configs (docs/plan.md)"
  )


def _range(ends: tuple[float, float]) -> str:
  return f"{ends[0]:.2f} to {ends[1]:.2f}"


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The predicted time of a step, and the memory that the compiler has allocated for it.

  Attributes:
    topology: name of the devices' topology.
    step_seconds: low, expected, high.
    sent: what the collectives cost, per mesh axes and kind.
    peak_bytes: of a device, by the compiler.
    limit_bytes: the memory of a device, by its data sheet.
    accuracy: how accurate times of this platform are known to be.
  """

  topology: str
  step_seconds: tuple[float, float, float]
  sent: tuple[dict[str, Any], ...]
  peak_bytes: int
  limit_bytes: int
  accuracy: str


def of_program(job: Job, program: Any) -> Prediction:
  """Returns the prediction for a compiled step.

  Args:
    job: whose step it is.
    program: a `jax.stages.Compiled`.

  Raises:
    ValueError: no constants are known for the devices.
  """
  chips, rates = overridden(job.config.planning.constants)
  topology = parse(of_devices(list(job.mesh.devices.flat)), chips)
  text = program.as_text()
  compiled = hlo.parse(text)
  times = step_time.times(
    compiled,
    collectives(text, job.mesh),
    aot.places(job.mesh, topology),
    topology.chip,
    rates,
    step_time.host_transfers(compiled),
  )
  spread = rates.spread
  peak, _ = aot.memory_of(program, job.devices.platform)
  return Prediction(
    topology.name,
    (times.step * (1 - spread), times.step, times.step * (1 + spread)),
    tuple(_by_axes(times.sent)),
    peak,
    int(topology.chip.hbm_bytes),
    accuracy_of_times(topology.platform, compiled=True),
  )


def _by_axes(sent: tuple[step_time.Sent, ...]) -> list[dict[str, Any]]:
  """Returns the sums of the collectives of one kind along the same axes."""
  sums: dict[tuple, dict[str, Any]] = {}
  for one in sent:
    axis = "+".join(one.axes)
    row = sums.setdefault(
      (axis, one.kind),
      {"axis": axis, "kind": one.kind, "runs": 0, "bytes": 0, "seconds": 0.0, "exposed": 0.0},
    )
    row["runs"] += one.runs
    row["bytes"] += one.bytes
    row["seconds"] += one.seconds
    row["exposed"] += one.exposed_seconds
  return sorted(sums.values(), key=lambda row: -row["bytes"])
