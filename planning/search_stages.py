"""Pipeline stages among the settings that are searched: a bound of their time, and microbatches."""

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from configs.schema import step_checks
from partitioning.parallel.pipeline_schedule import GPIPE
from planning import search_space
from planning.search_space import Setting

# What stages compute again of a layer, as a share of its matmuls: a forward pass, which is 1 of 3
# passes, and of attention kernels 2 of 7 matmuls.
_AGAIN = 2 / 7


def without(config: ConfigDict) -> Setting:
  """Returns overrides that leave out what a config says of pipelines, for meshes without stages."""
  said = dict(step_checks.OF_STAGES)
  if config.training.microbatches is None:
    del said[search_space.OF_A_PIPELINE]
  return search_space.changed(config, said)


def chunks(config: ConfigDict) -> int:
  """Returns the parts of the layers that each stage of a pipeline has."""
  training = config.training
  return training.pipeline_chunks if training.pipeline == "interleaved" else 1


def ticks(stages: int, microbatches: int, chunks: int) -> float:
  """Returns the ticks of a step for each that a pipeline without a bubble would take."""
  return 1 + (stages - 1) / (microbatches * chunks)


def least(stages: int, rows: int, chunks: int) -> float:
  """Returns how often stages compute, at least, what the same devices compute without them.

  Layers with the bubble of as many microbatches as there are rows, and a forward pass again; what
  is before and after the layers on each stage.

  Args:
    stages: of the pipeline.
    rows: of a stage's devices, which microbatches divide.
    chunks: of each stage.
  """
  return min(float(stages), (1 + _AGAIN) * ticks(stages, rows, chunks))


def more_microbatches(config: ConfigDict, stages: int, rows: int, count: int) -> Sequence[int]:
  """Returns numbers of a pipeline's microbatches above one of them, ascending.

  Args:
    config: as parsed, with overrides.
    stages: of the pipeline.
    rows: of a stage's devices, which microbatches divide.
    count: that there are.
  """
  whole = stages if config.training.pipeline == "interleaved" else 1
  return [n for n in search_space.microbatches(rows) if n > count and n % whole == 0]


def divided(config: ConfigDict, parts: Mapping[str, int]) -> int:
  """Returns the bytes of the inputs of chunks that more microbatches divide; GPipe keeps all."""
  return 0 if config.training.pipeline == GPIPE else parts.get("saved inputs of chunks", 0)
