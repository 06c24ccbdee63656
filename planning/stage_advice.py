"""What kernels sharded over fsdp cost on pipeline stages, and data parallelism in their place.

The kernels of a chunk are gathered three times for a microbatch: in its forward pass, and twice in
its backward pass, which computes the layers again. Replicated over `data`, with an optimizer state
sharded over it, they are gathered once per step, after the update (ZeRO-1, arXiv:1910.02054).
"""

import copy
import dataclasses
from collections.abc import Iterable

from ml_collections import ConfigDict

from analysis.chips import Rates
from partitioning.shardings import size_text
from planning import analytic, aot, memory
from planning.topology import Topology
from training.setup import Job

_OPTIMIZER = "partitioning.optimizer.model"
_MARGIN = 0.95  # of a device's memory: the formula is approximate


@dataclasses.dataclass(frozen=True)
class Cost:
  """What is sent for parameters and their gradients in a step, and the memory of it.

  Attributes:
    bytes: of their payloads, per device.
    seconds: of all of them, hidden or not.
    memory: bytes of a device at the peak, by formula.
  """

  bytes: int
  seconds: float
  memory: int

  @property
  def text(self) -> str:
    """Returns it in words."""
    return f"{size_text(self.bytes)} in {self.seconds:.3g} s"


def advice(config: ConfigDict, ready: Job, topology: Topology, rates: Rates, here: aot.Here) -> str:
  """Returns what kernels gathered in each tick cost, and what gathering once per step would.

  Args:
    config: as parsed, with overrides.
    ready: its job.
    topology: of the plan.
    rates: achieved shares of the chip's constants.
    here: the devices of this process.

  Returns:
    A line with overrides; "" without stages, or if fsdp does not split kernels.
  """
  sizes = ready.devices.sizes
  if ready.program.pipeline is None or sizes["fsdp"] == 1:
    return ""
  ours = _cost(ready, topology, rates, ("fsdp",))
  runs = ready.program.pipeline.forward_ticks
  times = 3 if ready.config.partitioning.reshard_after_forward else 2
  said = (
    f"kernels are gathered over fsdp={sizes['fsdp']} {times} times for each of {runs} forward and "
    f"backward passes of a stage, and their gradients scattered once: {ours.text}"
  )
  changed = {"mesh.data": sizes["data"] * sizes["fsdp"], "mesh.fsdp": 1}
  other = copy.deepcopy(config)
  other.update_from_flattened_dict({**changed, _OPTIMIZER: ("fsdp", "data")})
  if ready.devices.slices.get("fsdp", 1) > 1:
    return said
  try:
    job = aot.prepare(other, topology, here)
  except ValueError:
    return said
  theirs = _cost(job, topology, rates, ("data",))
  keys = " ".join(f"--config.{k}={v}" for k, v in changed.items())
  keys += f""" --config.{_OPTIMIZER}='("fsdp","data")'"""
  room = topology.chip.hbm_bytes
  fits = "" if theirs.memory <= _MARGIN * room else f", which do not fit {size_text(int(room))}"
  return (
    f"{said}. Gathered once per step (data parallelism, the optimizer sharded): {theirs.text}, and "
    f"{size_text(theirs.memory)} instead of {size_text(ours.memory)} of memory by formula{fits}: "
    f"{keys}"
  )


def _cost(job: Job, topology: Topology, rates: Rates, axes: Iterable[str]) -> Cost:
  """Returns the cost of the collectives along some axes."""
  found = [
    one
    for _, one in analytic.sent(job, aot.places(job.mesh, topology), rates)
    if {*one.axes} & {*axes}
  ]
  return Cost(
    sum(one.bytes for one in found),
    sum(one.seconds for one in found),
    memory.at_once(memory.by_formula(job)),
  )
