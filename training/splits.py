"""The batches of a job: opens both splits, and prepares them and their tokenizer on first use."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epy
from ml_collections import ConfigDict

from input_pipeline import catalog
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.position import Position
from input_pipeline.ramp import Ramp
from input_pipeline.row_source import check_ids, open_source
from input_pipeline.source import Sharing, Source
from input_pipeline.text import tokenizer
from processes.coordination import Group, current
from training.metrics.console import preparing, say_wrapped
from training.tasks import GRPO, TASKS

with epy.lazy_imports():  # `prepare` has no job; few data are files or mixtures
  from input_pipeline import mixture
  from input_pipeline.text import files
  from training import evaluation, setup, specs, teacher_rows


@dataclasses.dataclass(frozen=True)
class Data:
  """The batches of a job, of both splits, opened and checked.

  Attributes:
    train: of the train split.
    evaluation: of the evaluation split.
    rollouts: of GRPO, makes what puts answers in the place of prompts (`inference.grpo.checked`).
    tasks: those of `evaluation.tasks`, if there are any.
  """

  train: TrainingBatches
  evaluation: EvaluationBatches
  rollouts: Callable[..., Any] | None = None
  tasks: "evaluation.TaskScores | None" = None


def open_data(job: "setup.Job") -> Data:
  """Opens both splits, preparing them on first use.

  Raises:
    ValueError: from the input pipeline: an unknown data set, an empty split, a missing
      feature, fewer rows than a batch, rows that the model does not take (for example tokens
      beyond its vocabulary), or more unreadable records than data.max_bad_records.
  """
  with contextlib.ExitStack() as stack:
    if job.config.data.name in catalog.OF_FILES:
      stack.enter_context(files.listed_once())
    shared = sharing(job.config.processes.start_timeout_seconds)
    train = training_batches(job.config, shared)
    if train.abstract != job.batch:
      raise ValueError(f"{train.source.name} gives {train.abstract}, the model takes {job.batch}")
    return Data(train, evaluation_batches(job.config, shared))


def training_batches(config: ConfigDict, shared: Sharing | None = None) -> TrainingBatches:
  """Opens the training split of a finalized config, without devices; raises as `open_data`."""
  source = _open(config, config.data.train_split, shared)
  steps, ramp = config.training.steps, Ramp.of(config.data)
  batches = TrainingBatches(
    source,
    global_batch_size=config.data.global_batch_size,
    seed=config.seed,
    shuffle=config.data.shuffle,
    ramp=ramp,
    repeats=config.grpo.answers if config.task == GRPO else 1,
  )
  if source.parts:
    mixture.check_epochs(batches.order, ramp.taken(steps), Position.of(ramp.rows), steps)
  return batches


def evaluation_batches(config: ConfigDict, shared: Sharing | None = None) -> EvaluationBatches:
  """Opens the evaluation split of a finalized config; raises as `open_data`."""
  data, keys = config.data, config.evaluation
  source = _open(config, data.evaluation_split, shared)
  counts = (keys.steps if keys.every_steps else 0, keys.final_steps)
  steps = min((count for count in counts if count), default=0)
  return EvaluationBatches(source, global_batch_size=data.global_batch_size, steps=steps)


def _open(config: ConfigDict, split: str, shared: Sharing | None) -> Source:
  """Opens a split, and checks that its tokens are in the model's vocabulary."""
  with preparing(f"{config.data.name}, {split}") as waiting:
    data = read_as(config.data, config.task)
    source = open_source(data, split, config.seed, shared, waiting.tick)
    if TASKS[config.task].of_tokens and "vocabulary_size" in config.model:
      check_ids(source, config.model.vocabulary_size)
  if config.distillation.top:  # whose evaluation is of the model alone
    attach = teacher_rows.attached if split == config.data.train_split else teacher_rows.unattached
    source = attach(source, config.distillation.teacher)
  return source


def train_missing_tokenizer(config: ConfigDict) -> None:
  """Makes the tokenizer that a config asks for and that depends on its documents.

  It is a vocabulary of their characters where data.tokenizer says so, or the BPE that
  data.train_tokenizer asks for where data.tokenizer names none. Every process makes it: the same
  documents give the same tokenizer.

  Args:
    config: not finalized yet.

  Raises:
    ValueError: the data are no documents, or for a BPE not of a TFDS data set; or as of
      `train_tokenizer.train_on`.
  """
  data = config.data
  if data.get("tokenizer") == tokenizer.CHARACTERS:
    _find_characters(data, config.task)
    return
  if not data.get("train_tokenizer") or data.tokenizer:
    return
  if TASKS[config.task].rows != "text" or data.name in (*catalog.OF_FILES, *catalog.RENDERED):
    raise ValueError(
      f"data.train_tokenizer={data.train_tokenizer} is for TFDS data sets with text, and "
      f"data.name={data.name!r} is none; run `prepare --train_tokenizer=N` instead, and leave "
      f"data.train_tokenizer=0"
    )
  from input_pipeline.text import train_tokenizer  # imports a library that others do not need

  with preparing("a tokenizer") as waiting:
    data.tokenizer = train_tokenizer.trained_once(data, data.train_tokenizer, waiting.tick)


def _find_characters(data: ConfigDict, task: str) -> None:
  """Sets data.tokenizer to a vocabulary of the characters of the data; says what it has."""
  if TASKS[task].rows != "text" or data.name in (*catalog.RENDERED, catalog.PROMPTS):
    raise ValueError(
      f"data.tokenizer={tokenizer.CHARACTERS} is for text, and data.name={data.name!r} is none; "
      f"name the tokenizer of a folder or file, or take bytes"
    )
  from input_pipeline.text import train_tokenizer  # imports a library that others do not need

  with preparing("the vocabulary of characters") as waiting:
    data.tokenizer = train_tokenizer.trained_once(data, None, waiting.tick)
  unseen = train_tokenizer.unseen_of(data.tokenizer)
  others = tokenizer.unseen_text("the evaluation split", unseen)
  known = len(tokenizer.load(data.tokenizer).characters)
  say_wrapped(
    f"tokenizer: the {known:,} characters of the text trained on" + "; " * bool(others) + others
  )


def report(source: Source, batches: "specs.BatchSpec") -> dict[str, float]:
  """Returns what a run's record says of the rows that it trains on; {} of rows stored as such."""
  if not source.report:
    return {}
  epochs = {
    f"epochs/{name}" if name else "epochs": value
    for name, value in _epochs(source, batches.steps, batches.ramp).items()
  }
  return {**source.report, "bytes_per_token": source.bytes_per_token, **epochs}


def _epochs(source: Source, steps: int, ramp: Ramp) -> dict[str, float]:
  """Returns how often a run takes the rows of each source of a mixture, or of the only one, ""."""
  if not source.parts:
    return {"": ramp.taken(steps) / len(source)}
  order = mixture.MixtureOrder(source.parts, source.stages, seed=0)
  counts = order.counts(ramp.taken(steps), Position.of(ramp.rows))
  return {part.name: counts[part.name] / part.rows for part in source.parts}


def report_text(source: Source, steps: int = 0, ramp: Ramp | None = None) -> str:
  """Returns lines about the rows of a split; "" for rows that are stored as such.

  Args:
    source: the split; of a mixture there is a line for each source.
    steps: that a run takes; 0 leaves its epochs out.
    ramp: how many rows its steps take.
  """
  if not source.report:
    return ""
  epochs = _epochs(source, steps, ramp) if ramp else {}
  rates = {part.name: part.bytes_per_token for part in source.parts} or {"": source.bytes_per_token}
  lines = []
  for name, bytes_per_token in rates.items():
    taken = f"; {steps:,} steps take {epochs[name]:.3g} epochs" if ramp else ""
    facts = {
      key.removesuffix(f"/{name}"): value
      for key, value in source.report.items()
      if key.partition("/")[2] == name
    }
    slots = facts["tokens"] + facts["padding"]
    lines.append(
      f"{source.name}{', ' * bool(name)}{name}: {facts['tokens']:,} tokens of "
      f"{_counted(facts['documents'], 'document')}, {bytes_per_token:.3f} bytes per token; "
      f"{facts['rows']:,} rows of {slots // facts['rows']:,} tokens, "
      f"{100 * facts['padding'] / slots:.2g} % padding, "
      f"{_of_documents(facts)}{taken}"
    )
  return "\n".join(lines)


def announce(train: Source, validation: Source, steps: int, ramp: Ramp) -> None:
  """Prints tokens, padding and epochs of rows that are an index over documents, and bad records."""
  for text in (report_text(train, steps, ramp), report_text(validation)):
    if text:
      say_wrapped(text)
  for source in (train, validation):
    announce_bad(source)


def announce_bad(source: Source) -> None:
  """Prints which records of a split cannot be read, if that is allowed."""
  if source.bad:
    say_wrapped(f"{source.name}: {source.bad}")


def _of_documents(facts: Mapping[str, int]) -> str:
  """Returns what became of the documents of a split."""
  if "trained" not in facts:
    return f"{_counted(facts['split_documents'], 'document')} split"
  share = 100 * facts["trained"] / max(1, facts["tokens"])
  untrained, longer = facts["untrained_conversations"], facts["long_conversations"]
  return (
    f"{facts['trained']:,} tokens trained on ({share:.3g} %), {untrained + longer:,} conversations "
    f"dropped ({untrained:,} without a trained token, {longer:,} longer than a row)"
  )


def _counted(count: int, what: str) -> str:
  return f"{count:,} {what}{'' if count == 1 else 's'}"


def read_as(data: ConfigDict, task: str) -> ConfigDict:
  """Returns the section `data` with `kind`, how the task wants the rows read."""
  return ConfigDict({**data, "kind": TASKS[task].rows})


def sharing(patience_seconds: float, group: Group | None = None) -> Sharing:
  """Returns how the processes share the reading of all rows of a split.

  They wait for the slowest for `patience_seconds`, plus four times as long as they took; then
  NotTogetherError names those that are missing.
  """
  group, began = group or current(), time.monotonic()

  def gather(value: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    seconds = patience_seconds + 4 * (time.monotonic() - began)
    return group.gather("reading all rows", value, timeout_seconds=seconds)

  return Sharing(group.index, group.count, gather)
