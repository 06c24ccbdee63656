"""What a run does, resolved once from its finalized config: the step below knows no config."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from input_pipeline.ramp import Ramp, Shape
from models import model_spec
from models.spec import STORED_TEACHER, ModelSpec
from partitioning.rules import Legend
from partitioning.verdict import TABLES
from training.optimizers.spec import OptimizerSpec
from training.tasks import TASKS

GROUPS = "data"  # the mesh axis along which the groups of an outer optimizer are


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSpec:
  """The outer optimizer of groups that train on their own; see `training.outer`.

  Attributes:
    groups: how many there are.
    every_steps: after so many steps they meet.
    learning_rate: by which the parameters follow the mean of the groups' changes.
    momentum: of these changes, Nesterov's.
  """

  groups: int
  every_steps: int
  learning_rate: float
  momentum: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
  """What a step needs to know; a field that is a key of the section `training` has its name.

  Attributes:
    model: its name.
    layers: of the model; 0 of one that has no such key.
    clip_norm: limit for the norm of all gradients, which the step applies; 0: none.
    activations: dim name -> mesh axes, the table `partitioning.activations`.
    outer: the optimizer of groups; None: all devices take each step together.
  """

  seed: int
  task: str
  model: str
  layers: int
  trainable: tuple[str, ...]
  gradient_accumulation_steps: int
  gradient_reduction: str
  parameter_dtype: str
  frozen_dtype: str
  compute_dtype: str
  matmul_dtype: str
  stochastic_rounding: bool
  router_bias_rate: float
  pipeline: str
  pipeline_chunks: int
  pipeline_ends: str
  pipeline_gather: str
  microbatches: int | None
  clip_norm: float
  state_memory: str
  activations: Mapping[str, tuple[str, ...]]
  outer: OuterSpec | None = None

  def microbatches_on(self, sizes: Mapping[str, int]) -> int:
    """Returns the microbatches of a step, those of a pipeline included; sizes are the mesh's."""
    of_pipeline = self.microbatches if sizes.get("stage", 1) > 1 else 1
    return self.gradient_accumulation_steps * of_pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSpec:
  """The arrays of a run's batches; the fields are keys of the config, but `stored_teacher`."""

  task: str
  global_batch_size: int
  sequence_length: int
  steps: int
  ramp: Ramp
  stored_teacher: bool = False

  @property
  def _arrays(self) -> dict[str, tuple[str, str]]:
    """Returns array -> the letters of its dims, and its dtype."""
    return {**TASKS[self.task].batch, **(STORED_TEACHER if self.stored_teacher else {})}

  def abstract(self, legend: Legend, shape: Shape | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a global batch, without opening the data set.

    Args:
      legend: of the model.
      shape: of a stage of a ramp; None: of the last.
    """
    rows, pieces = self.global_batch_size, 1
    if shape is not None:
      rows, pieces = shape.rows * shape.pieces, shape.pieces
    differing = {"B": rows, "T": self.sequence_length // pieces}
    return {
      name: jax.ShapeDtypeStruct(
        tuple(differing.get(letter) or legend[letter].size for letter in letters),
        jax.dtypes.canonicalize_dtype(dtype),
      )
      for name, (letters, dtype) in self._arrays.items()
    }

  @property
  def letters(self) -> dict[str, str]:
    """Returns array -> the letters of its dims."""
    return {name: letters for name, (letters, _) in self._arrays.items()}

  def stages(self) -> Iterator[tuple[str, Shape]]:
    """Yields `steps 1 to 100: 32 rows of 64 tokens` and the shape of each stage of the ramps."""
    for first, stop, shape in self.ramp.stages(self.steps):
      yield f"steps {first + 1} to {stop}: {self.text(shape)}", shape

  def text(self, shape: Shape) -> str:
    """Returns `32 rows of 64 tokens`, the batch of a stage."""
    of_tokens = TASKS[self.task].of_tokens
    of = f" of {self.sequence_length // shape.pieces} tokens" if of_tokens else ""
    return f"{shape.rows * shape.pieces} rows{of}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
  """A finalized config, as what it names.

  Attributes:
    layout: the section `partitioning`, as arguments of `check_layout`.
    memory_limit_gib: of what the state may take; None: of all that is there.
  """

  model: ModelSpec
  optimizer: OptimizerSpec
  step: StepSpec
  batch: BatchSpec
  layout: Mapping[str, Any]
  memory_limit_gib: float | None

  @property
  def teacher(self) -> ModelSpec | None:
    """Returns the model of the teacher that a decoder learns from, if it has one."""
    return getattr(self.model, "teacher", None)


def resolve(config: ConfigDict) -> Resolved:
  """Returns what a finalized config names.

  Raises:
    ValueError: the model lacks members of `models.Model`.
  """
  training, data, tables = config.training, config.data, config.partitioning
  keys, fields, model = config.optimizer, StepSpec.__dataclass_fields__, model_spec(config)
  return Resolved(
    model=model,
    optimizer=_optimizer(config, model),
    step=StepSpec(
      seed=config.seed,
      task=config.task,
      model=config.model.name,
      layers=config.model.layers if "layers" in config.model else 0,
      clip_norm=0.0 if keys.clip_groups or keys.clip_quantile else keys.clip_norm,
      state_memory=keys.state_memory,
      activations={name: tuple(axes) for name, axes in tables.activations.items()},
      outer=_outer(keys, config.mesh_dcn[GROUPS]),
      **{name: training[name] for name in fields if name in training},
    ),
    batch=BatchSpec(
      task=config.task,
      global_batch_size=data.global_batch_size,
      sequence_length=data.sequence_length,
      steps=training.steps,
      ramp=Ramp.of(data),
      stored_teacher=config.distillation.top > 0,
    ),
    layout={
      "tables": {title: tables[title] for title in TABLES},
      "overrides": tables.overrides,
      "max_replicated_bytes": tables.max_replicated_bytes,
    },
    memory_limit_gib=config.memory_limit_gib,
  )


def _outer(keys: ConfigDict, groups: int) -> OuterSpec | None:
  """Returns the outer optimizer of the section `optimizer`, for so many groups."""
  if not keys.outer_every_steps:
    return None
  return OuterSpec(
    groups=groups,
    every_steps=keys.outer_every_steps,
    learning_rate=keys.outer_learning_rate,
    momentum=keys.outer_momentum,
  )


def _optimizer(config: ConfigDict, model: ModelSpec) -> OptimizerSpec:
  """Returns what the optimizer needs to know of a finalized config, and of its model's spec."""
  fields, keys, training = OptimizerSpec.__dataclass_fields__, config.optimizer, config.training
  return OptimizerSpec(
    seed=config.seed,
    model=config.model.name,
    letters=model.parameters,
    legend=model.legend,
    widths=model.widths,
    state_table=config.partitioning.optimizer,
    overrides=config.partitioning.overrides,
    keys=tuple(keys),
    others={key: value for key, value in keys.items() if key not in fields},
    **{key: section[key] for section in (training, keys) for key in fields if key in section},
  )
