"""Memory of a step on one device, by formula: to compare with the compiler's number.

Parameters, gradients and optimizer state follow from the layout. Saved activations, and the peak of
one layer's backward pass, come from the traced gradients of a device's part of the model
(`planning.activation_memory`).
"""

import math
from collections.abc import Mapping

import numpy as np

from models.layer_stack import STACKS
from partitioning.dims import axes_size, spec_axes
from partitioning.dtypes import wide_dtype
from partitioning.rules import HOST
from partitioning.shardings import bytes_per_device, shard_shape
from planning import activation_memory, kept_kernels, passes
from planning.activation_memory import OfTheLayers
from training.setup import Job

# What is allocated all the time; and only while the losses, or one layer's gradients, are computed.
_ALWAYS = (
  *("parameters", "optimizer state", "accumulated gradients", "saved activations"),
  *("saved gathered kernels", "saved inputs of chunks", "parameters by chunk"),
  *("parameters, gathered", "last backward pass"),
)
_LOSSES = ("logits", "unembedding")
_LAYER = (
  *("gradients", "activations of one layer", "collective buffers"),
  *("kernels of one layer", "parameters of a chunk"),
)


def of_the_host(job: Job, layers: OfTheLayers) -> dict[str, int]:
  """Returns part -> bytes of the host's memory for one device; parts of 0 bytes are left out."""
  state = job.placements["optimizer"].values()
  state = sum(bytes_per_device(p, job.devices.sizes) for p in state if p.memory == HOST)
  parts = {"optimizer state": state, "activations": layers.offloaded}
  return {name: size for name, size in parts.items() if size}


def by_formula(job: Job, layers: OfTheLayers | None = None) -> dict[str, int]:
  """Returns part -> bytes per device; `at_once` gives the peak.

  Args:
    job: a prepared job.
    layers: the memory of its layers' activations; None: traced here.
  """
  layers = layers or activation_memory.by_the_layers(job)
  sizes = job.devices.sizes
  parameters = list(job.placements["parameters"].values())
  there = sum(bytes_per_device(p, sizes) for p in parameters)
  trained = sum(
    math.prod(shard_shape(p.shape, p.spec, sizes)) * wide_dtype(p.dtype).itemsize
    for p in parameters
    if p.name in job.program.trained
  )
  state = job.placements["optimizer"].values()
  optimizer = sum(bytes_per_device(p, sizes) for p in state if p.memory != HOST)
  kept = 0 if job.config.partitioning.reshard_after_forward else kept_kernels.of_all_layers(job)
  accumulates = job.config.training.gradient_accumulation_steps > 1
  sums = trained if accumulates else 0
  if job.program.pipeline:
    trained, sums = _of_a_chunk(job), sums + _of_a_chunk(job, chunks=1)
  parts = {
    "parameters": there,
    "gradients": trained,  # float32 or wider
    "accumulated gradients": sums,
    "optimizer state": optimizer,
    "saved activations": layers.kept,
    "activations of one layer": layers.most,
    "logits": _logits(job),
    "unembedding": _unembedding(job),
    "collective buffers": _gathered(job),
  }
  more = {"saved gathered kernels": kept, "kernels of one layer": _of_a_layer(job)}
  more |= _of_stages(job)
  if (schedule := job.program.pipeline) and schedule.ticks - schedule.forward_ticks == 1:
    # A loop of one tick becomes a part of the program, which sets its buffers to zero as it begins.
    more["last backward pass"] = trained + layers.kept
  return parts | {name: size for name, size in more.items() if size}


def _copies(job: Job) -> bool:
  """Returns whether the compiler copies what a loop reads and writes of a stack, as a CPU's does.

  Those for accelerators read and write in place.
  """
  return job.devices.platform == "cpu"


def _of_a_layer(job: Job) -> int:
  """Returns the bytes of copies of a layer's stacked parameters, and of their gradients."""
  if not _copies(job):
    return 0
  sizes, total = {**job.devices.sizes, "fsdp": 1}, 0
  for placement in job.placements["parameters"].values():
    if not placement.letters.startswith("L"):
      continue
    shape = shard_shape(placement.shape, placement.spec, sizes)
    arrays = 2 if placement.name in job.program.trained else 1
    total += arrays * math.prod(shape[1:]) * wide_dtype(placement.dtype).itemsize
  return total


def _of_a_chunk(job: Job, chunks: int | None = None) -> int:
  """Returns the bytes of the gradients of one backward pass on a stage.

  Args:
    job: with pipeline stages.
    chunks: of a stage; None: the schedule's.
  """
  split, others = (
    sum(4 * n for name, n in passes.of_stages(job, split=way) if name in job.program.trained)
    for way in (True, False)
  )
  return others + split // (chunks or job.program.pipeline.chunks)


def _of_stages(job: Job) -> dict[str, int]:
  """Returns what a pipeline keeps: inputs of chunks, and of several chunks their parameters."""
  schedule = job.program.pipeline
  if schedule is None:
    return {}
  itemsize = np.dtype(job.config.training.compute_dtype).itemsize
  inputs = passes.kept_inputs(schedule) * passes.residual_elements(job) * itemsize
  split = sum(4 * n for _, n in passes.of_stages(job, split=True))
  by_chunk = split if schedule.chunks > 1 else 0
  return {
    "saved inputs of chunks": int(inputs),
    "parameters by chunk": by_chunk,
    # On a CPU copied out of them: for a forward and for a backward pass.
    "parameters of a chunk": 2 * by_chunk // schedule.chunks if _copies(job) else 0,
    "parameters, gathered": _gathered_once(job),
  }


def _gathered_once(job: Job) -> int:
  """Returns the bytes of the parameters that a pipeline gathers before its first tick."""
  gathered, total = job.program.gathered, 0
  if gathered is None:
    return 0
  for split in (True, False):
    for name, elements in passes.of_stages(job, split=split):
      stored = job.placements["parameters"][name].dtype
      total += elements * np.dtype(gathered.dtypes.get(name, stored)).itemsize
  return total


def at_peak(parts: Mapping[str, int]) -> dict[str, int]:
  """Returns the parts of `by_formula` that are allocated at the peak.

  That is when the losses are computed, or the last layer's gradients, when all gradients are
  allocated.
  """
  losses, layer = (
    {name: parts[name] for name in names if name in parts} for names in (_LOSSES, _LAYER)
  )
  always = {name: parts[name] for name in _ALWAYS if name in parts}
  return always | max(losses, layer, key=lambda some: sum(some.values()))


def at_once(parts: Mapping[str, int]) -> int:
  """Returns the bytes at the peak: the sum of `at_peak`."""
  return sum(at_peak(parts).values())


def _logits(job: Job) -> int:
  """Returns the bytes of the logits of one chunk, written once, in the compute dtype."""
  itemsize = np.dtype(job.config.training.compute_dtype).itemsize
  seen = [one for one in job.activations.seen if one.letters == "BTV"]
  most = max(
    (math.prod(shard_shape(one.shape, one.spec, job.devices.sizes)) for one in seen), default=0
  )
  most //= job.program.pipeline.microbatches if job.program.pipeline else 1
  return itemsize * most // job.config.training.loss_chunks


def _unembedding(job: Job) -> int:
  """Returns the bytes of the kernel of the logits, gathered and cast, a copy and its gradient.

  One that is not trained has no gradient.
  """
  kernels = {p.letters: p for p in job.placements["parameters"].values() if "V" in p.letters}
  kernel = kernels.get("DV", kernels.get("VD"))
  if kernel is None:
    return 0
  axes = job.activations.table[job.legend["V"].name]
  elements = math.prod(kernel.shape) // axes_size(axes, job.devices.sizes)
  arrays = 3 if kernel.name in job.program.trained else 2
  return arrays * elements * np.dtype(job.config.training.compute_dtype).itemsize


def _gathered(job: Job) -> int:
  """Returns the bytes of two gathered copies of the largest kernel: one used, one prefetched."""
  itemsize = np.dtype(job.config.training.compute_dtype).itemsize
  sizes, largest = job.devices.sizes, 0
  for placement in job.placements["parameters"].values():
    split = sizes["fsdp"] > 1 and "fsdp" in spec_axes(placement.spec)
    if job.program.gathered or not split or "V" in placement.letters:
      continue
    here = math.prod(shard_shape(placement.shape, placement.spec, sizes)) * sizes["fsdp"]
    if placement.letters.startswith(STACKS):  # gathered layer by layer
      here //= placement.shape[0] // sizes["stage"]
    largest = max(largest, here * itemsize)
  return 2 * largest
