"""Suggests overrides that make a config fit: changes of few keys, tried by formula, cheapest first.

Rematerialization, offloading to the host's memory, rows per device, and larger slices.

The formulas are scaled by the compiler's number for the original config, if there is one: what they
omit there they omit for similar configs too.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs.schema import step_checks, validate
from planning import aot, memory, slice_names
from planning.topology import Topology
from runtime import rematerialization
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


def overrides_that_fit(
  config: ConfigDict, ready: Job, topology: Topology, scale: float, here: aot.Here
) -> Advice:
  """Returns overrides with which a config fits, or what comes nearest.

  Args:
    config: as parsed, with overrides.
    ready: its job.
    topology: that it does not fit.
    scale: its memory per device, as a multiple of the formulas'.
    here: the devices of this process.
  """
  fitting: list[Suggestion] = []
  others: list[Suggestion] = []
  tried = 0
  for where, changed in itertools.islice(_candidates(ready, topology), _TRIES):
    if len(fitting) == MOST:
      break
    tried += 1
    needed = _needed(config, where, changed, here)
    if needed is None:
      continue
    more = [] if where is topology else [f"--topology={where.name}"]
    text = " ".join([*more, *(f"--config.{k}={v}" for k, v in changed.items())])
    one = Suggestion(text, round(needed * scale))
    (fitting if one.bytes <= _MARGIN * where.chip.hbm_bytes else others).append(one)
  smallest = None if fitting else min(others, key=lambda one: one.bytes, default=None)
  return Advice(tuple(fitting), tried, smallest)


def _needed(
  config: ConfigDict, topology: Topology, changed: Mapping[str, Any], here: aot.Here
) -> int | None:
  """Returns the bytes per device by formula; None if the config is refused."""
  other = copy.deepcopy(config)
  other.update_from_flattened_dict(dict(changed))
  try:
    job = aot.prepare(other, topology, here)
  except ValueError:
    return None
  return memory.at_once(memory.by_formula(job))


def _candidates(ready: Job, topology: Topology) -> Iterator[tuple[Topology, dict[str, Any]]]:
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

  Matmuls are not computed again, then they are, then the input of each layer is offloaded too: it
  is moved while the layer is computed.
  """
  key = "training.rematerialization"
  if key in validate.unread(ready.config):
    return
  names = rematerialization.names_of(ready.config.model)
  now = rematerialization.parse(ready.config.training.rematerialization, names)
  presets = rematerialization.PRESETS
  weaker = presets.index(now.preset) if now.preset and not now.given else 0
  for preset in presets[weaker + 1 :]:
    yield {key: preset}
  if names and now.by_name[rematerialization.LAYER_INPUT] != rematerialization.OFFLOAD:
    yield {key: "full,layer_input=offload"}


def _larger(
  ready: Job, topology: Topology, changed: Mapping[str, Any]
) -> Iterator[tuple[Topology, dict[str, Any]]]:
  """Yields slices of twice as many devices, and so on, whose devices split the parameters.

  As far as there are slices of that size.
  """
  sizes, shape = ready.devices.sizes, list(topology.shape)
  rows = ready.config.data.global_batch_size
  rest = math.prod(size for axis, size in sizes.items() if axis not in ("data", "fsdp"))
  most = slice_names.most_chips(topology.chip.name)
  for _ in range(6):
    shape[shape.index(min(shape))] *= 2
    if most and math.prod(shape) > most:
      return
    name = f"{topology.chip.name}:{'x'.join(map(str, shape))}"
    larger = dataclasses.replace(topology, name=name, shape=tuple(shape))
    fsdp = larger.devices // rest
    batch = {} if rows % fsdp == 0 else {"data.global_batch_size": fsdp}
    yield larger, {**changed, "mesh.data": 1, "mesh.fsdp": fsdp, **batch}
