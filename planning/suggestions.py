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
from planning import memory, search_space
from planning.aot import Target
from planning.step_facts import StepFacts, of_job
from planning.step_time import Sent
from planning.topology import Topology, most_chips
from runtime import rematerialization
from training.setup import Job

MOST = 3  # pieces of advice
_TRIES = 16
_MARGIN = 0.95  # of a device's memory: the formulas are approximate


@dataclasses.dataclass(frozen=True)
class Suggestion:
  """Changes of a config, another topology ("": the same), and the bytes per device by formula."""

  changed: dict[str, Any]
  topology: str
  bytes: int

  @property
  def overrides(self) -> str:
    """Returns flags to copy."""
    more = f"--topology={self.topology} " if self.topology else ""
    return more + search_space.text(self.changed)


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
    name = "" if where is target.topology else where.name_with_slices
    one = Suggestion(changed, name, round(needed * scale))
    (fitting if one.bytes <= _MARGIN * where.usable_bytes else others).append(one)
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
  sizes, config = _sizes_of_slice(ready), ready.config
  split = {"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]}
  steps: list[dict[str, Any]] = []
  if sizes["data"] > 1:
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
  if topology.platform != "cpu":  # more simulated devices have no more memory
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


def _sizes_of_slice(ready: Job) -> dict[str, int]:
  over = ready.devices.slices
  return {axis: size // over.get(axis, 1) for axis, size in ready.devices.sizes.items()}


def _larger(
  ready: Job, topology: Topology, changed: Mapping[str, Any]
) -> Iterator[tuple[Topology, dict[str, Any]]]:
  """Yields twice as many devices, and so on, whose slices split the parameters over fsdp.

  Larger slices, and where there are none of that size twice as many slices, along data.
  """
  sizes, over, shape = _sizes_of_slice(ready), dict(ready.devices.slices), list(topology.shape)
  rows = ready.config.data.global_batch_size
  rest = math.prod(size for axis, size in sizes.items() if axis not in ("data", "fsdp"))
  most = most_chips(topology.chip.name)
  for _ in range(6):
    where, more = topology, {}
    if most and 2 * math.prod(shape) > most:
      over["data"] = 2 * over.get("data", 1)
      more = {"mesh_dcn.data": over["data"]}
      where = dataclasses.replace(topology, slices=math.prod(over.values()))
    else:
      shape[shape.index(min(shape))] *= 2
    name = f"{topology.chip.name}:{'x'.join(map(str, shape))}"
    larger = dataclasses.replace(where, name=name, shape=tuple(shape))
    fsdp = larger.devices // rest
    parts = fsdp * over.get("data", 1) * over.get("fsdp", 1)
    batch = {} if rows % parts == 0 else {"data.global_batch_size": parts}
    yield larger, {**changed, **more, "mesh.data": 1, "mesh.fsdp": fsdp, **batch}


RESHARD = "partitioning.reshard_after_forward"
_LEAST = 0.005  # of the step: what is worth saying


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
