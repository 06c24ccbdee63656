"""How often a device runs the parts of a model in a step, with and without pipeline stages.

On stages, all devices run a chunk of layers in each tick of the schedule, also where they wait in
the picture (`reports/pipeline_picture.py`): what they compute then is not used.
"""

import dataclasses
import math
from collections.abc import Iterator

from partitioning.dims import axes_size, spec_axes
from partitioning.parallel.pipeline_schedule import GPIPE, STAGE, Schedule
from partitioning.shardings import shard_shape
from training.setup import Job


@dataclasses.dataclass(frozen=True)
class Passes:
  """Numbers of passes.

  Attributes:
    microbatches: parts that the rows of a step are computed in.
    forward: layers' forward passes, of all layers and microbatches; with those that stages repeat
      in their backward passes, without those of rematerialization.
    backward: layers' backward passes.
    enter: forward passes of the embedding.
    entered: its backward passes.
    leave: forward and backward passes of what follows the layers, up to the losses.
  """

  microbatches: int
  forward: int
  backward: int
  enter: int
  entered: int
  leave: int


def of_job(job: Job) -> Passes:
  """Returns the passes of a step."""
  count, schedule = job.config.training.gradient_accumulation_steps, job.program.pipeline
  layers = _layers(job)
  if schedule is None:
    return Passes(count, count * layers, count * layers, count, count, count)
  each, rounds = layers_of_a_chunk(job), count * schedule.forward_ticks
  leave = rounds if schedule.kind == GPIPE else count * schedule.microbatches
  return Passes(
    count * schedule.microbatches, 2 * rounds * each, rounds * each, 2 * rounds, rounds, leave
  )


def layers_of_a_chunk(job: Job) -> int:
  """Returns how many layers a device computes one after another; all of them without stages."""
  schedule, layers = job.program.pipeline, _layers(job)
  return layers // (schedule.stages * schedule.chunks) if schedule else layers


def _layers(job: Job) -> int:
  """Returns the stacked layers of a model; 1 if it has none."""
  return job.config.model.layers if "layers" in job.config.model else 1


def kept_inputs(schedule: Schedule) -> int:
  """Returns how many inputs of chunks, or of the losses, a stage keeps for its backward passes.

  GPipe's are those of all ticks.
  """
  if schedule.kind == GPIPE:
    return 2 * schedule.forward_ticks
  return schedule.chunks * schedule.slots


def residual_elements(job: Job) -> float:
  """Returns the elements on a device of what goes from layer to layer, of one microbatch."""
  config, sizes = job.config, job.devices.sizes
  rows = config.data.global_batch_size / of_job(job).microbatches
  parts = axes_size(job.activations.table[job.legend["B"].name], sizes) * sizes["context"]
  parts *= sizes["tensor"] if config.partitioning.sequence_parallel else 1
  return rows * config.data.sequence_length * config.model.model_size / parts


def of_stages(job: Job, *, split: bool) -> Iterator[tuple[str, int]]:
  """Yields (name, elements on a device) of parameters that stages split, or of the others.

  As the ticks have them: complete, where they are gathered over fsdp once per step.

  Args:
    job: a prepared job.
    split: whether the stages split them.
  """
  sizes = {**job.devices.sizes, **({"fsdp": 1} if job.program.gathered is not None else {})}
  for name, one in job.placements["parameters"].items():
    if (STAGE in spec_axes(one.spec)) == split:
      yield name, math.prod(shard_shape(one.shape, one.spec, sizes))
