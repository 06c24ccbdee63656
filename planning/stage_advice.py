"""What it costs to gather kernels over fsdp on pipeline stages, and data parallelism in its place.

In each tick (`training.pipeline_gather=tick`) the kernels of a chunk are gathered three times for a
microbatch: in its forward pass, and twice in its backward pass, which computes the layers again.
Once per step (`step`), they are complete on each device, with their gradients. Replicated over
`data`, with an optimizer state sharded over it, they are gathered after the update (ZeRO-1,
arXiv:1910.02054).
"""

import copy
import dataclasses

from ml_collections import ConfigDict

from partitioning.shardings import size_text
from planning import analytic, aot, memory
from planning.topology import Topology
from runtime.chips import Rates
from training.gradients import GATHER
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
  """Returns what parameters and gradients cost, gathered in each tick, once per step, or ZeRO-1.

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
  ways = {f"--config.{GATHER}={one}": {GATHER: one} for one in ("tick", "step")}
  slices = dict(ready.devices.slices)
  if slices.setdefault("fsdp", 1) == 1:
    data = sizes["data"] // slices.setdefault("data", 1) * sizes["fsdp"]
    flags = f"--config.mesh.data={data} --config.mesh.fsdp=1 --config.{_OPTIMIZER}"
    changed = {"mesh.data": data, "mesh.fsdp": 1, _OPTIMIZER: ("fsdp", "data"), GATHER: "auto"}
    ways[f"""{flags}='("fsdp","data")'"""] = changed
  now = "step" if ready.program.gathered is not None else "tick"
  texts = []
  room = topology.chip.hbm_bytes
  for flags, keys in ways.items():
    other, as_now = copy.deepcopy(config), keys == {GATHER: now}
    other.update_from_flattened_dict(keys)
    try:
      job = ready if as_now else aot.prepare(other, topology, here)
    except ValueError:
      continue
    cost = _cost(job, topology, rates)
    fits = "" if cost.memory <= _MARGIN * room else f", of {size_text(int(room))}"
    size = f"{size_text(cost.memory)} of memory{fits}"
    texts.append(f"{flags}{' (as here)' if as_now else ''}: {cost.text}, {size}")
  return f"parameters and gradients over fsdp and data, by formula: {'; '.join(texts)}"


def _cost(job: Job, topology: Topology, rates: Rates) -> Cost:
  """Returns the cost of the collectives along fsdp and data."""
  found = [
    one
    for _, one in analytic.sent(job, aot.places(job.mesh, topology), rates)
    if {*one.axes} & {"fsdp", "data"}
  ]
  return Cost(
    sum(one.bytes for one in found),
    sum(one.seconds for one in found),
    memory.at_once(memory.by_formula(job)),
  )
