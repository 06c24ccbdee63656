"""The keys of a config that a train step follows, resolved once."""

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
  """What a step needs to know of a finalized config.

  A field that is a key of the section `training` has the key's name.

  Attributes:
    model: its name.
    layers: of the model; 0 of one that has no such key.
    clip_norm: limit for the norm of all gradients, which the step applies; 0: none.
    activations: dim name -> mesh axes, the table `partitioning.activations`.
  """

  seed: int
  task: str
  model: str
  layers: int
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


def step_spec(config: ConfigDict) -> StepSpec:
  """Returns what the step needs to know of a finalized config."""
  fields, training, keys = StepSpec.__dataclass_fields__, config.training, config.optimizer
  return StepSpec(
    seed=config.seed,
    task=config.task,
    model=config.model.name,
    layers=config.model.layers if "layers" in config.model else 0,
    clip_norm=0.0 if keys.clip_groups or keys.clip_quantile else keys.clip_norm,
    state_memory=keys.state_memory,
    activations={name: tuple(axes) for name, axes in config.partitioning.activations.items()},
    **{name: training[name] for name in fields if name in training},
  )
