"""What the formulas of a plan read of a step: taken once from its job, by `of_job`.

With pipeline stages, all devices run a chunk of layers in each tick of the schedule, also where
they wait in the picture (`reports/pipeline_picture.py`): what they compute then is not used.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from models.quantized import decoded_letters
from models.spec import QUANTIZED_PARTS, stacks_of
from partitioning.constraints import ActivationLayout
from partitioning.mesh_sizes import STAGE
from partitioning.parallel.pipeline_schedule import GPIPE, Schedule
from partitioning.parallel.split_sequence import fastest_way
from partitioning.rules import Legend, Placement, axes_size, shard_shape, spec_axes
from runtime.extensions import kind_of_model
from training.setup import Job
from training.specs import GROUPS
from training.state import State
from training.step import Program


@dataclasses.dataclass(frozen=True)
class Passes:
  """How often a device runs the parts of a model in a step.

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


@dataclasses.dataclass(frozen=True)
class StepFacts:
  """A train step, as formulas see it; bytes and elements are those of one device.

  Attributes:
    keys: the resolved config.
    mesh: its devices.
    sizes: mesh axis -> size.
    platform: of the devices.
    legend: the model's letters.
    activations: how activations are sharded.
    placements: `parameters`, `optimizer`, `batch`: name -> Placement.
    program: the pure functions, and how gradients are reduced and parameters gathered.
    state: abstract.
    batch: abstract arrays by name.
  """

  keys: ConfigDict
  mesh: Mesh
  sizes: Mapping[str, int]
  platform: str
  legend: Legend
  activations: ActivationLayout
  placements: Mapping[str, Mapping[str, Placement]]
  program: Program
  state: State
  batch: Mapping[str, jax.ShapeDtypeStruct]

  # Sections of the config.
  model = property(lambda self: self.keys.model)
  data = property(lambda self: self.keys.data)
  training = property(lambda self: self.keys.training)
  partitioning = property(lambda self: self.keys.partitioning)

  @property
  def kind(self) -> str:
    """Returns which of the project's models it is, or extends."""
    return kind_of_model(self.model.name)

  @property
  def parameters(self) -> Mapping[str, Placement]:
    """Returns name -> placement of the parameters."""
    return self.placements["parameters"]

  @functools.cached_property
  def gathered_parameters(self) -> Mapping[str, Placement]:
    """Returns the parameters as fsdp gathers them: quantized kernels decoded, but for pipelines."""
    found = {}
    for name, one in self.parameters.items():
      layer, _, part = name.rpartition("/")
      if part not in QUANTIZED_PARTS or self.program.gathered is not None:
        found[name] = one
      elif part == QUANTIZED_PARTS[0]:
        letters = decoded_letters(one.letters)
        shape = (self.legend[letter].size for letter in letters)
        given = {"name": f"{layer}/kernel", "letters": letters, "shape": tuple(shape)}
        found[f"{layer}/kernel"] = dataclasses.replace(one, **given, dtype=np.dtype("float32"))
    return found

  @property
  def trained(self) -> frozenset[str]:
    """Returns the names of the parameters that are trained."""
    return self.program.trained

  @property
  def summed_once_over(self) -> str | None:
    """Returns the mesh axis over which microbatches, or steps of groups, are summed at last."""
    return self.program.reduce_once_over or (GROUPS if self.program.spec.outer else None)

  @property
  def pipeline(self) -> Schedule | None:
    """Returns the schedule of the pipeline's stages."""
    return self.program.pipeline

  @functools.cached_property
  def stacks(self) -> tuple[str, ...]:
    """Returns the letters of stacked layers."""
    return stacks_of(self.legend)

  @property
  def way(self) -> str:
    """Returns how a decoder's attention runs where the sequence is split; "" of other models."""
    if self.kind != "transformer":
      return ""
    model, heads = self.model, (self.model.heads, self.model.kv_heads)
    given = model.context_attention, self.training.attention_kernel, self.length, *heads
    return fastest_way(*given, count=self.parts("T"), tensor=self.parts("N"))

  @property
  def layers(self) -> int:
    """Returns the stacked layers of the model; 1 if it has none."""
    return self.model.layers if "layers" in self.model else 1

  @property
  def chunk_layers(self) -> int:
    """Returns how many layers a device computes one after another; all of them without stages."""
    schedule = self.pipeline
    return self.layers // (schedule.stages * schedule.chunks) if schedule else self.layers

  @functools.cached_property
  def passes(self) -> Passes:
    """Returns how often the parts of the model run in the step."""
    count, schedule, layers = self.training.gradient_accumulation_steps, self.pipeline, self.layers
    if schedule is None:
      return Passes(count, count * layers, count * layers, count, count, count)
    each, rounds = self.chunk_layers, count * schedule.forward_ticks
    leave = rounds if schedule.kind == GPIPE else count * schedule.microbatches
    return Passes(
      count * schedule.microbatches, 2 * rounds * each, rounds * each, 2 * rounds, rounds, leave
    )

  @property
  def compute_itemsize(self) -> int:
    """Returns the bytes of a number of the compute dtype."""
    return np.dtype(self.training.compute_dtype).itemsize

  @property
  def rows(self) -> float:
    """Returns the rows of a microbatch, of all devices."""
    return self.data.global_batch_size / self.passes.microbatches

  def parts(self, letter: str) -> int:
    """Returns into how many parts the mesh divides a dim of activations; 1 without that letter."""
    if letter not in self.legend:
      return 1
    return axes_size(self.activations.table[self.legend[letter].name], self.sizes)

  def axes(self, *dims: str) -> tuple[str, ...]:
    """Returns the mesh axes that shard these dims of activations, by the config's table."""
    table = self.partitioning.activations
    return tuple(axis for dim in dims for axis in table.get(dim, ()))

  @property
  def length(self) -> int:
    """Returns the tokens of a row, or the patches of an image."""
    return self.legend["T"].size or self.data.sequence_length

  @property
  def tokens(self) -> float:
    """Returns the tokens of a microbatch on a device."""
    return self.rows * self.length / axes_size(self.axes("batch", "sequence"), self.sizes)

  @property
  def width(self) -> float:
    """Returns the elements of a microbatch's residual on a device, as the layers compute it."""
    return self.tokens * self.model.model_size

  @property
  def residual_elements(self) -> float:
    """Returns the elements on a device of what goes from layer to layer, of one microbatch."""
    parts = self.parts("B") * self.sizes["context"]
    parts *= self.sizes["tensor"] if self.partitioning.sequence_parallel else 1
    return self.rows * self.data.sequence_length * self.model.model_size / parts

  @property
  def experts(self) -> int:
    """Returns how many experts a layer has."""
    return self.model.experts if "experts" in self.model else 0  # other models have no such key

  @property
  def kept_inputs(self) -> int:
    """Returns how many inputs of chunks, or of the losses, a stage keeps for its backward passes.

    GPipe's are those of all ticks.
    """
    schedule = self.pipeline
    if schedule.kind == GPIPE:
      return 2 * schedule.forward_ticks
    return schedule.chunks * schedule.slots

  def of_stages(self, *, split: bool) -> Iterator[tuple[str, int]]:
    """Yields (name, elements on a device) of parameters that stages split, or of the others.

    As the ticks have them: complete, where they are gathered over fsdp once per step.

    Args:
      split: whether the stages split them.
    """
    sizes = {**self.sizes, **({"fsdp": 1} if self.program.gathered is not None else {})}
    for name, one in self.parameters.items():
      if (STAGE in spec_axes(one.spec)) == split:
        yield name, math.prod(shard_shape(one.shape, one.spec, sizes))


def of_job(job: Job) -> StepFacts:
  """Returns the facts of a prepared job's step."""
  return StepFacts(
    keys=job.config,
    sizes=job.devices.sizes,
    platform=job.devices.platform,
    **{
      name: getattr(job, name)
      for name in ("mesh", "legend", "activations", "placements", "program", "state", "batch")
    },
  )
