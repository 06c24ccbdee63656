"""Conversations in the store: written as tokens with a mask, and left out where the config says so.

The store holds every conversation that can be rendered, whatever the length of rows. Which of them
the rows are made of is decided when a split is opened: one without a trained token, or longer than
a row, is refused or left out (data.untrained_conversations, data.long_conversations).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from etils import epath

from input_pipeline.bad_records import counted
from input_pipeline.sources import catalog
from input_pipeline.text import documents, items, preferences, shard_writer, tokenizer
from input_pipeline.text.chat_template import ChatTemplate
from input_pipeline.text.conversations import DROP, parse

_BATCH = 64  # conversations between two ticks


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


def write(
  folder: epath.Path,
  read: Iterable[items.Item],
  encoder: tokenizer.Tokenizer,
  template: ChatTemplate,
  *,
  limit: int,
  facts: dict[str, Any],
  pairs: bool = False,
  tick: Callable = shard_writer.no_tick,
) -> None:
  """Writes conversations, in order, as a shard.

  Args:
    folder: of the shard.
    read: the records. One that is no conversation, or that the template refuses, is a bad one.
    encoder: the tokenizer.
    template: its chat template.
    limit: data.max_bad_records: with more, the shard is given up.
    facts: what else shard.json says.
    pairs: whether the records are preferences; then each document is a pair.
    tick: as of `worker.write_unit`.

  Raises:
    TooManyBadError: more than `limit` records are bad.
    OSError: a file cannot be read, or the shard not be written.
  """

  def fill(shard: shard_writer.ShardWriter) -> None:
    counts = np.zeros(3, np.int64)
    for record in read:
      why = record.why or _add(shard, record.value, encoder, template, counts, pairs)
      if why:
        shard.add_bad(record, why)
        if shard.bad_count > limit:
          raise shard_writer.TooManyBadError(shard.bad, shard.bad_count)
      if counts[0] == _BATCH:
        tick(*counts.tolist())
        counts[:] = 0
    tick(*counts.tolist())

  about = {"tokenizer": encoder.digest, "chat_template": template.digest, **facts}
  shard_writer.write_shard(folder, encoder.size, about, fill)


def _add(shard, record, encoder, template, counts: np.ndarray, pairs: bool) -> str:
  """Adds a record to the shard; returns why it is no conversation, "" where it is one."""
  try:
    parsed = preferences.parse_pair(record) if pairs else parse(record)
    found = (
      preferences.encode(parsed, template, encoder) if pairs else template.encode(parsed, encoder)
    )
  except (ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
    return str(error)
  if not len(found.tokens):
    return "the template writes nothing for it"
  hashed = shard_writer.content_hash(parsed.content())
  shard.add(found.tokens, found.bytes, hashed, found.trained)
  counts += (1, len(found.tokens), len(found.text.encode()))
  return ""


# ------------------------------ which of them the rows are made of ------------------------------


def kept(prepared: Any, chosen: np.ndarray, data: Any, name: str) -> tuple[np.ndarray, dict]:
  """Returns those of the conversations that rows are made of.

  Args:
    prepared: `preparation.Prepared`.
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
    slots = preferences.slots(index["tokens"])
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
        f"{line(prepared, first)} ({fix}); set data.{key}={DROP} to continue without them"
        + (f", or data.sequence_length={int(slots.max())}" if bad is longer else "")
      )
  good = chosen[~(untrained | longer)]
  if len(chosen) and not len(good):
    why = ", ".join(f"{count:,} by data.{key}={DROP}" for key, count in report.items() if count)
    raise ValueError(f"{name}: all of its {len(chosen):,} conversations are left out: {why}")
  return good, report


def line(prepared: Any, number: int) -> str:
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
  for read in (parse, preferences.parse_pair):
    with contextlib.suppress(ValueError, RecursionError):
      found.append(shard_writer.content_hash(read(record).content()))
  return found


# ------------------------------ shown ------------------------------


def example(prepared: Any, number: int) -> Example:
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
  return Example(line(prepared, number), len(tokens), int(trained.sum()), found)
