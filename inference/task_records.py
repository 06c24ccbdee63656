"""Tasks for `evaluate --tasks`: records in lines of JSON, and what each asks of a model.

A record is an object with `context`, a text or a list of messages, and with
  choices, answer   multiple choice: the answer is the number of a choice, from 0, or its text
  answer            a text: is each of its tokens the model's first choice? One forward pass
  answer, until     a text, or several of which one is right: generated greedily, up to the first
                    text of `until` or `max_new_tokens`; `pattern`, a regular expression, takes the
                    answer out of what was generated
All records of a file are of one kind. Other keys are ignored.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from input_pipeline.text import files, items, json_lines
from input_pipeline.text.conversations import parse as conversation
from runtime.suggest import closest

CHOICE, LIKELIHOOD, GENERATION = "multiple choice", "exact match, likelihood", "exact match"
KEYS = ("context", "choices", "answer", "until", "max_new_tokens", "pattern")
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


def read(spec: str) -> list[Task]:
  """Returns the tasks in files.

  Args:
    spec: paths, globs or URIs of .jsonl files (also .gz, .zst), separated by commas.

  Raises:
    ValueError: a file is missing, or is no task; with file and line of each bad record.
  """
  tasks = [_task(file) for file in files.find(spec, "--tasks")]
  names = [task.name for task in tasks]
  if twice := {name for name in names if names.count(name) > 1}:
    both = ", ".join(task.path for task in tasks if task.name in twice)
    raise ValueError(f"--tasks: {both} would have the same name in the results; rename one")
  return tasks


def _task(file: files.InputFile) -> Task:
  if file.suffix not in files.LINES:
    raise ValueError(f"--tasks: {file.path} is not a .jsonl file; a task has an object per line")
  records, wrong = [], []
  try:
    for item in json_lines.records(file, None):
      try:
        records.append(parse(item.value, item.where) if not item.why else _bad(item.why))
      except ValueError as error:
        wrong.append(f"{item.where}: {error}")
    files.check_unchanged(file)
  except OSError as error:
    raise items.unreadable(file, error) from error
  if wrong:
    more = f"\n  and {len(wrong) - _MOST_LISTED:,} more" if len(wrong) > _MOST_LISTED else ""
    listed = "".join(f"\n  {line}" for line in wrong[:_MOST_LISTED])
    raise ValueError(f"--tasks: {len(wrong):,} records cannot be scored:{listed}{more}")
  if not records:
    raise ValueError(f"--tasks: {file.path} is empty")
  first = records[0]
  for record in records:
    if record.kind != first.kind:
      raise ValueError(
        f"--tasks: {record.where} is {record.kind}, and {first.where} is {first.kind}; a file is "
        f"one task: write them into two"
      )
  name = os.path.basename(file.path)
  return Task(name[: name.lower().rindex(".jsonl")], file.path, first.kind, records)


def _bad(why: str) -> Any:
  raise ValueError(why)


def parse(value: Mapping[str, Any], where: str) -> Record:
  """Returns a record.

  Args:
    value: the object.
    where: `FILE:LINE`.

  Raises:
    ValueError: it lacks a key, or what is under one is of no use.
  """
  for key in ("context", "answer"):
    if key not in value:
      others = [other for other in value if other not in KEYS]
      near = f"; {other!r} is another key" if (other := closest(key, others)) else ""
      present = ", ".join(map(repr, value)) or "nothing"
      raise ValueError(f"it has no {key!r}, only {present}{near}")
    if value[key] is None:
      raise ValueError(f"its {key!r} is null")
  context = _context(value["context"])
  if value.get("choices") is not None:
    choices = tuple(_texts(value["choices"], "choices"))
    if len(choices) < 2:
      raise ValueError(f"it has {len(choices)} of 'choices'; a choice needs at least 2")
    return Record(where, CHOICE, context, choices, _number(value["answer"], choices))
  if value.get("until") is None:
    for key in ("max_new_tokens", "pattern"):
      if value.get(key) is not None:
        raise ValueError(
          f"it has {key!r} and no 'until', so nothing is generated; add it ([] for no such text)"
        )
    [answer] = _texts([value["answer"]], "answer")
    return Record(where, LIKELIHOOD, context, (answer,))
  answer, most = value["answer"], value.get("max_new_tokens", NEW_TOKENS)
  if type(most) is not int or most < 1:
    raise ValueError(f"its 'max_new_tokens' is {most!r}, not a number of at least 1")
  return Record(
    where,
    GENERATION,
    context,
    answers=tuple(_texts(answer if isinstance(answer, list) else [answer], "answer")),
    until=tuple(_texts(value["until"], "until")),
    max_new_tokens=most,
    pattern=_pattern(value.get("pattern")),
  )


def _context(value: Any) -> str | list[dict[str, Any]]:
  if isinstance(value, list):
    return conversation({"messages": value}).messages
  if not isinstance(value, str):
    raise ValueError(f"its 'context' is {items.type_name(value)}, not a string or messages")
  return value


def _texts(value: Any, key: str) -> Iterator[str]:
  if not isinstance(value, list):
    raise ValueError(f"its {key!r} is {items.type_name(value)}, not a list of strings")
  for text in value:
    if not isinstance(text, str) or not text:
      what = "an empty string" if text == "" else items.type_name(text)
      raise ValueError(f"{what} is in its {key!r}; a text is needed")
    yield text


def _number(answer: Any, choices: tuple[str, ...]) -> int:
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
