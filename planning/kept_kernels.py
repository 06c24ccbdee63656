"""All-gathered kernels that are kept for the backward pass (`partitioning.reshard_after_forward`).

Kept, each layer's kernels are gathered once per microbatch, not twice, and those of all layers are
in memory when the backward pass begins.
"""

import math
from collections.abc import Iterable

import numpy as np

from models.layer_stack import STACKS
from models.spec import in_8_bits
from partitioning.dims import spec_axes
from partitioning.shardings import shard_shape, size_text
from planning.step_time import Sent
from training.setup import Job

KEY = "partitioning.reshard_after_forward"
_LEAST = 0.005  # of the step: what is worth saying
_MARGIN = 0.95  # of a device's memory: the formula is approximate


def of_all_layers(job: Job) -> int:
  """Returns the bytes of the layers' gathered kernels on a device, in the dtype they are sent in.

  Those that fsdp splits, of pipeline stages one chunk's; 0 if there are none.
  """
  sizes, training = job.devices.sizes, job.config.training
  itemsize = np.dtype(training.compute_dtype).itemsize
  total = 0
  for name, placement in job.placements["parameters"].items():
    kernel = placement.letters.startswith(STACKS) and len(placement.letters) > 2
    if not (kernel and "fsdp" in spec_axes(placement.spec)):
      continue
    shard = math.prod(shard_shape(placement.shape, placement.spec, sizes))
    total += shard * sizes["fsdp"] * (1 if in_8_bits(name, training.matmul_dtype) else itemsize)
  return total // (job.program.pipeline.chunks if job.program.pipeline else 1)


def advice(job: Job, sent: Iterable[Sent], step: float, free: float) -> str:
  """Returns whether keeping the kernels would save time, where there is memory for them.

  Args:
    job: of the plan.
    sent: the collectives of its compiled program.
    step: seconds of a step.
    free: bytes of a device's memory that are left.

  Returns:
    A line with the override; "" if they are kept, if hardly a gather is waited for, or if they do
    not fit.
  """
  if job.config.model.name != "transformer" or not job.config.partitioning.reshard_after_forward:
    return ""
  waited = sum(
    one.exposed_seconds
    for one in sent
    if (one.kind, one.axes) == ("all-gather", ("fsdp",)) and one.runs >= job.config.model.layers
    if "transpose(" in one.source  # in the backward pass
  )
  needed = of_all_layers(job)
  if not needed or waited < _LEAST * step or needed > _MARGIN * free:
    return ""
  return (
    f"for {1e3 * waited:,.0f} ms of a step the backward pass waits for kernels that it gathers "
    f"again; kept, those of all layers take {size_text(needed)}: --config.{KEY}=False"
  )
