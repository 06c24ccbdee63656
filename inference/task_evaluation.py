"""Tasks scored with a model: accuracy by log-likelihood, exact match, their standard errors.

The metrics are those of lm-evaluation-harness: `acc` takes the choice with the largest
log-likelihood, `acc_norm` that with the largest per character, `acc_bytes` per byte of UTF-8. A
standard error is the standard deviation of the records' values (with n - 1) over the root of n.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from inference import scoring
from inference.generation import BatchGenerator, Prompt
from inference.request import Request, begins, encoded, tokenizer_of
from inference.scoring import Continuation, Score, Scorer
from inference.task_records import GENERATION, LIKELIHOOD, Record, Task
from input_pipeline.text import chat_template
from input_pipeline.text.conversations import Conversation
from training.setup import Job

Before = Callable[[str, int, int], bool]  # (what, number of the batch, of how many) -> go on?


@dataclasses.dataclass(frozen=True)
class Metric:
  """A mean over the records of a task, with its standard error; None of a single record."""

  value: float
  standard_error: float | None

  @classmethod
  def of(cls, values: Sequence[float]) -> "Metric":
    """Returns the mean and its standard error."""
    values = np.asarray(values, np.float64)
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return cls(float(values.mean()), error)


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a task.

  Attributes:
    task: the task.
    metrics: by name.
    truncated: of how many records the context was cut off on the left.
    samples: an object for each record: what the model gave, and whether it was right.
  """

  task: Task
  metrics: dict[str, Metric]
  truncated: int
  samples: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Encoded:
  """A task as tokens: of each record its continuations, or its prompt."""

  task: Task
  rows: list[list[Continuation]]
  prompts: list[Prompt]


def encode(config: ConfigDict, tasks: Sequence[Task]) -> list[Encoded]:
  """Returns the tasks as tokens.

  Args:
    config: finalized.
    tasks: as `task_records.read` returns them.

  Raises:
    ValueError: the model does not score texts, a text cannot be encoded, does not fit a row or has
      a token that the model does not know; with file and line. Or there is no chat template.
  """
  scoring.check_model(config)
  encoder = _Encoder(config)
  return [encoder.task(task) for task in tasks]


class _Encoder:
  """Encodes records for a config's model."""

  def __init__(self, config: ConfigDict):
    self._config, self._tokenizer = config, tokenizer_of(config)
    self._length = config.data.sequence_length
    self._begin, self._known = begins(config, self._tokenizer), config.model.vocabulary_size
    self._spec, self._loaded = config.data.get("chat_template") or "", None

  def task(self, task: Task) -> Encoded:
    """Returns a task as tokens; raises ValueError as `encode`."""
    rows, prompts = [], []
    for record in task.records:
      try:
        if task.kind == GENERATION:
          prompts.append(self._prompt(record))
        else:
          rows.append([self._continuation(record, text) for text in record.choices])
      except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error
    return Encoded(task, rows, prompts)

  def _template(self) -> chat_template.ChatTemplate:
    if self._loaded is None:
      self._loaded = chat_template.load(self._spec, self._tokenizer)
    return self._loaded

  def _rendered(self, messages: list[dict[str, Any]]) -> np.ndarray:
    text = self._template().render(Conversation(messages), prompt=True)
    return self._tokenizer.encode_template(text)[0]

  def _continuation(self, record: Record, text: str) -> Continuation:
    coder, length = self._tokenizer, self._length
    try:
      if isinstance(record.context, str):
        found = scoring.pair(coder, record.context, text, begin=self._begin, length=length)
      else:
        found = scoring.after(coder, self._rendered(record.context), text, length=length)
    except ValueError as error:
      raise ValueError(f"{text[:60]!r}: {error}") from error
    self._check(found.tokens)
    return found

  def _prompt(self, record: Record) -> Prompt:
    if isinstance(record.context, str):
      [ids] = encoded(self._config, Request((record.context,)))
    else:
      ids = self._rendered(record.context)
    self._check(ids)
    return Prompt.fitting(ids, self._length, record.max_new_tokens, until=record.until)

  def _check(self, tokens: np.ndarray) -> None:
    if tokens.max(initial=0) >= self._known:
      raise ValueError(
        f"it has token {tokens.max()}; the model has only tokens below "
        f"model.vocabulary_size={self._known}"
      )


def evaluate(
  job: Job,
  params: Any,
  tasks: Sequence[Encoded],
  variables: Any = None,
  before: Before | None = None,
) -> list[Result] | None:
  """Returns the result of each task; None if it was stopped. All processes call it.

  Args:
    job: whose model and mesh they are scored with.
    params: the parameters, placed as the job's.
    tasks: of `encode`.
    variables: the model's other variables, where it has any.
    before: called before each batch; False stops.
  """
  rows = [one for task in tasks for record in task.rows for one in record]
  scorer = Scorer(job, params, variables)
  count = scorer.count(rows)

  def continues(number: int) -> bool:
    return before is None or before("scoring", number, count)

  scores = scorer(rows, continues)
  if scores is None:
    return None
  results, left, generator = [], iter(scores), BatchGenerator(job, params, variables)
  for task in tasks:
    if task.task.kind == GENERATION:
      what = f"generating for {task.task.name}"
      texts = generator(task.prompts, before and functools.partial(before, what))
      if texts is None:
        return None
      results.append(_generated(task, texts))
    else:
      results.append(_scored(task, [[next(left) for _ in record] for record in task.rows]))
  return results


def _scored(task: Encoded, scores: list[list[Score]]) -> Result:
  samples: list[dict[str, Any]] = []
  for record, found in zip(task.task.records, scores, strict=True):
    values = np.array([score.log_likelihood for score in found])
    sample = {"where": record.where, "log_likelihoods": values.tolist()}
    if task.task.kind == LIKELIHOOD:
      sample["exact_match"], sample["answer_loss"] = found[0].greedy, -float(values[0])
    else:
      characters = [len(text) for text in record.choices]
      sizes = [len(text.encode()) for text in record.choices]
      for name, divisors in (("acc", 1), ("acc_norm", characters), ("acc_bytes", sizes)):
        sample[name] = int(np.argmax(values / np.array(divisors))) == record.answer
    samples.append(sample)
  names = ("acc", "acc_norm", "acc_bytes")
  if task.task.kind == LIKELIHOOD:
    names = ("exact_match", "answer_loss")
  metrics = {name: Metric.of([sample[name] for sample in samples]) for name in names}
  truncated = sum(any(score.truncated for score in found) for found in scores)
  return Result(task.task, metrics, truncated, samples)


def _generated(task: Encoded, texts: Sequence[str]) -> Result:
  samples = []
  for record, text in zip(task.task.records, texts, strict=True):
    answer = extracted(record, text)
    right = answer in {one.strip() for one in record.answers}
    samples.append(
      {"where": record.where, "generated": text, "answer": answer, "exact_match": right}
    )
  metrics = {"exact_match": Metric.of([sample["exact_match"] for sample in samples])}
  return Result(task.task, metrics, sum(prompt.truncated > 0 for prompt in task.prompts), samples)


def extracted(record: Record, text: str) -> str:
  """Returns the answer in what was generated; "" where the record's pattern matches nothing."""
  if record.pattern is None:
    return text.strip()
  found = record.pattern.search(text)
  return (found.group(1 if record.pattern.groups else 0) or "").strip() if found else ""
