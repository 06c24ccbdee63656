"""Prompts: records that models answer; the rows of the task `grpo`.

A record is an object with
  prompt                    a text, which is taken as it is, or a list of messages. `question` and
                            `instruction` are other names of it
  messages, conversations   a conversation that ends before the assistant's answer
Messages are written by the chat template, with the prompt for the assistant behind them. What else
a record has is for the reward of its answers. All records are in memory.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from input_pipeline import shard_writer
from input_pipeline.source import Source, counted
from input_pipeline.text import chat_template, conversations, documents, files, tokenizer

FIELDS = {
  "weights": "B",
  **dict.fromkeys(("tokens", "targets"), "BT"),
  **dict.fromkeys(("token_weights", "sampled", "reference"), "BT"),
  **dict.fromkeys(("advantages", "rewards"), "B"),
}
_TEXTS = ("prompt", "question", "instruction")
_CONVERSATIONS = ("messages", "conversations")
_BESIDE = ("system", "tools", "chat_template_kwargs")
_SHARE = 2.0**64  # hashes are below


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A record, and its prompt.

  Attributes:
    text: as the reward sees it.
    tokens: int32, as the model reads it; at least one.
    record: the object.
    place: where it is from: `FILE:LINE`.
    templated: whether a chat template has written it.
  """

  text: str
  tokens: np.ndarray
  record: Mapping[str, Any]
  place: str
  templated: bool


def open_source(data: Any, split: str, tick: Callable) -> Source:
  """Returns the prompts of a split, as `Source.prompts`.

  Its rows are for programs that compare steps, and as many as there are prompts: each prompt is
  also its own answer. A run puts answers that it draws in their place.

  Args:
    data: the config's `data` section.
    split: `train` or `test`; the latter are data.evaluation_files, or a share by content.
    tick: as of `row_source.open_source`.

  Raises:
    ValueError: there is no prompt, or more records without one than data.max_bad_records; with the
      first.
  """
  apart = bool(data.evaluation_files)
  held_out = apart and split == "test"
  spec = data.evaluation_files if held_out else data.files
  key = "data.evaluation_files" if held_out else "data.files"
  encoder = tokenizer.load(tokenizer.resolve(data))
  found, hashes = _read(spec, key, data, encoder, tick)
  if not apart and found:
    share = hashes < data.evaluation_fraction * _SHARE
    share |= hashes == hashes.min()  # of the smallest hash, so that there is always one
    chosen = share if split == "test" else ~share
    found = [one for one, taken in zip(found, chosen, strict=True) if taken]
    hashes = hashes[chosen]
  name = f"{data.name} {split} ({spec})"
  if not found:
    raise ValueError(f"{name} is empty: no prompt is left; name others with {key}")
  digest = hashlib.sha256(f"{encoder.digest} {data.sequence_length}".encode())
  digest.update(hashes.tobytes())
  for one in found:
    digest.update(one.tokens.tobytes())
  return Source(
    name=name,
    fingerprint=digest.hexdigest(),
    rows=len(found),
    fields=_fields(data.sequence_length),
    read=lambda numbers: _rows([found[number] for number in numbers], data.sequence_length),
    ids=encoder.size,
    tokenizer="" if encoder.name == tokenizer.BYTES else encoder.name,
    tokenizer_digest=encoder.digest,
    origins=lambda number: [found[number].place],
    prompts=tuple(found),
  )


def _read(
  spec: str, key: str, data: Any, encoder: tokenizer.Tokenizer, tick: Callable
) -> tuple[list[Prompt], np.ndarray]:
  """Returns all prompts of files, and the hashes of their records, uint64."""
  bad, found, hashes = [], [], []
  templates: list[chat_template.ChatTemplate] = []  # loaded where a record needs it

  def template() -> chat_template.ChatTemplate:
    if not templates:
      templates.append(chat_template.load(data.chat_template, encoder))
    return templates[0]

  for item in _records(spec, key):
    try:
      if item.why:
        raise ValueError(item.why)
      found.append(_prompt(item.value, item.where, encoder, template))
    except (ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
      bad.append(f"{item.where}: {error}")
      continue
    content = json.dumps(item.value, sort_keys=True, default=str).encode()
    hashes.append(shard_writer.content_hash(content))
    if len(found) % 256 == 0:
      tick("prompts", len(found), f"{len(found):,} prompts")
  if len(bad) > data.max_bad_records:
    raise ValueError(
      f"{spec}: {counted(bad, 'record')} cannot be prompts, more than data.max_bad_records="
      f"{data.max_bad_records}; the first: {bad[0]}"
    )
  return found, np.array(hashes, np.uint64)


def _records(spec: str, key: str) -> Iterator[shard_writer.Item]:
  for unit in documents.units(files.find(spec, key)):
    yield from documents.read_records(unit)


def _prompt(
  record: Mapping[str, Any], place: str, encoder: tokenizer.Tokenizer, template: Callable
) -> Prompt:
  """Returns the prompt of a record; raises ValueError where it has none."""
  given = next((record[key] for key in (*_TEXTS, *_CONVERSATIONS) if record.get(key)), None)
  if isinstance(given, str):
    [ids] = encoder.encode([given.encode()])
    tokens = np.concatenate([np.array([encoder.start]), ids])
    return Prompt(given, tokens.astype(np.int32), record, place, templated=False)
  if not isinstance(given, list):
    present = ", ".join(map(repr, record)) or "nothing"
    raise ValueError(f"it has no 'prompt' (a text, or messages), only {present}")
  beside = {key: record[key] for key in _BESIDE if key in record}
  conversation = conversations.parse({"messages": given, **beside})
  if conversation.messages[-1]["role"] == conversations.ASSISTANT:
    raise ValueError("it ends with a message of the assistant; leave the answer out")
  text = template().render(conversation, prompt=True)
  tokens, _ = encoder.encode_template(text)
  return Prompt(text, tokens.astype(np.int32), record, place, templated=True)


# ------------------------------ rows ------------------------------


def _fields(length: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Returns field -> (shape of a row, dtype)."""
  kinds = {"weights": np.float32, "tokens": np.int32, "targets": np.int32}
  return {
    name: ((length,) if letters == "BT" else (), np.dtype(kinds.get(name, np.float64)))
    for name, letters in FIELDS.items()
  }


def _rows(prompts: list[Prompt], length: int) -> dict[str, np.ndarray]:
  """Returns rows in which a prompt is its own answer, with advantages of both signs."""
  found = {
    name: np.zeros((len(prompts), *shape), kind) for name, (shape, kind) in _fields(length).items()
  }
  found["weights"] += 1
  for row, one in enumerate(prompts):
    tokens = one.tokens[: length + 1]
    last = max(1, len(tokens) - 1)
    found["tokens"][row, : len(tokens) - 1], found["targets"][row, : len(tokens) - 1] = (
      tokens[:-1],
      tokens[1:],
    )
    found["token_weights"][row, :last] = 1 / last
    found["sampled"][row, :last] = -1
    found["advantages"][row] = (-1) ** row
  return found
