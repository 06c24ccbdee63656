"""Suggests overrides that make a config fit: changes of few keys, tried by formula, cheapest first.

The formulas are scaled by the compiler's number for the original config, if there is one: what they
omit there they omit for similar configs too.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs.schema import memory_checks, unused
from planning import aot, memory
from planning.topology import Topology
from runtime import rematerialization
from training.setup import Job

MOST = 3  # pieces of advice
_TRIES = 12
_MARGIN = 0.95  # of a device's memory: the formulas are approximate


def overrides_that_fit(
  config: ConfigDict, ready: Job, topology: Topology, scale: float, here: aot.Here
) -> list[str]:
  """Returns overrides to copy, at most `MOST`, the cheapest first.

  Args:
    config: as parsed, with overrides.
    ready: its job.
    topology: that it does not fit.
    scale: its memory per device, as a multiple of the formulas'.
    here: the devices of this process.
  """
  found: list[str] = []
  for tried, (where, changed) in enumerate(_candidates(ready, topology)):
    if len(found) == MOST or tried == _TRIES:
      break
    needed = _needed(config, where, changed, here)
    if needed is not None and needed * scale <= _MARGIN * where.chip.hbm_bytes:
      more = [] if where is topology else [f"--topology={where.name}"]
      found.append(" ".join([*more, *(f"--config.{k}={v}" for k, v in changed.items())]))
  return found


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
  """Yields changes that might fit, those that cost the least time first."""
  sizes, training = ready.devices.sizes, ready.config.training
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
  on_host = ready.config.optimizer.state_memory == "host"
  if not on_host and not any(memory_checks.on_the_device(ready.config.optimizer)):
    steps.append({**most, "optimizer.state_memory": "host"})
  rows = ready.config.data.global_batch_size // (sizes["data"] * sizes["fsdp"])
  count = training.gradient_accumulation_steps
  if rows >= 2 * count:
    steps.append({**most, "training.gradient_accumulation_steps": rows})
  yield from ((topology, step) for step in steps)
  if one_slice and topology.platform != "cpu":  # more simulated devices have no more memory
    yield from _larger(ready, topology, most)


def _recomputing(ready: Job) -> Iterator[dict[str, str]]:
  """Yields other values of `training.rematerialization`, those that cost the least time first.

  Matmuls are not computed again, then they are, then the input of each layer is offloaded too: it
  is moved while the layer is computed.
  """
  key = "training.rematerialization"
  if key in unused.of_model(ready.config):
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
  """Yields slices of twice as many devices, and so on, whose devices split the parameters."""
  sizes, shape = ready.devices.sizes, list(topology.shape)
  rows = ready.config.data.global_batch_size
  rest = math.prod(size for axis, size in sizes.items() if axis not in ("data", "fsdp"))
  for _ in range(6):
    shape[shape.index(min(shape))] *= 2
    name = f"{topology.chip.name}:{'x'.join(map(str, shape))}"
    larger = dataclasses.replace(topology, name=name, shape=tuple(shape))
    fsdp = larger.devices // rest
    batch = {} if rows % fsdp == 0 else {"data.global_batch_size": fsdp}
    yield larger, {**changed, "mesh.data": 1, "mesh.fsdp": fsdp, **batch}
