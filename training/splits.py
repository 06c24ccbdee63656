"""The batches of a job: opens both splits, and prepares them on first use."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.bad_records import Sharing
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.row_source import Source, check_ids, open_source
from processes import preflight
from processes.coordination import Group, NotTogetherError, current
from training.metrics.waiting import preparing
from training.setup import Job
from training.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Data:
  """The batches of a job, of both splits, opened and checked."""

  train: TrainingBatches
  evaluation: EvaluationBatches


def open_data(job: Job) -> Data:
  """Opens both splits, preparing them on first use.

  Raises:
    ValueError: from the input pipeline: an unknown data set, an empty split, a missing
      feature, fewer rows than a batch, rows that the model does not take (for example tokens
      beyond its vocabulary), or more unreadable records than data.max_bad_records.
  """
  config = job.config
  source = _open(job, config.data.train_split)
  train = TrainingBatches(
    source,
    global_batch_size=config.data.global_batch_size,
    seed=config.seed,
    shuffle=config.data.shuffle,
  )
  if train.abstract != job.batch:
    raise ValueError(f"{source.name} gives {train.abstract}, the model takes {job.batch}")
  return Data(train, open_evaluation(job))


def open_evaluation(job: Job) -> EvaluationBatches:
  """Opens the evaluation split; raises as `open_data`."""
  data, keys = job.config.data, job.config.evaluation
  source = _open(job, data.evaluation_split)
  counts = (keys.steps if keys.every_steps else 0, keys.final_steps)
  steps = min((count for count in counts if count), default=0)
  return EvaluationBatches(source, global_batch_size=data.global_batch_size, steps=steps)


def _open(job: Job, split: str) -> Source:
  """Opens a split, and checks that its tokens are in the model's vocabulary."""
  config = job.config
  with preparing(f"{config.data.name}, {split}") as waiting:
    data = read_as(config)
    source = open_source(data, split, config.seed, sharing(job), waiting.tick)
    if TASKS[config.task].of_tokens and "vocabulary_size" in config.model:
      check_ids(source, config.model.vocabulary_size)
  return source


def read_as(config: ConfigDict) -> ConfigDict:
  """Returns the `data` section with `kind`, how the task wants the rows read."""
  return ConfigDict({**config.data, "kind": TASKS[config.task].rows})


def sharing(job: Job, group: Group | None = None) -> Sharing:
  """Returns how the processes share the reading of all rows of a split.

  They wait for the slowest as long as a start may take, plus four times as long as they took; then
  NotComeError names those that are missing.
  """
  group, began = group or current(), time.monotonic()
  patience = job.config.processes.start_timeout_seconds

  def gather(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    seconds = patience + 4 * (time.monotonic() - began)
    try:
      return group.gather("reading all rows", value, timeout_seconds=seconds)
    except NotTogetherError as error:
      raise preflight.NotComeError(str(error)) from error

  return Sharing(group.index, group.count, gather)
