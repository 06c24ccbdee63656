"""Settings of a config on a topology by formula: which are fastest, and which fit a device.

For each mesh the time of a step that recomputes nothing is a lower bound of its others, if memory
is left out of account. Meshes are looked into in the order of that bound, until no other can be
among the fastest: best-first search (Land and Doig, Econometrica 28, 1960). Of pipeline stages,
whose ticks take long to trace, the bound is at first what the devices compute without stages.
"""

import dataclasses
import heapq
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.schema import finalize, step_checks
from partitioning.mesh_sizes import resolve_sizes
from planning import analytic, aot, memory, search_space, suggestions, traced_step
from planning.aot import Target
from planning.search_results import Estimate
from planning.search_space import (
  BATCH,
  MICROBATCHES,
  OF_A_PIPELINE,
  REMATERIALIZATION,
  Setting,
  Space,
)
from planning.step_facts import StepFacts, of_job
from planning.topology import with_slices
from planning.traced_step import OfTheLayers
from runtime.units import clock
from training.setup import Job
from training.tasks import TASKS

_VARIANTS = 3  # of each of the fastest, about
# Parts of the memory that microbatches divide.
_OF_ROWS = ("saved activations", "activations of one layer", "logits")


@dataclasses.dataclass
class Formulas:
  """Estimates settings by formula; what was estimated before is known.

  Attributes:
    target: the config and its devices.
    limit: bytes of a device's memory.
    known: settings as JSON -> estimate, also those of earlier searches.
    used: those of this one.
    note: called with each new one.
    seconds: that the new ones took, each.
  """

  target: Target
  limit: float
  known: dict[str, Estimate] = dataclasses.field(default_factory=dict)
  used: dict[str, Estimate] = dataclasses.field(default_factory=dict)
  note: Callable[[Estimate], None] = lambda one: None
  seconds: list[float] = dataclasses.field(default_factory=list)
  _layers: dict[str, OfTheLayers] = dataclasses.field(default_factory=dict)
  _operations: dict[str, Any] = dataclasses.field(default_factory=dict)

  def job(self, setting: Mapping[str, Any]) -> Job:
    """Returns the job of a setting.

    Raises:
      ValueError: it is refused.
    """
    return self.target.changed(setting).job()

  @property
  def space(self) -> Space:
    """Returns the settings of the config."""
    return Space(self.target.keys)

  def estimate(self, setting: Mapping[str, Any]) -> Estimate:
    """Returns the memory and the time of a setting."""
    setting = self.space.changed(setting)
    key = json.dumps(setting, sort_keys=True)
    if key not in self.known:
      began = time.monotonic()
      self.known[key] = self._estimate(setting)
      self.seconds.append(time.monotonic() - began)
      self.note(self.known[key])
    self.used[key] = self.known[key]
    return self.known[key]

  def _estimate(self, setting: Setting) -> Estimate:
    try:
      step = of_job(self.job(setting))
    except ValueError as error:
      return Estimate(setting, refused=" ".join(str(error).split()))
    chip, rates = self.target.topology.chip, self.target.rates
    layers = self._once(self._layers, step, True, traced_step.by_the_layers)
    parts = memory.by_formula(step, layers)
    traced = self._once(self._operations, step, False, traced_step.operations)
    where = aot.places(step.mesh, self.target.topology)
    times = analytic.times(step, where, chip, rates, traced=traced)
    held = memory.of_the_host(step, layers)
    count = step.training.gradient_accumulation_steps
    times = analytic.with_host_traffic(times, count, held, chip, rates)
    data, training = step.data, step.training
    of_tokens = TASKS[step.keys.task].of_tokens
    return Estimate(
      setting,
      mesh={axis: size for axis, size in step.sizes.items() if size > 1},
      bytes=memory.at_once(parts),
      of_rows=sum(memory.at_peak(parts).get(name, 0) for name in _OF_ROWS)
      + Space(step.keys).divided_inputs(parts),
      sums=parts["gradients"] if training.gradient_accumulation_steps == 1 else 0,
      seconds=times.step,
      compute=times.compute,
      tokens=data.global_batch_size * (data.sequence_length if of_tokens else 1),
      rows=data.global_batch_size // step.parts("B"),
      chunks=training.loss_chunks,
      rematerialization=training.rematerialization,
      microbatches=step.passes.microbatches,
    )

  def _once(
    self, found: dict[str, Any], step: StepFacts, at_once: bool, trace: Callable[[StepFacts], Any]
  ) -> Any:
    """Returns what is traced of one device's part of the model: meshes with the same part share it.

    `data` and `fsdp` divide the rows alone, which the part has already.
    """
    part = traced_step.part_of(step, at_once=at_once)
    flat = {k: v for k, v in _flat(part.keys.to_dict()) if k.partition(".")[0] not in _NOT_TRACED}
    alike = ("data", "fsdp", *((search_space.STAGE,) if at_once else ()))
    sizes = {axis: n for axis, n in step.sizes.items() if axis not in alike}
    if at_once:  # a chunk's layers and rows, whatever the schedule
      flat = {key: value for key, value in flat.items() if key not in _OF_SCHEDULES}
    key = json.dumps([flat, part.share, sizes], sort_keys=True, default=str)
    if key not in found:
      found[key] = trace(step)
    return found[key]


_NOT_TRACED = ("mesh", "mesh_dcn", "planning")
_OF_SCHEDULES = step_checks.OF_STAGES


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for key, value in section.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


@dataclasses.dataclass
class Search:
  """Looks for the fastest settings.

  Attributes:
    formulas: the estimates.
    names: mesh axes whose size is searched.
    batches: rows of a step that are tried; () for those of the config.
    most: fastest settings that are wanted.
    progress: called with what is being done.
    tell: called with how long it will take, once that is known.
  """

  formulas: Formulas
  names: tuple[str, ...]
  batches: tuple[int, ...] = ()
  most: int = 8
  progress: Callable[[str], None] = lambda phase: None
  tell: Callable[[str], None] = lambda text: None
  _expected: int = 0

  def run(self) -> list[Estimate]:
    """Returns all estimates of settings that are not refused, and fills in the rest."""
    formulas, batches = self.formulas, [{BATCH: rows} for rows in self.batches] or [{}]
    resolved = finalize.finalize(formulas.target.keys, formulas.target.topology.platform)
    tables = Space(resolved).tables()
    settings = [{**mesh, **batch} for mesh in self._meshes(resolved) for batch in batches]
    some = min(self.most, len(settings))
    self._expected = len(settings)
    if len(tables) > 1:
      self._expected += some * (len(tables) - 1) + some // 2 * _VARIANTS
    before = len(formulas.known) - len(formulas.seconds)
    for setting in (one for one in settings if self._stages(one) == 1):
      self._without_recomputing(setting, tables[0])
      if formulas.seconds:  # a new one tells how long the others take
        break
    known = f", {before} of them known from an earlier search" if before else ""
    meshes = f"{len(settings)} {'mesh' if len(settings) == 1 else 'meshes'}"
    self.tell(f"{meshes}, about {self._expected} settings by formula{known}{self._left()}")
    bounds = self._bounds(settings, tables[0])
    heapq.heapify(bounds)
    looked = 0
    while bounds and (first := heapq.heappop(bounds))[0] < self._to_beat():
      _, number, known = first
      looked += known
      self.progress(
        f"settings of mesh {looked} of at most {len(settings)} by formula{self._left()}"
      )
      if known:
        self._of_mesh(settings[number], tables)
      elif (bound := self._bound(settings[number], tables[0])) < math.inf:
        heapq.heappush(bounds, (max(bound, first[0]), number, True))
    for place, one in enumerate(self.fastest()[: self.most // 2]):
      self.progress(f"variants of {place + 1} of the {self.most // 2} fastest by formula")
      stages, more = self._stages(one.setting), 0
      if stages > 1:
        more = next(iter(self._more(one)), 0)
      for setting in Space(resolved).variants(one.setting, one.chunks, more):
        formulas.estimate(setting)
    return [one for one in formulas.used.values() if not one.refused]

  @property
  def devices(self) -> int:
    """Returns the number of devices, of all slices."""
    over = with_slices(self.formulas.target.keys, self.formulas.target.topology).mesh_dcn
    return self.formulas.target.topology.devices * math.prod(over.values())

  @property
  def over(self) -> dict[str, int]:
    """Returns the overrides of `mesh_dcn` that the topology's number of slices stands for."""
    config = self.formulas.target.keys
    over = with_slices(config, self.formulas.target.topology).mesh_dcn
    return {f"mesh_dcn.{k}": size for k, size in over.items() if config.mesh_dcn[k] != size}

  @property
  def given(self) -> str | None:
    """Returns the key of the config's own setting; None if it is refused on these devices."""
    mesh = self.formulas.target.keys.mesh
    try:
      sizes = resolve_sizes(mesh, self.formulas.target.topology.devices)
    except ValueError:
      return None
    filled = {f"mesh.{axis}": sizes[axis] for axis, size in mesh.items() if size < 1}
    one = self.formulas.estimate(filled)
    return None if one.refused else one.key

  @property
  def unit(self) -> str:
    """Returns the unit of a batch, tokens or examples."""
    return TASKS[self.formulas.target.keys.task].unit

  @property
  def budget(self) -> float:
    """Returns the tokens (or examples) to train on, with the config's own batch size."""
    formulas = self.formulas
    resolved = finalize.finalize(formulas.target.keys, formulas.target.topology.platform)
    rows = resolved.training.steps * resolved.data.global_batch_size
    each = resolved.data.sequence_length if self.unit == "tokens" else 1
    return formulas.target.keys.planning.token_budget or float(rows * each)

  def _left(self) -> str:
    """Returns `, about 2:10 left`, by what the estimates so far took; "" if all were known."""
    if not (took := self.formulas.seconds):
      return ""
    left = max(self._expected - len(self.formulas.known), 0)
    return f", about {clock(sum(took) / len(took) * left)} left"

  def _meshes(self, resolved: ConfigDict) -> list[Setting]:
    """Returns the overrides of each mesh."""
    space, devices = self.formulas.space, self.formulas.target.topology.devices
    layers = resolved.model.layers if "layers" in resolved.model else 0
    found, plain = [], space.without_pipeline()
    for mesh in space.meshes(self.names, devices, layers):
      setting = {f"mesh.{axis}": size for axis, size in mesh.items()}
      found.append({**setting, **(plain if self._stages(setting) == 1 else {})})
    return found

  def _stages(self, setting: Mapping[str, Any]) -> int:
    return self.formulas.space.stages(setting)

  def _bounds(self, settings: Sequence[Setting], table: str) -> list[tuple[float, int, bool]]:
    """Returns (bound, number, whether it is estimated) of each mesh that is not refused."""
    bounds, later = [], []
    least: dict[str, Estimate] = {}
    for number, setting in enumerate(settings):
      if self._stages(setting) > 1:
        later.append(number)
        continue
      self.progress(f"mesh {number + 1} of {len(settings)} by formula{self._left()}")
      if (bound := self._bound(setting, table)) < math.inf:
        bounds.append((bound, number, True))
        least[_inner(setting)] = self._without_recomputing(setting, table)
    parts = self.formulas.space.chunks_of_stage()
    for number in later:
      stages, one = self._stages(settings[number]), least.get(_inner(settings[number]))
      bound = 0.0
      if one:
        bound = (
          one.compute / one.tokens * search_space.least_by_stages(stages, stages * one.rows, parts)
        )
      bounds.append((bound, number, False))
    return bounds

  def _without_recomputing(self, setting: Setting, table: str) -> Estimate:
    return self.formulas.estimate({**setting, MICROBATCHES: 1, REMATERIALIZATION: table})

  def _bound(self, setting: Setting, table: str) -> float:
    """Returns the least seconds per token of a mesh's settings; infinity if they are refused."""
    one, stages = self._without_recomputing(setting, table), self._stages(setting)
    if one.refused:
      return math.inf
    parts = self.formulas.space.chunks_of_stage()
    least = search_space.ticks_of_step(stages, one.rows, parts)  # with a microbatch for each row
    return (
      one.seconds_per_token * least / search_space.ticks_of_step(stages, one.microbatches, parts)
    )

  def _of_mesh(self, setting: Setting, tables: Sequence[str]) -> None:
    """Estimates each table of a mesh, if the one with the least memory fits."""
    least = self._of_table(setting, search_space.least(tables))
    if least.refused or not least.fits(self.formulas.limit):
      return  # nor do the others
    for table in tables:
      self._of_table(setting, table)

  def _of_table(self, setting: Setting, table: str) -> Estimate:
    """Returns a table with as few microbatches as fit.

    Of a pipeline those that it has anyway: gradients that are accumulated beside them would take
    memory for their sum.
    """
    one = self.formulas.estimate({**setting, REMATERIALIZATION: table, MICROBATCHES: 1})
    if one.refused or one.bytes <= self.formulas.limit:
      return one
    if self._stages(setting) > 1:
      key, sums, counts, now = OF_A_PIPELINE, 0, self._more(one), one.microbatches
    else:
      key, sums, counts, now = MICROBATCHES, one.sums, search_space.microbatches(one.rows)[1:], 1
    if not counts:
      return one
    rest = one.bytes - one.of_rows + sums
    fit = (count for count in counts if rest + one.of_rows * now / count <= self.formulas.limit)
    return self.formulas.estimate({**one.setting, key: next(fit, counts[-1])})

  def _more(self, one: Estimate) -> Sequence[int]:
    """Returns numbers of a pipeline's microbatches that are larger than a setting's."""
    stages = self._stages(one.setting)
    return self.formulas.space.more_microbatches(stages, one.rows, one.microbatches)

  def fastest(self) -> list[Estimate]:
    """Returns the settings that fit, the fastest per token first."""
    fit = (one for one in self.formulas.used.values() if one.fits(self.formulas.limit))
    return sorted(fit, key=lambda one: (one.seconds_per_token, one.bytes))

  def _to_beat(self) -> float:
    """Returns the seconds per token of the slowest of the wanted meshes, one setting each."""
    best: dict[str, float] = {}
    for one in self.fastest():
      best.setdefault(json.dumps(one.mesh, sort_keys=True), one.seconds_per_token)
    seconds = sorted(best.values())
    return seconds[self.most - 1] if len(seconds) >= self.most else math.inf


def _inner(setting: Mapping[str, Any]) -> str:
  """Returns what meshes have in common whose devices compute the same without stages."""
  some = {k: v for k, v in setting.items() if k not in ("mesh.data", "mesh.fsdp", "mesh.stage")}
  return json.dumps(
    {k: v for k, v in some.items() if not k.startswith("training.")}, sort_keys=True
  )


def nearest(formulas: Formulas, setting: Setting, scale: float) -> list[tuple[Setting, str, int]]:
  """Returns what a setting that does not fit needs in addition to fit.

  Args:
    formulas: of the topology.
    setting: that comes nearest.
    scale: its memory per device, as a multiple of the formulas'.

  Returns:
    Overrides beside the setting's, the topology if it is another one ("" if not), and the bytes per
    device by formula; of several ways the one that costs the least time first.
  """
  target = formulas.target.changed(setting)
  given = suggestions.overrides_that_fit(target, target.job(), scale)
  return [(one.changed, one.topology, one.bytes) for one in given.fitting]


def refusals(used: Mapping[str, Estimate]) -> dict[str, int]:
  """Returns why settings were refused, and how many for each reason, the most frequent first."""
  return dict(Counter(one.refused for one in used.values() if one.refused).most_common())


def limit_of(target: Target) -> float:
  """Returns the bytes of a device's memory that a setting may take.

  Raises:
    ValueError: `memory_limit_gib` is not positive.
  """
  given, topology = target.keys.memory_limit_gib, target.topology
  if given is None:
    return topology.usable_bytes
  if given <= 0:
    raise ValueError(f"memory_limit_gib={given:g}: above 0, or unset for all of a device's memory")
  # Simulated devices share the machine's.
  share = topology.devices if topology.platform == "cpu" else 1
  return min(topology.usable_bytes, given * 2**30 / share)


# Runs of a few steps on the attached devices, to time settings that formulas rank badly.

STEPS = 5  # of a run, without the first
LEAST_SECONDS = 1.0  # of a run: steps of microseconds are taken more often
MOST_STEPS = 50
SLOWER = 1.05  # of the fastest of two rounds: more than the least times of the same steps differ
_SEED = 0


@dataclasses.dataclass
class Run:
  """A setting on the attached devices.

  Attributes:
    bytes: peak memory of a device, by the compiler; 0 if it failed.
    seconds: of the fastest step; None if it does not fit, or failed.
    failed: why; "" if it did not.
  """

  bytes: int = 0
  seconds: float | None = None
  failed: str = ""


def measure(
  jobs: Sequence[Job],
  limit: float,
  rounds: int = 1,
  progress: Callable[[int], None] = lambda n: None,
) -> list[Run]:
  """Returns memory and seconds per step of each job, of the fastest step of all rounds.

  Other work on the machine makes steps slower, never faster. Rounds alternate between the jobs, so
  that it meets all of them; only one has a state at a time. After two rounds what is `SLOWER` than
  the fastest is not run again, and one job that is left is not either.

  Args:
    jobs: prepared, for the attached devices.
    limit: bytes of a device: what needs more is not run.
    rounds: runs of each job.
    progress: called with the number of each job before its run.
  """
  runs, steps = [Run() for _ in jobs], [None for _ in jobs]
  for turn in range(rounds):
    again = _near(jobs, runs) if turn > 1 else range(len(jobs))
    if turn > 1 and len(again) < 2:
      break
    for number in again:
      job, run = jobs[number], runs[number]
      if run.failed or run.bytes > limit:
        continue
      progress(number)
      try:
        if steps[number] is None:
          program, steps[number] = aot.compile_to_run(job)
          run.bytes = program.peak_bytes
          if steps[number] is None or run.bytes > limit:
            continue
        took = _fastest(stepper(job, steps[number]))
      except (jax.errors.JaxRuntimeError, ValueError) as error:
        run.seconds, run.failed = None, next(iter(str(error).splitlines()), "failed")
        continue
      run.seconds = min(took, run.seconds or math.inf)
  return runs


def _near(jobs: Sequence[Job], runs: Sequence[Run]) -> list[int]:
  """Returns the numbers of the jobs that may be the fastest per row of a batch."""
  each = [
    math.inf if run.seconds is None else run.seconds / job.config.data.global_batch_size
    for job, run in zip(jobs, runs, strict=True)
  ]
  return [number for number, seconds in enumerate(each) if seconds <= SLOWER * min(each) < math.inf]


def stepper(job: Job, step: Callable[..., Any] | None = None) -> Callable[[], dict[str, jax.Array]]:
  """Returns a function that takes a train step on a batch of random rows; it returns the metrics.

  Args:
    job: whose step it is.
    step: compiled; None: it is compiled here.
  """
  step = step or job.compile_train_step().function
  batch = jax.device_put(example(job.batch, job.config.model), job.batch_shardings)
  state = job.initial_state()

  def take() -> dict[str, jax.Array]:
    nonlocal state
    state, metrics = jax.block_until_ready(step(state, batch))
    return metrics

  return take


def _fastest(take: Callable[[], Any]) -> float:
  """Returns the seconds of the fastest of some steps."""
  take()  # also allocates
  seconds: list[float] = []
  while len(seconds) < STEPS or (sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_STEPS):
    began = time.perf_counter()
    take()
    seconds.append(time.perf_counter() - began)
  return min(seconds)


def example(abstract: Mapping[str, jax.ShapeDtypeStruct], model: ConfigDict) -> Mapping[str, Any]:
  """Returns a batch of random tokens, classes and values, in which every row counts."""
  random = np.random.default_rng(_SEED)
  classes = model.get("vocabulary_size") or model.get("output_size") or 2
  batch = {}
  for name, array in abstract.items():
    if name == "weights":
      values = np.ones(array.shape)
    elif name in ("segments", "positions"):
      values = np.zeros(array.shape)
    elif np.issubdtype(array.dtype, np.integer):
      values = random.integers(0, classes, array.shape)
    else:
      values = random.standard_normal(array.shape)
    batch[name] = values.astype(array.dtype)
  return batch
