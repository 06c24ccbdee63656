"""Memory of a step on one device, by formula: to compare with the compiler's number.

Parameters, gradients and optimizer state follow from the layout. Saved activations, and the peak of
one layer's backward pass, come from the traced gradients of a device's part of the model
(`planning.traced_step`).
"""

import math
from collections.abc import Mapping

import numpy as np

from models.spec import in_8_bits
from partitioning.dtypes import wide_dtype
from partitioning.rules import HOST, axes_size, bytes_per_device, shard_shape, spec_axes
from planning import traced_step
from planning.step_facts import StepFacts
from planning.traced_step import OfTheLayers

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


def of_the_host(step: StepFacts, layers: OfTheLayers) -> dict[str, int]:
  """Returns part -> bytes of the host's memory for one device; parts of 0 bytes are left out."""
  state = step.placements["optimizer"].values()
  state = sum(bytes_per_device(p, step.sizes) for p in state if p.memory == HOST)
  parts = {"optimizer state": state, "activations": layers.offloaded}
  return {name: size for name, size in parts.items() if size}


def by_formula(step: StepFacts, layers: OfTheLayers | None = None) -> dict[str, int]:
  """Returns part -> bytes per device; `at_once` gives the peak.

  Args:
    step: whose memory it is.
    layers: the memory of its layers' activations; None: traced here.
  """
  layers = layers or traced_step.by_the_layers(step)
  sizes = step.sizes
  parameters = list(step.parameters.values())
  there = sum(bytes_per_device(p, sizes) for p in parameters)
  trained = sum(
    math.prod(shard_shape(p.shape, p.spec, sizes)) * wide_dtype(p.dtype).itemsize
    for p in parameters
    if p.name in step.trained
  )
  state = step.placements["optimizer"].values()
  optimizer = sum(bytes_per_device(p, sizes) for p in state if p.memory != HOST)
  kept = 0 if step.partitioning.reshard_after_forward else kept_kernel_bytes(step)
  accumulates = step.training.gradient_accumulation_steps > 1
  sums = trained if accumulates else 0
  if step.pipeline:
    trained, sums = _of_a_chunk(step), sums + _of_a_chunk(step, chunks=1)
  parts = {
    "parameters": there,
    "gradients": trained,  # float32 or wider
    "accumulated gradients": sums,
    "optimizer state": optimizer,
    "saved activations": layers.kept,
    "activations of one layer": layers.most,
    "logits": _logits(step),
    "unembedding": _unembedding(step),
    "collective buffers": _gathered(step),
  }
  more = {"saved gathered kernels": kept, "kernels of one layer": _of_a_layer(step)}
  more |= _of_stages(step)
  if (schedule := step.pipeline) and schedule.ticks - schedule.forward_ticks == 1:
    # A loop of one tick becomes a part of the program, which sets its buffers to zero as it begins.
    more["last backward pass"] = trained + layers.kept
  return parts | {name: size for name, size in more.items() if size}


def _copies(step: StepFacts) -> bool:
  """Returns whether the compiler copies what a loop reads and writes of a stack, as a CPU's does.

  Those for accelerators read and write in place.
  """
  return step.platform == "cpu"


def _of_a_layer(step: StepFacts) -> int:
  """Returns the bytes of copies of a layer's stacked parameters, and of their gradients."""
  if not _copies(step):
    return 0
  sizes, total = {**step.sizes, "fsdp": 1}, 0
  for placement in step.parameters.values():
    if not placement.letters.startswith("L"):
      continue
    shape = shard_shape(placement.shape, placement.spec, sizes)
    trained = placement.name in step.trained
    dtype = wide_dtype(placement.dtype) if trained else np.dtype(placement.dtype)
    total += (1 + trained) * math.prod(shape[1:]) * dtype.itemsize
  return total


def _of_a_chunk(step: StepFacts, chunks: int | None = None) -> int:
  """Returns the bytes of the gradients of one backward pass on a stage.

  Args:
    step: with pipeline stages.
    chunks: of a stage; None: the schedule's.
  """
  split, others = (
    sum(4 * n for name, n in step.of_stages(split=way) if name in step.trained)
    for way in (True, False)
  )
  return others + split // (chunks or step.pipeline.chunks)


def _of_stages(step: StepFacts) -> dict[str, int]:
  """Returns what a pipeline keeps: inputs of chunks, and of several chunks their parameters."""
  schedule = step.pipeline
  if schedule is None:
    return {}
  itemsize = step.compute_itemsize
  inputs = step.kept_inputs * step.residual_elements * itemsize
  split = sum(4 * n for _, n in step.of_stages(split=True))
  by_chunk = split if schedule.chunks > 1 else 0
  return {
    "saved inputs of chunks": int(inputs),
    "parameters by chunk": by_chunk,
    # On a CPU copied out of them: for a forward and for a backward pass.
    "parameters of a chunk": 2 * by_chunk // schedule.chunks if _copies(step) else 0,
    "parameters, gathered": _gathered_once(step),
  }


def _gathered_once(step: StepFacts) -> int:
  """Returns the bytes of the parameters that a pipeline gathers before its first tick."""
  gathered, total = step.program.gathered, 0
  if gathered is None:
    return 0
  for split in (True, False):
    for name, elements in step.of_stages(split=split):
      stored = step.parameters[name].dtype
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


def _logits(step: StepFacts) -> int:
  """Returns the bytes of the logits of one chunk, in the compute dtype.

  On a GPU XLA computes their gradients beside them, elsewhere in their place.
  """
  itemsize = step.compute_itemsize * (2 if step.platform == "gpu" else 1)
  seen = [one for one in step.activations.seen if one.letters == "BTV"]
  most = max((math.prod(shard_shape(one.shape, one.spec, step.sizes)) for one in seen), default=0)
  most //= step.pipeline.microbatches if step.pipeline else 1
  return itemsize * most // step.training.loss_chunks


def _unembedding(step: StepFacts) -> int:
  """Returns the bytes of the kernel of the logits, gathered and cast, a copy and its gradient.

  One that is not trained has no gradient; if it is whole, in the compute dtype, only the copy is
  made of it.
  """
  kernels = {p.letters: p for p in step.parameters.values() if "V" in p.letters}
  kernel = kernels.get("DV", kernels.get("VD"))
  if kernel is None:
    return 0
  axes = step.activations.table[step.legend["V"].name]
  elements = math.prod(kernel.shape) // axes_size(axes, step.sizes)
  as_stored = kernel.dtype.itemsize == step.compute_itemsize and not spec_axes(kernel.spec)
  arrays = 3 if kernel.name in step.trained else 1 if as_stored else 2
  return arrays * elements * step.compute_itemsize


def _gathered(step: StepFacts) -> int:
  """Returns the bytes of two gathered copies of the largest kernel: one used, one prefetched."""
  itemsize = step.compute_itemsize
  sizes, largest = step.sizes, 0
  for placement in step.gathered_parameters.values():
    split = sizes["fsdp"] > 1 and "fsdp" in spec_axes(placement.spec)
    if step.program.gathered or not split or "V" in placement.letters:
      continue
    here = math.prod(shard_shape(placement.shape, placement.spec, sizes)) * sizes["fsdp"]
    if placement.letters.startswith(step.stacks):  # gathered layer by layer
      here //= placement.shape[0] // sizes["stage"]
    largest = max(largest, here * itemsize)
  return 2 * largest


# All-gathered kernels that are kept for the backward pass (`partitioning.reshard_after_forward`).
#
# Kept, each layer's kernels are gathered once per microbatch, not twice, and those of all layers
# are in memory when the backward pass begins.


def kept_kernel_bytes(step: StepFacts) -> int:
  """Returns the bytes of the layers' gathered kernels on a device, in the dtype they are sent in.

  Those that fsdp splits, of pipeline stages one chunk's; 0 if there are none.
  """
  sizes, training = step.sizes, step.training
  itemsize = np.dtype(training.compute_dtype).itemsize
  total = 0
  for name, placement in step.gathered_parameters.items():
    kernel = placement.letters.startswith(step.stacks) and len(placement.letters) > 2
    if not (kernel and "fsdp" in spec_axes(placement.spec)):
      continue
    shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
    total += shard * sizes["fsdp"] * (1 if in_8_bits(name, training.matmul_dtype) else itemsize)
  return total // (step.pipeline.chunks if step.pipeline else 1)
