"""Preferences: a prompt with two answers, of which the first was preferred.

A record is an object with
  prompt, chosen, rejected       texts, or lists of messages; `system` and `tools` beside them.
                                 `question` and `instruction` are other names of the prompt
  chosen, rejected               two conversations (lists of messages) that begin alike: the prompt
                                 is what both begin with
  input, preferred_output, non_preferred_output    OpenAI's form, with `messages` in `input`

In the store, a pair is one document: the tokens of both conversations, the shorter one padded to
the longer, one after the other. In a row each side has a part of its own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from input_pipeline.source import Source
from input_pipeline.text import items, tokenizer
from input_pipeline.text.chat_template import ChatTemplate, Encoded
from input_pipeline.text.conversations import ASSISTANT, Conversation, parse

SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
_BESIDE = ("system", "tools", "functions", "chat_template_kwargs")
FORMS = "'prompt', 'chosen' and 'rejected', or 'chosen' and 'rejected' that begin alike"


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two conversations that differ in their answers; of both only the answers are trained on."""

  chosen: Conversation
  rejected: Conversation

  def content(self) -> bytes:
    """Returns what distinguishes it from other pairs."""
    return self.chosen.content() + b"\n" + self.rejected.content()


def parse_pair(record: Mapping[str, Any]) -> Pair:
  """Returns the pair of a record.

  Raises:
    ValueError: it is of none of the forms, an answer is empty, or both are the same.
  """
  record = _of_openai(record)
  answers = [record.get(side) for side in SIDES]
  if any(answer is None for answer in answers):
    present = ", ".join(repr(key) for key, value in record.items() if value is not None)
    raise ValueError(f"it has none of {FORMS}, only {present or 'nothing'}")
  prompt = next((record[key] for key in _PROMPTS if record.get(key) is not None), None)
  if prompt is None or (isinstance(prompt, str) and _is_whole(answers[0])):
    prompt, answers = _common(answers)
  elif isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  beside = {key: record[key] for key in _BESIDE if record.get(key) is not None}
  sides = []
  for side, answer in zip(SIDES, answers, strict=True):
    completion = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
    if not completion:
      raise ValueError(f"its {side!r} is empty")
    try:
      sides.append(parse({"prompt": prompt, "completion": completion, **beside}))
    except ValueError as error:
      raise ValueError(f"{side}: {error}") from None
  if sides[0].content() == sides[1].content():
    raise ValueError("its 'chosen' and 'rejected' are the same")
  return Pair(*sides)


def _of_openai(record: Mapping[str, Any]) -> Mapping[str, Any]:
  given = record.get("input")
  if not isinstance(given, dict) or "preferred_output" not in record:
    return record
  return {
    "prompt": given.get("messages"),
    "chosen": record["preferred_output"],
    "rejected": record.get("non_preferred_output"),
    "tools": given.get("tools"),
  }


def _is_whole(answer: Any) -> bool:
  """Returns whether what is given as an answer is a conversation with its prompt."""
  first = answer[0] if isinstance(answer, list) and answer else None
  role = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
  return role not in (None, ASSISTANT, "gpt")


def _common(answers: list[Any]) -> tuple[list[Any], list[list[Any]]]:
  """Returns what two conversations begin with, and the rest of each, from an answer on."""
  for side, answer in zip(SIDES, answers, strict=True):
    if not isinstance(answer, list):
      raise ValueError(
        f"it has no 'prompt', and its {side!r} is {items.type_name(answer)}, not a list of messages"
      )
  pairs = enumerate(zip(*answers, strict=False))
  alike = next((i for i, (one, other) in pairs if one != other), min(map(len, answers)))
  return answers[0][:alike], [answer[alike:] for answer in answers]


def encode(pair: Pair, template: ChatTemplate, encoder: tokenizer.Tokenizer) -> Encoded:
  """Returns a pair as a document: both sides, equally long, one after the other.

  Raises:
    ValueError: as `ChatTemplate.encode`; or nothing of a side is trained on.
  """
  found = [template.encode(one, encoder) for one in (pair.chosen, pair.rejected)]
  for side, one in zip(SIDES, found, strict=True):
    if not one.trained.any():
      raise ValueError(f"{side}: no token of the answer is trained on")
  length = max(len(one.tokens) for one in found)
  missing = [length - len(one.tokens) for one in found]
  tokens = [
    np.pad(one.tokens, (0, more), constant_values=encoder.end)
    for one, more in zip(found, missing, strict=True)
  ]
  trained = [np.pad(one.trained, (0, more)) for one, more in zip(found, missing, strict=True)]
  return Encoded(
    "".join(one.text for one in found),
    np.concatenate(tokens).astype(np.uint32),
    np.concatenate(trained),
    sum(one.bytes for one in found),
  )


# ------------------------------ rows ------------------------------


def slots(tokens: np.ndarray) -> np.ndarray:
  """Returns how many slots each side of pairs takes, of the tokens of their documents, int64."""
  return tokens.astype(np.int64) // 2 - 1


def row_slots(length: int) -> int:
  """Returns the slots of a document whose sides have at most `length` slots each."""
  return 2 * (length + 1) - 1


def divided(source: Source, sides: np.ndarray, length: int) -> Source:
  """Returns a source whose rows have the two sides apart.

  Args:
    source: a row of which is a document, as `encode` makes them.
    sides: int64 [rows], how many slots each side of a row takes.
    length: T, the slots of a side in a row.

  Returns:
    A Source with `FIELDS`.
  """

  def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
    rows, count = source.read(numbers), sides[np.asarray(numbers, np.int64)]
    slots_1T = np.arange(length)[None, :]
    inside = slots_1T < count[:, None]
    found = {"weights": np.any(rows["weights"] > 0, axis=1).astype(np.float32)}
    for name in SIDES:
      # The slot between the two predicts the first token of the second from the last of the first.
      first = 0 if name == SIDES[0] else count[:, None] + 1
      place = np.minimum(slots_1T + first, rows["tokens"].shape[1] - 1)
      for key in ("tokens", "targets", "weights"):
        taken = np.take_along_axis(rows[key], np.broadcast_to(place, inside.shape), axis=1)
        found[f"{name}_{key}"] = np.where(inside, taken, 0).astype(taken.dtype)
      found[f"reference_{name}"] = np.zeros(len(inside), np.float32)
    return found

  return dataclasses.replace(source, fields=fields(length), read=read)


def fields(length: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Returns the fields of rows: of each side tokens, targets and weights, and of both a weight."""
  found = {"weights": ((), np.dtype(np.float32))}
  for name in SIDES:
    for key, kind in (("tokens", np.int32), ("targets", np.int32), ("weights", np.float32)):
      found[f"{name}_{key}"] = ((length,), np.dtype(kind))
    found[f"reference_{name}"] = ((), np.dtype(np.float32))
  return found
