"""What a step holds on one device, by formula: to be read beside what the compiler says.

Parameters, gradients and optimizer state follow from the layout. Of the activations, each layer
keeps what `training.rematerialization` says; the layer that is being computed holds all of its own.
"""

import math

import numpy as np

from partitioning.dims import spec_axes
from partitioning.layout import bytes_per_device, shard_shape
from training.job import Job

_LOGITS = "BTV"


def by_formula(job: Job) -> dict[str, int]:
  """Returns part -> bytes per device."""
  sizes = job.devices.sizes
  parameters = list(job.placements["parameters"].values())
  held = sum(bytes_per_device(p, sizes) for p in parameters)
  optimizer = sum(bytes_per_device(p, sizes) for p in job.placements["optimizer"].values())
  return {
    "parameters": held,
    "gradients": held,
    "optimizer state": optimizer,
    **_activations(job),
    "collective buffers": _gathered(job),
  }


def _activations(job: Job) -> dict[str, int]:
  """Returns what the layers keep, what one of them holds meanwhile, and the logits."""
  found = {"activations kept": 0, "activations of one layer": 0, "logits": 0}
  layers = job.config.model.get("layers", 1)
  kind = job.config.training.get("rematerialization", "none")
  wide = np.dtype("float32").itemsize
  for one in job.activations.seen:
    elements = math.prod(shard_shape(one.shape, one.spec, job.devices.sizes))
    narrow = elements * np.dtype(job.config.training.compute_dtype).itemsize
    if one.letters == _LOGITS:
      found["logits"] = max(found["logits"], 2 * elements * wide)  # and their gradient
    elif one.letters == "BRD":
      # The residual: each layer keeps the one that it began with.
      found["activations kept"] = max(found["activations kept"], narrow * layers)
    elif one.letters.startswith("B"):
      found["activations of one layer"] += 2 * narrow
  if kind == "none":
    found["activations kept"] += found["activations of one layer"] // 2 * layers
  return found


def _gathered(job: Job) -> int:
  """Returns the bytes of the largest kernel gathered over fsdp, twice: one is used, one comes."""
  itemsize = np.dtype(job.config.training.compute_dtype).itemsize
  sizes, largest = job.devices.sizes, 0
  for placement in job.placements["parameters"].values():
    if sizes["fsdp"] == 1 or "fsdp" not in spec_axes(placement.spec):
      continue
    here = math.prod(shard_shape(placement.shape, placement.spec, sizes)) * sizes["fsdp"]
    if placement.letters.startswith("L"):  # gathered layer by layer
      here //= placement.shape[0]
    largest = max(largest, here * itemsize)
  return 2 * largest
