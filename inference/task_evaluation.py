"""Tasks scored with a model: accuracy by log-likelihood, exact match, their standard errors.

The metrics are those of lm-evaluation-harness: `acc` takes the choice with the largest
log-likelihood, `acc_norm` that with the largest per character, `acc_bytes` per byte of UTF-8. A
standard error is the standard deviation of the records' values (with n - 1) over the root of n.

Tasks are records in lines of JSON (`evaluate --tasks`, `evaluation.tasks`). A record is an object
with `context`, a text or a list of messages, and with
  choices, answer   multiple choice: the answer is the number of a choice, from 0, or its text
  answer            a text: is each of its tokens the model's first choice? One forward pass
  answer, until     a text, or several of which one is right: generated greedily, up to the first
                    text of `until` or `max_new_tokens`; `pattern`, a regular expression, takes the
                    answer out of what was generated
All records of a file are of one kind. Other keys are ignored.
"""

import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from inference import scoring
from inference.request import Request, TextSpec
from inference.sampler import BatchGenerator, Given, fitted
from inference.scoring import Continuation, Score, Scorer
from input_pipeline.text import chat_template, documents, files
from input_pipeline.text.conversations import Conversation
from input_pipeline.text.conversations import parse as conversation
from runtime import forms
from runtime.suggest import closest
from training.evaluation import Before
from training.setup import Job

# ------------------------------ records ------------------------------

CHOICE, LIKELIHOOD, GENERATION = "multiple choice", "exact match, likelihood", "exact match"
RECORD_KEYS = ("context", "choices", "answer", "until", "max_new_tokens", "pattern")
NEW_TOKENS = 256  # the default of max_new_tokens
_MOST_LISTED = 8  # bad records that a refusal names


@dataclasses.dataclass(frozen=True)
class Record:
  """What a record asks.

  Attributes:
    where: `FILE:LINE`.
    kind: CHOICE, LIKELIHOOD or GENERATION.
    context: a text; or the messages of a conversation, which the chat template renders.
    choices: texts; of LIKELIHOOD the answer alone.
    answer: the number of the right choice.
    answers: of GENERATION, any of which is right.
    until: texts that end what is generated.
    max_new_tokens: the most tokens that are generated.
    pattern: its first group (or all of it, where it has none) is the answer.
  """

  where: str
  kind: str
  context: str | list[dict[str, Any]]
  choices: tuple[str, ...] = ()
  answer: int = 0
  answers: tuple[str, ...] = ()
  until: tuple[str, ...] = ()
  max_new_tokens: int = NEW_TOKENS
  pattern: re.Pattern | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """A file of records.

  Attributes:
    name: the file's, without its endings.
    path: of the file.
    kind: of all its records.
    records: in their order.
  """

  name: str
  path: str
  kind: str
  records: list[Record]


def read_tasks(spec: str, key: str = "--tasks") -> list[Task]:
  """Returns the tasks in files.

  Args:
    spec: paths, globs or URIs of .jsonl files (also .gz, .zst), separated by commas.
    key: where they are named, for messages.

  Raises:
    ValueError: a file is missing, or is no task; with file and line of each bad record.
  """
  tasks = [_task(file, key) for file in files.find(spec, key)]
  names = [task.name for task in tasks]
  if twice := {name for name in names if names.count(name) > 1}:
    both = ", ".join(task.path for task in tasks if task.name in twice)
    raise ValueError(f"{key}: {both} would have the same name in the results; rename one")
  return tasks


def digest(tasks: Sequence[Task]) -> str:
  """Returns what tells tasks with other records apart."""
  return hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]


def _task(file: files.InputFile, key: str) -> Task:
  if file.suffix not in files.LINES:
    raise ValueError(f"{key}: {file.path} is not a .jsonl file; a task has an object per line")
  records, wrong = [], []
  try:
    for item in documents.json_records(file, None):
      try:
        if item.why:
          raise ValueError(item.why)
        records.append(parse_record(item.value, item.where))
      except ValueError as error:
        wrong.append(f"{item.where}: {error}")
    files.check_unchanged(file)
  except OSError as error:
    raise documents.unreadable_error(file, error) from error
  if wrong:
    raise forms.refusal(f"{key}: {len(wrong):,} records cannot be scored:", wrong, _MOST_LISTED)
  if not records:
    raise ValueError(f"{key}: {file.path} is empty")
  first = records[0]
  for record in records:
    if record.kind != first.kind:
      raise ValueError(
        f"{key}: {record.where} is {record.kind}, and {first.where} is {first.kind}; a file is "
        f"one task: write them into two"
      )
  name = os.path.basename(file.path)
  return Task(name[: name.lower().rindex(".jsonl")], file.path, first.kind, records)


def parse_record(value: Mapping[str, Any], where: str) -> Record:
  """Returns a record.

  Args:
    value: the object.
    where: `FILE:LINE`.

  Raises:
    ValueError: it lacks a key, or what is under one is of no use.
  """
  for key in ("context", "answer"):
    if key not in value:
      others = [other for other in value if other not in RECORD_KEYS]
      near = f"; {other!r} is another key" if (other := closest(key, others)) else ""
      present = ", ".join(map(repr, value)) or "nothing"
      raise ValueError(f"it has no {key!r}, only {present}{near}")
    if value[key] is None:
      raise ValueError(f"its {key!r} is null")
  context = _context(value["context"])
  if value.get("choices") is not None:
    choices = tuple(_texts_of(value["choices"], "choices"))
    if len(choices) < 2:
      raise ValueError(f"it has {len(choices)} of 'choices'; a choice needs at least 2")
    return Record(where, CHOICE, context, choices, _answer_number(value["answer"], choices))
  if value.get("until") is None:
    for key in ("max_new_tokens", "pattern"):
      if value.get(key) is not None:
        raise ValueError(
          f"it has {key!r} and no 'until', so nothing is generated; add it ([] for no such text)"
        )
    [answer] = _texts_of([value["answer"]], "answer")
    return Record(where, LIKELIHOOD, context, (answer,))
  answer, most = value["answer"], value.get("max_new_tokens", NEW_TOKENS)
  if type(most) is not int or most < 1:
    raise ValueError(f"its 'max_new_tokens' is {most!r}, not a number of at least 1")
  return Record(
    where,
    GENERATION,
    context,
    answers=tuple(_texts_of(answer if isinstance(answer, list) else [answer], "answer")),
    until=tuple(_texts_of(value["until"], "until")),
    max_new_tokens=most,
    pattern=_pattern(value.get("pattern")),
  )


def _context(value: Any) -> str | list[dict[str, Any]]:
  if isinstance(value, list):
    return conversation({"messages": value}).messages
  if not isinstance(value, str):
    raise ValueError(f"its 'context' is {documents.type_name(value)}, not a string or messages")
  return value


def _texts_of(value: Any, key: str) -> Iterator[str]:
  if not isinstance(value, list):
    raise ValueError(f"its {key!r} is {documents.type_name(value)}, not a list of strings")
  for text in value:
    if not isinstance(text, str) or not text:
      what = "an empty string" if text == "" else documents.type_name(text)
      raise ValueError(f"{what} is in its {key!r}; a text is needed")
    yield text


def _answer_number(answer: Any, choices: tuple[str, ...]) -> int:
  """Returns the number of the right choice, which is given as such or as its text."""
  if type(answer) is int:
    if 0 <= answer < len(choices):
      return answer
    raise ValueError(f"its 'answer' is {answer}; its choices are 0 to {len(choices) - 1}")
  if answer in choices:
    return choices.index(answer)
  listed = ", ".join(map(repr, choices))
  raise ValueError(f"its 'answer' {answer!r} is not among its choices: {listed}")


def _pattern(value: Any) -> re.Pattern | None:
  if value is None:
    return None
  try:
    return re.compile(value)
  except (TypeError, re.error) as error:
    raise ValueError(f"its 'pattern' {value!r} is not a regular expression ({error})") from None


# ------------------------------ evaluation ------------------------------


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


# Of the samples of a task of each kind.
METRICS = {
  CHOICE: ("acc", "acc_norm", "acc_bytes"),
  LIKELIHOOD: ("exact_match", "answer_loss"),
  GENERATION: ("exact_match",),
}


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a task.

  Attributes:
    task: the task.
    truncated: of how many records the context was cut off on the left.
    samples: an object for each record: what the model gave, and whether it was right.
  """

  task: Task
  truncated: int
  samples: list[dict[str, Any]]

  @functools.cached_property
  def metrics(self) -> dict[str, Metric]:
    """Returns the metrics by name."""
    names = METRICS[self.task.kind]
    return {name: Metric.of([sample[name] for sample in self.samples]) for name in names}


@dataclasses.dataclass(frozen=True)
class Encoded:
  """A task as tokens: of each record its continuations, or its prompt, and whether that was cut."""

  task: Task
  rows: list[list[Continuation]] = dataclasses.field(default_factory=list)
  requests: list[Request] = dataclasses.field(default_factory=list)
  truncated: list[bool] = dataclasses.field(default_factory=list)


def encode(spec: TextSpec, tasks: Sequence[Task]) -> list[Encoded]:
  """Returns the tasks as tokens.

  Args:
    spec: of the model.
    tasks: as `read_tasks` returns them.

  Raises:
    ValueError: the model does not score texts, a text cannot be encoded, does not fit a row or has
      a token that the model does not know; with file and line. Or there is no chat template.
  """
  scoring.check_model(spec.model)

  @functools.cache
  def template() -> chat_template.ChatTemplate:
    return chat_template.load(spec.chat_template, spec.tokenizer)

  def add(record: Record, to: Encoded) -> None:
    context = record.context
    if not isinstance(context, str):
      text = template().render(Conversation(context), prompt=True)
      context = spec.tokenizer.encode_template(text)[0]
    if record.kind != GENERATION:
      to.rows.append([_continuation(spec, context, text) for text in record.choices])
      return
    ids = spec.encoded([context])[0] if isinstance(context, str) else context
    _check(spec, ids)
    one = fitted(ids, spec.sequence_length, record.max_new_tokens, stop=record.until)
    to.requests.append(one)
    to.truncated.append(len(one.prompts[0]) < len(ids))

  found = [Encoded(task) for task in tasks]
  for one in found:
    for record in one.task.records:
      try:
        add(record, one)
      except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error
  return found


def _continuation(spec: TextSpec, context: str | np.ndarray, text: str) -> Continuation:
  coder, length = spec.tokenizer, spec.sequence_length
  try:
    if isinstance(context, str):
      found = scoring.pair(coder, context, text, begin=spec.begins, length=length)
    else:
      found = scoring.after(coder, context, text, length=length)
  except ValueError as error:
    raise ValueError(f"{text[:60]!r}: {error}") from error
  _check(spec, found.tokens)
  return found


def _check(spec: TextSpec, tokens: np.ndarray) -> None:
  if tokens.max(initial=0) >= spec.vocabulary_size:
    raise ValueError(
      f"it has token {tokens.max()}; the model has only tokens below "
      f"model.vocabulary_size={spec.vocabulary_size}"
    )


class TaskEvaluator:
  """Scores a job's model on tasks; programs are compiled when they are first used."""

  def __init__(self, job: Job, tasks: Sequence[Encoded]):
    """Takes the tasks, as `encode` returns them."""
    self._tasks, self._scorer, self._generator = tasks, Scorer(job), BatchGenerator(job)

  def __call__(self, given: Given, before: Before | None = None) -> list[Result] | None:
    """Returns the result of each task; None if it was stopped. All processes call it.

    Args:
      given: parameters and variables of the model.
      before: called before each batch; False stops.
    """
    rows = [one for task in self._tasks for record in task.rows for one in record]
    scores = self._scorer(given, rows, before and functools.partial(before, "scoring"))
    if scores is None:
      return None
    results, left = [], iter(scores)
    for task in self._tasks:
      if task.task.kind == GENERATION:
        what = f"generating for {task.task.name}"
        texts = self._generator(given, task.requests, before and functools.partial(before, what))
        if texts is None:
          return None
        results.append(_generated(task, texts))
      else:
        results.append(_scored(task, [[next(left) for _ in record] for record in task.rows]))
    return results

  def metrics(self, given: Given, before: Before) -> dict[str, tuple[float, float | None]] | None:
    """Returns the metrics as an evaluation has them: `eval_acc/TASK` -> (value, standard error)."""
    results = self(given, before)
    return results and {
      f"eval_{name}/{result.task.name}": (metric.value, metric.standard_error)
      for result in results
      for name, metric in result.metrics.items()
    }


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
      for name, divisors in zip(METRICS[CHOICE], (1, characters, sizes), strict=True):
        sample[name] = int(np.argmax(values / np.array(divisors))) == record.answer
    samples.append(sample)
  truncated = sum(any(score.truncated for score in found) for found in scores)
  return Result(task.task, truncated, samples)


def _generated(task: Encoded, texts: Sequence[str]) -> Result:
  samples = []
  for record, text in zip(task.task.records, texts, strict=True):
    answer = extracted(record, text)
    right = answer in {one.strip() for one in record.answers}
    samples.append(
      {"where": record.where, "generated": text, "answer": answer, "exact_match": right}
    )
  return Result(task.task, sum(task.truncated), samples)


def extracted(record: Record, text: str) -> str:
  """Returns the answer in what was generated; "" where the record's pattern matches nothing."""
  if record.pattern is None:
    return text.strip()
  found = record.pattern.search(text)
  return (found.group(1 if record.pattern.groups else 0) or "").strip() if found else ""
