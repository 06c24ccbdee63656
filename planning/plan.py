"""A plan: predicted memory, communication and step time of a config on a topology."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from models import model_spec
from partitioning import rules
from partitioning.parallel.pipeline_schedule import Schedule
from planning import analytic, aot, buffers, memory, prediction, step_time, suggestions, traced_step
from planning import timeline as timelines
from planning.step_facts import of_job
from planning.topology import Topology
from runtime import hlo
from runtime.chips import Rates
from runtime.collectives import collectives
from training.checkpointing import memory_tier
from training.setup import Job
from training.tasks import TASKS

LARGE_BYTES = 2**20
TPUS_OF_A_HOST = 4
PADDED = 1.05  # padding of an array above which to warn


@dataclasses.dataclass(frozen=True)
class Plan:
  """The prediction for a config on a topology.

  Attributes:
    title: of the config.
    job: layout and program.
    topology: the devices.
    rates: achieved shares of the chip's constants.
    program: the compiled step; None if there is no compiler for the topology.
    memory: part -> bytes per device, by formula.
    host_memory: part -> bytes of the host's memory for one device, by formula.
    times: of a step, from the compiled program, or by formula without a compiler; None if it does
      not fit: what cannot run has no speed.
    warnings: possible problems.
    advice: overrides with which it would fit, if it does not, and how many were tried.
    timeline: of a layer; None without a compiled program, or if it does not fit.
    gather_once: whether to keep gathered kernels for the backward pass; "" if it is not advised.
  """

  title: str
  job: Job
  topology: Topology
  rates: Rates
  program: aot.Program | None
  memory: dict[str, int]
  times: step_time.Times | None
  warnings: tuple[str, ...]
  advice: suggestions.Advice = dataclasses.field(default_factory=suggestions.Advice)
  host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
  timeline: timelines.Timeline | None = None
  gather_once: str = ""

  @property
  def at_peak(self) -> buffers.Assignment | None:
    """Returns the buffers of the compiled step; None without one, or if it came from a cache."""
    return self.program.at_peak if self.program else None

  @property
  def host(self) -> tuple[step_time.HostTraffic, ...]:
    """Returns the traffic to and from the host's memory; () if there is none or it is unknown."""
    return self.times.host if self.times else ()

  @property
  def peak_bytes(self) -> int:
    """Returns the peak memory of a device: by the compiler, else by formula."""
    return self.program.peak_bytes if self.program else self.memory_at_once

  @property
  def memory_at_once(self) -> int:
    """Returns the peak memory of a device by formula: not all parts are allocated at a time."""
    return memory.at_once(self.memory)

  @property
  def sent(self) -> tuple[step_time.Sent, ...]:
    """Returns the collectives of a step; () if they are unknown."""
    return self.times.sent if self.times else ()

  @property
  def fits(self) -> bool:
    """Returns the verdict: the compiler has accepted it, if there is one, and there is room."""
    accepted = self.program is None or self.program.fits
    return accepted and self.allocated_bytes <= self.topology.usable_bytes

  @property
  def allocated_bytes(self) -> int:
    """Returns the bytes that a device must have: of a compiled program with its gaps."""
    return self.program.allocated_bytes if self.program else self.memory_at_once

  @property
  def node_devices(self) -> int:
    """Returns the devices of a node: a machine of GPUs, or a host of four TPU chips."""
    chip = self.topology.chip
    return TPUS_OF_A_HOST * chip.devices_per_chip if chip.torus else chip.machine

  @property
  def accuracy(self) -> dict[str, str]:
    """Returns how accurate the times are known to be, and the memory if it is by formula."""
    found = {"times": prediction.accuracy_of_times(self.kind)}
    return found if self.program else {**found, "memory": prediction.accuracy_of_memory()}

  @property
  def kind(self) -> str:
    """Returns the class of published runs that the accuracy is of."""
    compiled = self.program is not None
    return prediction.class_of(self.topology.platform, self.job.config, compiled=compiled)

  @property
  def unit(self) -> str:
    """Returns the unit of a batch, tokens or examples."""
    return TASKS[self.job.config.task].unit

  @property
  def tokens(self) -> int:
    """Returns the tokens (or examples) of a step, of all devices."""
    data = self.job.config.data
    return data.global_batch_size * (data.sequence_length if self.unit == "tokens" else 1)

  @property
  def token_budget(self) -> float:
    """Returns the tokens (or examples) to train on in all."""
    config = self.job.config
    return config.planning.token_budget or float(config.training.steps * self.tokens)

  @property
  def chip_hours(self) -> float | None:
    """Returns the expected chip-hours for the token budget; None: it does not fit."""
    if self.step_seconds is None:
      return None
    chips = self.job.mesh.size / self.topology.chip.devices_per_chip
    return self.token_budget / self.tokens * self.step_seconds[1] * chips / 3600

  @property
  def cost(self) -> float | None:
    """Returns their cost; None without a price, or if it does not fit."""
    price, hours = self.job.config.planning.price_per_chip_hour, self.chip_hours
    return price * hours if price and hours is not None else None

  @property
  def step_seconds(self) -> tuple[float, float, float] | None:
    """Returns low, expected, high; None if it does not fit."""
    if self.times is None:
      return None
    return prediction.range_of(self.times.step, self.kind, self.rates.spread)

  @property
  def rate(self) -> float | None:
    """Returns the tokens (or examples) per second and device, expected; None: it does not fit."""
    if self.step_seconds is None:
      return None
    return self.tokens / self.step_seconds[1] / self.job.mesh.size

  def flops(self, *, causal: bool = False) -> float:
    """Returns the model FLOPs of a step; see `mfu`."""
    config = self.job.config
    each = model_spec(config).train_flops_per_example(causal=causal)
    return each * TASKS[config.task].sequences * config.data.global_batch_size

  def mfu(self, *, causal: bool = False) -> float | None:
    """Returns model FLOPs utilization, attention's scores counted in full; None: it does not fit.

    Args:
      causal: only those that the mask leaves, as MaxText counts them.
    """
    if self.step_seconds is None:
      return None
    peak = self.topology.chip.flops * self.job.mesh.size
    return self.flops(causal=causal) / peak / self.step_seconds[1]

  def _memory_copies(self) -> int:
    """Returns the bytes of a node's memory that checkpoints in it take; 0 without any."""
    if not self.job.config.checkpoint.memory_every_steps:
      return 0
    devices = enumerate(self.job.mesh.devices.flat)
    node_of = {device: number // self.node_devices for number, device in devices}
    return memory_tier.host_bytes(vars(self.job.placed_state), node_of)

  def as_json(self) -> dict[str, Any]:
    """Returns the content of plan.json; if the plan does not fit, speeds are null."""
    names = ("low", "expected", "high")
    seconds = self.step_seconds and dict(zip(names, self.step_seconds, strict=True))
    return {
      "fits": self.fits,
      "topology": self.topology.name,
      "devices": self.job.mesh.size,
      "compiled": self.program is not None,
      "accuracy": self.accuracy,
      "peak_bytes_per_device": self.peak_bytes,
      "allocated_bytes_per_device": self.allocated_bytes,
      "hbm_bytes_per_device": int(self.topology.chip.hbm_bytes),
      "parameters": dict(zip(("total", "active"), self.job.parameter_counts(), strict=True)),
      "chosen": {one.key: one.value for one in self.job.choices},
      "compiler_options": self.job.compiler_defaults if self.program else {},
      "steps": math.ceil(self.token_budget / self.tokens),
      "state_bytes": sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.job.state)
      ),
      "nodes": math.ceil(self.job.mesh.size / self.node_devices),
      "memory_copies_bytes": self._memory_copies(),
      "node_host_bandwidth": self.node_devices * self.topology.chip.host_bandwidth,
      "memory": self.memory,
      "memory_at_once": self.memory_at_once,
      "host_memory": self.host_memory,
      "buffers": self.at_peak and self.at_peak.as_json(),
      "host_traffic": [vars(one) for one in self.host],
      "collectives": [_sent(one) for one in self.sent],
      "step_seconds": seconds,
      "step_parts": self.times and self.times.parts,
      "slowed_by_transfers": self.times and self.times.slowed,
      "timeline": self.timeline and dataclasses.asdict(self.timeline),
      "pipeline": self.job.program.pipeline and _pipeline(self.job.program.pipeline),
      "tokens_per_second_per_device": self.rate,
      "mfu": self.mfu(),
      "mfu_causal": self.mfu(causal=True),
      "token_budget": self.token_budget,
      "chip_hours": self.chip_hours,
      "cost": self.cost,
      "warnings": list(self.warnings),
      "advice": [one.overrides for one in self.advice.fitting],
      "gather_once": self.gather_once,
      "advice_bytes_per_device": [one.bytes for one in self.advice.fitting],
    }


def _pipeline(schedule: Schedule) -> dict[str, Any]:
  numbers = {"ticks": schedule.ticks, "bubble": schedule.bubble}
  return {**dataclasses.asdict(schedule), **numbers}


def _sent(one: step_time.Sent) -> dict[str, Any]:
  return {
    "axis": "+".join(one.axes),
    "kind": one.kind,
    "network": one.wire.network,
    "count": one.runs,
    "bytes": one.bytes,
    "seconds": one.seconds,
    "exposed_seconds": one.exposed_seconds,
    "source": one.source,
  }


def make(
  config: ConfigDict,
  topology_name: str | None,
  *,
  title: str = "",
  simulate: bool = False,
  here: aot.Here | None = None,
  progress: Callable[[str], None] = lambda phase: None,
  dumped: pathlib.Path | None = None,
  kept: str | None = None,
) -> Plan:
  """Returns the plan of a config.

  Args:
    config: as parsed, with overrides.
    topology_name: `v5p:4x4x4`; None: that of the attached devices.
    title: of the config.
    simulate: plans for simulated devices instead of the attached ones.
    here: the devices of this process, if already started; by default they are started here.
    progress: called with the current phase.
    dumped: where XLA writes buffers, by `buffers.xla_flags`; None: nowhere.
    kept: as `aot.compile_step` takes it.

  Raises:
    ValueError: bad input: the topology, the mesh, the layout, a constant.
  """
  target = aot.target_of(config, topology_name, simulate=simulate, here=here)
  topology, rates = target.topology, target.rates
  progress(f"laying out the state on {topology.name}")
  ready = target.job()
  step = of_job(ready)
  progress("tracing the memory of a device")
  layers = traced_step.by_the_layers(step)
  program, compiled, refused = None, None, ""
  where = aot.places(ready.mesh, topology)
  if aot.compiled_here(topology, target.here):
    progress(f"compiling the step for {ready.mesh.size} devices of {topology.name}")
    try:
      program = aot.compile_step(ready, dumped, kept)
    except NotImplementedError as refusal:  # of cuDNN's attention, without a GPU
      refused = f"not compiled, so all is by formula: {refusal}"
  if program is not None:
    progress("reading the compiled program")
    compiled = hlo.parse(program.text) if program.fits else None
  found = Plan(
    title,
    ready,
    topology,
    rates,
    program,
    memory.by_formula(step, layers),
    None,
    (*_warnings(ready, topology, compiled), *filter(None, [refused])),
    host_memory=memory.of_the_host(step, layers),
  )
  if not found.fits:
    progress("looking for overrides that fit")
    scale = found.allocated_bytes / found.memory_at_once
    advice = suggestions.overrides_that_fit(target, ready, scale)
    return dataclasses.replace(found, advice=advice)
  progress("timing the step")
  line, once = None, ""
  microbatches = step.training.gradient_accumulation_steps
  if compiled is None:
    times = analytic.times(step, where, topology.chip, rates)
    times = analytic.with_host_traffic(times, microbatches, found.host_memory, topology.chip, rates)
  else:
    sent = collectives(program.text, ready.mesh)
    times = step_time.times(compiled, sent, where, topology.chip, rates)
    free = topology.usable_bytes - found.allocated_bytes
    once = suggestions.gather_once_advice(step, times.sent, times.step, free)
    count = next(iter(traced_step.loops(step.model)), None)
    line = timelines.of(compiled, times, count)
    if not times.host and topology.platform == "cpu":  # its programs do not show it
      times = analytic.with_host_traffic(
        times, microbatches, found.host_memory, topology.chip, rates
      )
  return dataclasses.replace(found, times=times, timeline=line, gather_once=once)


def _warnings(ready: Job, topology: Topology, compiled: hlo.Program | None) -> Iterator[str]:
  sizes = ready.devices.sizes
  for placement in ready.placements["parameters"].values():
    if "r" in placement.letters:  # the half of an adapter without the model's width
      continue
    there = rules.bytes_per_device(placement, sizes)
    if rules.copies(placement, sizes) == math.prod(sizes.values()) > 1 and there >= LARGE_BYTES:
      yield f"{placement.name} is replicated on every device: {rules.size_text(there)}"
  if topology.platform == "tpu" and compiled is not None:
    yield from _padded(compiled)
  open_axes = [
    str(size)
    for size, closed in zip(topology.shape, topology.wraps(), strict=False)
    if size > 2 and not closed
  ]
  if open_axes:
    axes = "axis" if len(open_axes) == 1 else "axes"
    yield (
      f"{topology.name} has no wraparound links on its {axes} of {' and '.join(open_axes)}: "
      "collectives take about twice as long"
    )


def _padded(compiled: hlo.Program) -> Iterator[str]:
  """Yields the parameters that the compiler pads to tiles; only its layout shows which dims."""
  for name, shape in hlo.entry_parameters(compiled).items():
    size, padded = hlo.shape_bytes(shape), hlo.tiled_bytes(shape)
    if name.startswith("params/") and size >= LARGE_BYTES and padded > PADDED * size:
      yield (
        f"{name.removeprefix('params/')}: tiles pad {rules.size_text(size)} per device to "
        f"{rules.size_text(padded)}, in the compiler's layout {shape}"
      )
