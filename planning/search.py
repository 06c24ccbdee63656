"""Settings of a config on a topology by formula: which are fastest, and which fit a device.

For each mesh the time of a step that recomputes nothing is a lower bound of its others, if memory
is left out of account. Meshes are looked into in the order of that bound, until no other can be
among the fastest: best-first search (Land and Doig, Econometrica 28, 1960). Of pipeline stages,
whose ticks take long to trace, the bound is at first what the devices compute without stages.
"""

import copy
import dataclasses
import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.schema import finalize, step_checks
from partitioning.dims import axes_size
from partitioning.mesh_sizes import resolve_sizes
from planning import (
  activation_memory,
  analytic,
  aot,
  memory,
  passes,
  search_space,
  search_stages,
  suggestions,
  traced_cost,
)
from planning.activation_memory import OfTheLayers
from planning.host_transfers import with_host_traffic
from planning.search_choice import Estimate
from planning.search_space import BATCH, MICROBATCHES, OF_A_PIPELINE, REMATERIALIZATION, Setting
from planning.topology import Topology, with_slices
from runtime.chips import Rates
from training.setup import Job
from training.tasks import TASKS

# Parts of the memory that microbatches divide.
_OF_ROWS = ("saved activations", "activations of one layer", "logits")


@dataclasses.dataclass
class Formulas:
  """Estimates settings by formula; what was estimated before is known.

  Attributes:
    config: as parsed, with overrides.
    topology: the devices.
    here: the devices of this process.
    rates: achieved shares of the chip's constants.
    limit: bytes of a device's memory.
    known: settings as JSON -> estimate, also those of earlier searches.
    used: those of this one.
    note: called with each new one.
  """

  config: ConfigDict
  topology: Topology
  here: aot.Here
  rates: Rates
  limit: float
  known: dict[str, Estimate] = dataclasses.field(default_factory=dict)
  used: dict[str, Estimate] = dataclasses.field(default_factory=dict)
  note: Callable[[Estimate], None] = lambda one: None
  _layers: dict[str, OfTheLayers] = dataclasses.field(default_factory=dict)
  _operations: dict[str, Any] = dataclasses.field(default_factory=dict)

  def job(self, setting: Mapping[str, Any]) -> Job:
    """Returns the job of a setting.

    Raises:
      ValueError: it is refused.
    """
    other = copy.deepcopy(self.config)
    other.update_from_flattened_dict(dict(setting))
    return aot.prepare(other, self.topology, self.here)

  def estimate(self, setting: Mapping[str, Any]) -> Estimate:
    """Returns the memory and the time of a setting."""
    setting = search_space.changed(self.config, setting)
    key = json.dumps(setting, sort_keys=True)
    if key not in self.known:
      self.known[key] = self._estimate(setting)
      self.note(self.known[key])
    self.used[key] = self.known[key]
    return self.known[key]

  def _estimate(self, setting: Setting) -> Estimate:
    try:
      ready = self.job(setting)
    except ValueError as error:
      return Estimate(setting, refused=" ".join(str(error).split()))
    chip = self.topology.chip
    layers = self._once(self._layers, ready, True, activation_memory.by_the_layers)
    parts = memory.by_formula(ready, layers)
    traced = self._once(self._operations, ready, False, traced_cost.operations)
    where = aot.places(ready.mesh, self.topology)
    times = analytic.times(ready, where, chip, self.rates, traced=traced)
    held = memory.of_the_host(ready, layers)
    times = with_host_traffic(times, ready, held, chip, self.rates)
    data = ready.config.data
    of_tokens = TASKS[ready.config.task].of_tokens
    return Estimate(
      setting,
      mesh={axis: size for axis, size in ready.devices.sizes.items() if size > 1},
      bytes=memory.at_once(parts),
      of_rows=sum(memory.at_peak(parts).get(name, 0) for name in _OF_ROWS)
      + search_stages.divided(ready.config, parts),
      sums=parts["gradients"] if ready.config.training.gradient_accumulation_steps == 1 else 0,
      seconds=times.step,
      compute=times.compute,
      tokens=data.global_batch_size * (data.sequence_length if of_tokens else 1),
      rows=data.global_batch_size // _parts(ready),
      chunks=ready.config.training.loss_chunks,
      rematerialization=ready.config.training.rematerialization,
      microbatches=passes.of_job(ready).microbatches,
    )

  def _once(
    self, found: dict[str, Any], ready: Job, at_once: bool, trace: Callable[[Job], Any]
  ) -> Any:
    """Returns what is traced of one device's part of the model: meshes with the same part share it.

    `data` and `fsdp` divide the rows alone, which the part has already.
    """
    part, share = activation_memory.part(ready, at_once=at_once)
    flat = {k: v for k, v in _flat(part.to_dict()) if k.partition(".")[0] not in _NOT_TRACED}
    alike = ("data", "fsdp", *((search_space.STAGE,) if at_once else ()))
    sizes = {axis: n for axis, n in ready.devices.sizes.items() if axis not in alike}
    if at_once:  # a chunk's layers and rows, whatever the schedule
      flat = {key: value for key, value in flat.items() if key not in _OF_SCHEDULES}
    key = json.dumps([flat, share, sizes], sort_keys=True, default=str)
    if key not in found:
      found[key] = trace(ready)
    return found[key]


def _parts(ready: Job) -> int:
  """Returns into how many parts the rows of a batch are divided over devices."""
  table = ready.activations.table[ready.legend["B"].name]
  return axes_size(table, ready.devices.sizes)


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
  """

  formulas: Formulas
  names: tuple[str, ...]
  batches: tuple[int, ...] = ()
  most: int = 8
  progress: Callable[[str], None] = lambda phase: None

  def run(self) -> list[Estimate]:
    """Returns all estimates of settings that are not refused, and fills in the rest."""
    formulas, batches = self.formulas, [{BATCH: rows} for rows in self.batches] or [{}]
    resolved = finalize.finalize(formulas.config, formulas.topology.platform)
    tables = search_space.tables(resolved)
    settings = [{**mesh, **batch} for mesh in self._meshes(resolved) for batch in batches]
    bounds = self._bounds(settings, tables[0])
    heapq.heapify(bounds)
    looked = 0
    while bounds and (first := heapq.heappop(bounds))[0] < self._to_beat():
      _, number, known = first
      looked += known
      self.progress(f"settings of mesh {looked} of at most {len(settings)} by formula")
      if known:
        self._of_mesh(settings[number], tables)
      elif (bound := self._bound(settings[number], tables[0])) < math.inf:
        heapq.heappush(bounds, (max(bound, first[0]), number, True))
    for place, one in enumerate(self.fastest()[: self.most // 2]):
      self.progress(f"variants of {place + 1} of the {self.most // 2} fastest by formula")
      stages, more = self._stages(one.setting), 0
      if stages > 1:
        more = next(iter(self._more(one)), 0)
      for setting in search_space.variants(resolved, one.setting, one.chunks, more):
        formulas.estimate(setting)
    return [one for one in formulas.used.values() if not one.refused]

  @property
  def devices(self) -> int:
    """Returns the number of devices, of all slices."""
    over = with_slices(self.formulas.config, self.formulas.topology).mesh_dcn
    return self.formulas.topology.devices * math.prod(over.values())

  @property
  def over(self) -> dict[str, int]:
    """Returns the overrides of `mesh_dcn` that the topology's number of slices stands for."""
    config = self.formulas.config
    over = with_slices(config, self.formulas.topology).mesh_dcn
    return {f"mesh_dcn.{k}": size for k, size in over.items() if config.mesh_dcn[k] != size}

  @property
  def given(self) -> str | None:
    """Returns the key of the config's own setting; None if it is refused on these devices."""
    mesh = self.formulas.config.mesh
    try:
      sizes = resolve_sizes(mesh, self.formulas.topology.devices)
    except ValueError:
      return None
    filled = {f"mesh.{axis}": sizes[axis] for axis, size in mesh.items() if size < 1}
    one = self.formulas.estimate(filled)
    return None if one.refused else one.key

  @property
  def unit(self) -> str:
    """Returns the unit of a batch, tokens or examples."""
    return TASKS[self.formulas.config.task].unit

  @property
  def budget(self) -> float:
    """Returns the tokens (or examples) to train on, with the config's own batch size."""
    formulas = self.formulas
    resolved = finalize.finalize(formulas.config, formulas.topology.platform)
    rows = resolved.training.steps * resolved.data.global_batch_size
    each = resolved.data.sequence_length if self.unit == "tokens" else 1
    return formulas.config.planning.token_budget or float(rows * each)

  def _meshes(self, resolved: ConfigDict) -> list[Setting]:
    """Returns the overrides of each mesh."""
    config, devices = self.formulas.config, self.formulas.topology.devices
    layers = resolved.model.layers if "layers" in resolved.model else 0
    found, plain = [], search_stages.without(config)
    for mesh in search_space.meshes(config, self.names, devices, layers):
      setting = {f"mesh.{axis}": size for axis, size in mesh.items()}
      found.append({**setting, **(plain if self._stages(setting) == 1 else {})})
    return found

  def _stages(self, setting: Mapping[str, Any]) -> int:
    return search_space.stages(self.formulas.config, setting)

  def _bounds(self, settings: Sequence[Setting], table: str) -> list[tuple[float, int, bool]]:
    """Returns (bound, number, whether it is estimated) of each mesh that is not refused."""
    bounds, later = [], []
    least: dict[str, Estimate] = {}
    for number, setting in enumerate(settings):
      if self._stages(setting) > 1:
        later.append(number)
        continue
      self.progress(f"mesh {number + 1} of {len(settings)} by formula")
      if (bound := self._bound(setting, table)) < math.inf:
        bounds.append((bound, number, True))
        least[_inner(setting)] = self._without_recomputing(setting, table)
    parts = search_stages.chunks(self.formulas.config)
    for number in later:
      stages, one = self._stages(settings[number]), least.get(_inner(settings[number]))
      bound = 0.0
      if one:
        bound = one.compute / one.tokens * search_stages.least(stages, stages * one.rows, parts)
      bounds.append((bound, number, False))
    return bounds

  def _without_recomputing(self, setting: Setting, table: str) -> Estimate:
    return self.formulas.estimate({**setting, MICROBATCHES: 1, REMATERIALIZATION: table})

  def _bound(self, setting: Setting, table: str) -> float:
    """Returns the least seconds per token of a mesh's settings; infinity if they are refused."""
    one, stages = self._without_recomputing(setting, table), self._stages(setting)
    if one.refused:
      return math.inf
    parts = search_stages.chunks(self.formulas.config)
    least = search_stages.ticks(stages, one.rows, parts)  # with a microbatch for each row
    return one.seconds_per_token * least / search_stages.ticks(stages, one.microbatches, parts)

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
    config, count = self.formulas.config, one.microbatches
    return search_stages.more_microbatches(config, stages, one.rows, count)

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
  config = copy.deepcopy(formulas.config)
  config.update_from_flattened_dict(dict(setting))
  ready = formulas.job(setting)
  given = suggestions.overrides_that_fit(config, ready, formulas.topology, scale, formulas.here)
  found = []
  for one in given.fitting:
    pairs = [word.lstrip("-").partition("=") for word in one.overrides.split()]
    more = {
      key.removeprefix("config."): int(value) if value.isdigit() else value
      for key, _, value in pairs
      if key != "topology"
    }
    topology = next((value for key, _, value in pairs if key == "topology"), "")
    found.append((more, topology, one.bytes))
  return found


def refusals(used: Mapping[str, Estimate]) -> dict[str, int]:
  """Returns why settings were refused, and how many for each reason, the most frequent first."""
  counts: dict[str, int] = {}
  for one in used.values():
    if one.refused:
      counts[one.refused] = counts.get(one.refused, 0) + 1
  return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def limit_of(config: ConfigDict, topology: Topology) -> float:
  """Returns the bytes of a device's memory that a setting may take.

  Raises:
    ValueError: `memory_limit_gib` is not positive.
  """
  given = config.memory_limit_gib
  if given is None:
    return topology.chip.hbm_bytes
  if given <= 0:
    raise ValueError(f"memory_limit_gib={given:g}: above 0, or unset for all of a device's memory")
  # Simulated devices share the machine's.
  share = topology.devices if topology.platform == "cpu" else 1
  return min(topology.chip.hbm_bytes, given * 2**30 / share)
