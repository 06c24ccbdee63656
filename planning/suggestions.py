"""Changes that make a config fit, or save time: tried by formula, cheapest first.

Rematerialization, offloading to the host's memory, rows per device, and larger slices. The formulas
are scaled by the compiler's number for the original config, if there is one: what they omit there
they omit for similar configs too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from configs.schema import step_checks, validate
from partitioning.rules import size_text
from planning import analytic, aot, memory
from planning.aot import Target
from planning.step_facts import StepFacts, of_job
from planning.step_time import Sent
from planning.topology import Topology, most_chips
from planning.traced_step import OfTheLayers
from runtime import rematerialization
from training.microbatches import GATHER
from training.setup import Job

MOST = 3  # pieces of advice
_TRIES = 16
_MARGIN = 0.95  # of a device's memory: the formulas are approximate


@dataclasses.dataclass(frozen=True)
class Suggestion:
  """Overrides to copy, and the bytes per device that the formulas give for them."""

  overrides: str
  bytes: int


@dataclasses.dataclass(frozen=True)
class Advice:
  """What was tried for a config that does not fit.

  Attributes:
    fitting: changes that fit, at most `MOST`, the cheapest first.
    tried: how many were tried.
    smallest: the one that needs the least memory, where none fits; None if all were refused.
  """

  fitting: tuple[Suggestion, ...] = ()
  tried: int = 0
  smallest: Suggestion | None = None


def overrides_that_fit(target: Target, ready: Job, scale: float) -> Advice:
  """Returns overrides with which a config fits, or what comes nearest.

  Args:
    target: that it does not fit.
    ready: its job.
    scale: its memory per device, as a multiple of the formulas'.
  """
  fitting: list[Suggestion] = []
  others: list[Suggestion] = []
  tried = 0
  for where, changed in itertools.islice(candidates(ready, target.topology), _TRIES):
    if len(fitting) == MOST:
      break
    tried += 1
    needed = _needed(dataclasses.replace(target, topology=where).changed(changed))
    if needed is None:
      continue
    more = [] if where is target.topology else [f"--topology={where.name}"]
    text = " ".join([*more, *(f"--config.{k}={v}" for k, v in changed.items())])
    one = Suggestion(text, round(needed * scale))
    (fitting if one.bytes <= _MARGIN * where.chip.hbm_bytes else others).append(one)
  smallest = None if fitting else min(others, key=lambda one: one.bytes, default=None)
  return Advice(tuple(fitting), tried, smallest)


def _needed(target: Target) -> int | None:
  """Returns the bytes per device by formula; None if the config is refused."""
  try:
    step = of_job(target.job())
  except ValueError:
    return None
  return memory.at_once(memory.by_formula(step))


def candidates(ready: Job, topology: Topology) -> Iterator[tuple[Topology, dict[str, Any]]]:
  """Yields changes that might fit, those that cost the least time first.

  Fewer rows of the global batch come last on the same devices: they change what is trained. Rows
  that are accumulated need as little for activations, but a sum of gradients beside.
  """
  sizes, config = ready.devices.sizes, ready.config
  split = {"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]}
  one_slice = not ready.devices.slices
  steps: list[dict[str, Any]] = []
  if sizes["data"] > 1 and one_slice:
    steps.append(split)
  with_split = bool(steps)
  for recompute in _recomputing(ready):
    steps.append(recompute)
    if with_split:
      steps.append({**split, **recompute})
  most = {key: value for step in steps for key, value in step.items()}
  on_host = config.optimizer.state_memory == "host"
  movable = not on_host and not any(step_checks.on_the_device(config.optimizer))
  moved = {"optimizer.state_memory": "host"} if movable else {}
  if moved:
    steps.append({**most, **moved})
  counts = [*_microbatches(ready)]
  for more in (most, {**most, **moved}) if moved else (most,):
    steps += [{**more, "training.gradient_accumulation_steps": count} for count in counts]
  if counts:
    fewest = {"data.global_batch_size": config.data.global_batch_size // counts[-1]}
    if config.training.gradient_accumulation_steps > 1:
      fewest["training.gradient_accumulation_steps"] = 1
    steps.append({**most, **moved, **fewest})
  yield from ((topology, step) for step in steps)
  if one_slice and topology.platform != "cpu":  # more simulated devices have no more memory
    yield from _larger(ready, topology, {**most, **moved})


def _microbatches(ready: Job) -> Iterator[int]:
  """Yields numbers of microbatches: half of the rows per device, and one row, if it has several."""
  sizes, config = ready.devices.sizes, ready.config
  rows = config.data.global_batch_size // (sizes["data"] * sizes["fsdp"])
  count = config.training.gradient_accumulation_steps
  if rows >= 4 * count and rows % (2 * count) == 0:
    yield 2 * count
  if rows >= 2 * count:
    yield rows


def _recomputing(ready: Job) -> Iterator[dict[str, str]]:
  """Yields other values of `training.rematerialization`, those that cost the least time first.

  Less and less is saved on the device; at last the input of each layer is offloaded too, which is
  moved while the layer is computed. What the config offloads stays so.
  """
  key = "training.rematerialization"
  if key in validate.unread(ready.config):
    return
  names = rematerialization.names_of(ready.config.model)
  now = rematerialization.parse(ready.config.training.rematerialization, names)
  presets = rematerialization.PRESETS
  weaker = presets.index(now.preset) + 1 if now.preset and not now.given else 0
  kept = [f"{name}=offload" for name in now.chosen(rematerialization.OFFLOAD)]
  texts = [",".join([preset, *kept]) for preset in presets[weaker:]]
  if names and now.by_name[rematerialization.LAYER_INPUT] != rematerialization.OFFLOAD:
    texts.append(",".join(["full,layer_input=offload", *kept]))
  for text in texts:
    saved = rematerialization.parse(text, names).chosen(rematerialization.SAVE)
    if not now.given or {*saved} < {*now.chosen(rematerialization.SAVE)}:
      yield {key: text}


def _larger(
  ready: Job, topology: Topology, changed: Mapping[str, Any]
) -> Iterator[tuple[Topology, dict[str, Any]]]:
  """Yields slices of twice as many devices, and so on, whose devices split the parameters.

  As far as there are slices of that size.
  """
  sizes, shape = ready.devices.sizes, list(topology.shape)
  rows = ready.config.data.global_batch_size
  rest = math.prod(size for axis, size in sizes.items() if axis not in ("data", "fsdp"))
  most = most_chips(topology.chip.name)
  for _ in range(6):
    shape[shape.index(min(shape))] *= 2
    if most and math.prod(shape) > most:
      return
    name = f"{topology.chip.name}:{'x'.join(map(str, shape))}"
    larger = dataclasses.replace(topology, name=name, shape=tuple(shape))
    fsdp = larger.devices // rest
    batch = {} if rows % fsdp == 0 else {"data.global_batch_size": fsdp}
    yield larger, {**changed, "mesh.data": 1, "mesh.fsdp": fsdp, **batch}


# What it costs to gather kernels over fsdp on pipeline stages, and data parallelism in its place.
#
# In each tick (`training.pipeline_gather=tick`) the kernels of a chunk are gathered three times
# for a microbatch: in its forward pass, and twice in its backward pass, which computes the layers
# again. Once per step (`step`), they are complete on each device, with their gradients. Replicated
# over `data`, with an optimizer state sharded over it, they are gathered after the update (ZeRO-1,
# arXiv:1910.02054).

RESHARD = "partitioning.reshard_after_forward"
_LEAST = 0.005  # of the step: what is worth saying
_OPTIMIZER = "partitioning.optimizer.model"


@dataclasses.dataclass(frozen=True)
class GatherCost:
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


def stage_gathers_advice(target: Target, ready: Job, layers: OfTheLayers) -> str:
  """Returns what parameters and gradients cost, gathered in each tick, once per step, or ZeRO-1.

  Args:
    target: of the plan.
    ready: its job.
    layers: the memory of its layers' activations, which is the same in each of these ways.

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
  room = target.topology.chip.hbm_bytes
  for flags, keys in ways.items():
    as_now = keys == {GATHER: now}
    try:
      job = ready if as_now else target.changed(keys).job()
    except ValueError:
      continue
    cost = gather_cost(of_job(job), target, layers)
    fits = "" if cost.memory <= _MARGIN * room else f", of {size_text(int(room))}"
    size = f"{size_text(cost.memory)} of memory{fits}"
    texts.append(f"{flags}{' (as here)' if as_now else ''}: {cost.text}, {size}")
  return f"parameters and gradients over fsdp and data, by formula: {'; '.join(texts)}"


def gather_cost(step: StepFacts, target: Target, layers: OfTheLayers) -> GatherCost:
  """Returns the cost of the collectives along fsdp and data."""
  places = aot.places(step.mesh, target.topology)
  found = [
    one for one in analytic.sent(step, places, target.rates) if {*one.axes} & {"fsdp", "data"}
  ]
  return GatherCost(
    sum(one.bytes for one in found),
    sum(one.seconds for one in found),
    memory.at_once(memory.by_formula(step, layers)),
  )


def gather_once_advice(step: StepFacts, sent: Iterable[Sent], seconds: float, free: float) -> str:
  """Returns whether keeping the kernels would save time, where there is memory for them.

  Args:
    step: of the plan.
    sent: the collectives of its compiled program.
    seconds: of the step.
    free: bytes of a device's memory that are left.

  Returns:
    A line with the override; "" if they are kept, if hardly a gather is waited for, or if they do
    not fit.
  """
  if step.kind != "transformer" or not step.partitioning.reshard_after_forward:
    return ""
  waited = sum(
    one.exposed_seconds
    for one in sent
    if (one.kind, one.axes) == ("all-gather", ("fsdp",)) and one.runs >= step.model.layers
    if "transpose(" in one.source  # in the backward pass
  )
  needed = memory.kept_kernel_bytes(step)
  if not needed or waited < _LEAST * seconds or needed > _MARGIN * free:
    return ""
  return (
    f"for {1e3 * waited:,.0f} ms of a step the backward pass waits for kernels that it gathers "
    f"again; kept, those of all layers take {size_text(needed)}: --config.{RESHARD}=False"
  )
