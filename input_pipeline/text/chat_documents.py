"""Conversations in the store: written as tokens with a mask, and left out where the config says so.

The store holds every conversation that can be rendered, whatever the length of rows. Which of them
the rows are made of is decided when a split is opened: one without a trained token, or longer than
a row, is refused or left out (data.untrained_conversations, data.long_conversations).

Preferences are a prompt with two answers, of which the first was preferred. A record is an object
with
  prompt, chosen, rejected       texts, or lists of messages; `system` and `tools` beside them.
                                 `question` and `instruction` are other names of the prompt
  chosen, rejected               two conversations (lists of messages) that begin alike: the prompt
                                 is what both begin with
  input, preferred_output, non_preferred_output    OpenAI's form, with `messages` in `input`

In the store, a pair is one document: the tokens of both conversations, the shorter one padded to
the longer, one after the other. In a row each side has a part of its own.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from input_pipeline import catalog, shard_writer
from input_pipeline.shard_writer import Item
from input_pipeline.source import Source, counted
from input_pipeline.store import Prepared
from input_pipeline.text import documents, tokenizer
from input_pipeline.text.chat_template import ChatTemplate, Encoded
from input_pipeline.text.conversations import ASSISTANT, DROP, Conversation, parse

# ------------------------------ preferences ------------------------------

SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
_BESIDE = ("system", "tools", "functions", "chat_template_kwargs")
PAIR_FORMS = "'prompt', 'chosen' and 'rejected', or 'chosen' and 'rejected' that begin alike"


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
    raise ValueError(f"it has none of {PAIR_FORMS}, only {present or 'nothing'}")
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
        f"it has no 'prompt', and its {side!r} is {documents.type_name(answer)}, not a list of"
        " messages"
      )
  pairs = enumerate(zip(*answers, strict=False))
  alike = next((i for i, (one, other) in pairs if one != other), min(map(len, answers)))
  return answers[0][:alike], [answer[alike:] for answer in answers]


def encode_pair(pair: Pair, template: ChatTemplate, encoder: tokenizer.Tokenizer) -> Encoded:
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


def pair_slots(tokens: np.ndarray) -> np.ndarray:
  """Returns how many slots each side of pairs takes, of the tokens of their documents, int64."""
  return tokens.astype(np.int64) // 2 - 1


def pair_row_slots(length: int) -> int:
  """Returns the slots of a document whose sides have at most `length` slots each."""
  return 2 * (length + 1) - 1


def divide_pairs(source: Source, sides: np.ndarray, length: int) -> Source:
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

  return dataclasses.replace(source, fields=pair_fields(length), read=read)


def pair_fields(length: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  """Returns the fields of rows: of each side tokens, targets and weights, and of both a weight."""
  found = {"weights": ((), np.dtype(np.float32))}
  for name in SIDES:
    for key, kind in (("tokens", np.int32), ("targets", np.int32), ("weights", np.float32)):
      found[f"{name}_{key}"] = ((length,), np.dtype(kind))
    found[f"reference_{name}"] = ((), np.dtype(np.float32))
  return found


# ------------------------------ in the store ------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
  """A conversation as the store has it.

  Attributes:
    place: where it is from: `FILE:LINE`.
    tokens: how many it has.
    trained: how many of them are trained on.
    segments: its text in parts, each with whether it is trained on.
  """

  place: str
  tokens: int
  trained: int
  segments: list[tuple[bytes, bool]]


def write_conversations(
  folder: epath.Path,
  read: Iterable[Item],
  encoder: tokenizer.Tokenizer,
  template: ChatTemplate,
  facts: Mapping[str, Any],
  *,
  limit: int,
  pairs: bool,
  tick: Callable,
) -> None:
  """Writes conversations, in order, as a shard.

  Args:
    folder: of the shard.
    read: the records. One that is no conversation, or that the template refuses, is a bad one.
    encoder: the tokenizer.
    template: its chat template.
    facts: what else shard.json says.
    limit: data.max_bad_records: with more, the shard is given up.
    pairs: whether the records are preferences; then each document is a pair.
    tick: as of `shard_writer.write_shard`, whose errors it raises too.
  """

  def fill(shard: shard_writer.ShardWriter) -> None:
    for record in read:
      if why := record.why or _add(shard, record.value, encoder, template, pairs):
        shard.add_bad(record, why)

  about = {"tokenizer": encoder.digest, "chat_template": template.digest, **facts}
  shard_writer.write_shard(folder, encoder.size, about, fill, limit, tick)


def _add(shard, record, encoder, template, pairs: bool) -> str:
  """Adds a record to the shard; returns why it is no conversation, "" where it is one."""
  try:
    parsed = parse_pair(record) if pairs else parse(record)
    found = encode_pair(parsed, template, encoder) if pairs else template.encode(parsed, encoder)
  except (ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
    return str(error)
  if not len(found.tokens):
    return "the template writes nothing for it"
  hashed = shard_writer.content_hash(parsed.content())
  shard.add(found.tokens, found.bytes, hashed, found.trained, len(found.text.encode()))
  return ""


# ------------------------------ which of them the rows are made of ------------------------------


def select_conversations(
  prepared: Prepared, chosen: np.ndarray, data: Any, name: str
) -> tuple[np.ndarray, dict]:
  """Returns those of the conversations that rows are made of.

  Args:
    prepared: what is in the store.
    chosen: int64 [N], the numbers of the conversations of a split.
    data: the config's `data` section.
    name: of the split, for messages.

  Returns:
    their numbers, int64; and what was left out, for the report of the Source.

  Raises:
    ValueError: there are some that may not be left out; with file and line of the first.
  """
  index, T = prepared.documents.index[chosen], data.sequence_length
  untrained, slots = index["trained"] == 0, index["tokens"].astype(np.int64) - 1
  if data.name == catalog.PREFERENCES:
    slots = pair_slots(index["tokens"])
  longer = (slots > T) & ~untrained
  report = {}
  for key, bad, what, fix in (
    (
      "untrained_conversations",
      untrained,
      "without a token to train on",
      "the assistant says nothing in it that is trained, by its template and weights",
    ),
    (
      "long_conversations",
      longer,
      f"longer than a row of data.sequence_length={T} tokens",
      f"the longest takes {int(slots.max(initial=0)):,}; conversations are never split",
    ),
  ):
    report[key] = int(np.count_nonzero(bad))
    if report[key] and data[key] != DROP:
      first = int(chosen[np.flatnonzero(bad)[0]])
      raise ValueError(
        f"{name}: {report[key]:,} of {counted(index, 'conversation')} {what}, the first at "
        f"{place_in_files(prepared, first)} ({fix}); set data.{key}={DROP} to continue without them"
        + (f", or data.sequence_length={int(slots.max())}" if bad is longer else "")
      )
  good = chosen[~(untrained | longer)]
  if len(chosen) and not len(good):
    why = ", ".join(f"{count:,} by data.{key}={DROP}" for key, count in report.items() if count)
    raise ValueError(f"{name}: all of its {len(chosen):,} conversations are left out: {why}")
  return good, report


def place_in_files(prepared: Prepared, number: int) -> str:
  """Returns where a conversation is in the files: `FILE:LINE`; else, where it is in the store."""
  unit = prepared.units[prepared.documents.shard_of(number)]
  wanted = int(prepared.documents.index["hash"][number])
  try:
    for record in documents.read_records(unit):
      if record.value is not None and wanted in _hashes(record.value):
        return record.where
  except (OSError, ValueError):  # the file is no longer what it was
    pass
  return prepared.documents.place(int(prepared.documents.first_record[number]))


def _hashes(record: Any) -> list[int]:
  """Returns the hashes that a record may have in the store."""
  found = []
  for read in (parse, parse_pair):
    with contextlib.suppress(ValueError, RecursionError):
      found.append(shard_writer.content_hash(read(record).content()))
  return found


# ------------------------------ shown ------------------------------


def example(prepared: Prepared, number: int) -> Example:
  """Returns a conversation to be shown."""
  first, last = prepared.documents.first_record[number : number + 2]
  tokens, trained = prepared.documents.read(np.arange(first, last))
  special = {id_: name.encode() for name, id_ in prepared.encoder.special.items()}
  found: list[tuple[bytes, bool]] = []
  for id_, learned in zip(tokens.tolist(), trained.tolist(), strict=True):
    text = special.get(id_) or prepared.encoder.token_bytes(id_)
    if found and found[-1][1] == learned:
      found[-1] = (found[-1][0] + text, learned)
    else:
      found.append((text, learned))
  return Example(place_in_files(prepared, number), len(tokens), int(trained.sum()), found)
