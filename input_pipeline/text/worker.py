"""Tokenizes a unit of the files into a shard; also as a process: `-m input_pipeline.text.worker`.

The process reads pickled messages from standard input, a Task and then one unit after the other,
and answers on standard output with a line of JSON each: how far it is, that a shard is complete, or
why it cannot be written. It ends as soon as its standard input is closed, so also when the process
that started it is killed.
"""

import dataclasses
import json
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from input_pipeline.text import documents, files, shard_writer, tokenizer
from runtime import exit_codes

_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 2**21  # that the tokenizer gets at once
_LONGEST = 2**32 - 2  # bytes of a document
_NEWS_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Task:
  """What is the same for all units.

  Attributes:
    folder: of the shards.
    tokenizer: its spec.
    digest: of the tokenizer.
    feature: the column or key with the text.
    limit: data.max_bad_records: with more, a unit is given up.
    chat_template: data.chat_template where the files hold conversations; None: they hold texts.
    pairs: whether they hold pairs of conversations: preferences.
    template_digest: of the chat template; "": any.
  """

  folder: epath.Path
  tokenizer: str
  digest: str
  feature: str
  limit: int
  chat_template: str | None = None
  pairs: bool = False
  template_digest: str = ""


def write_unit(
  task: Task,
  unit: documents.Unit,
  encoder: tokenizer.Tokenizer,
  tick: Callable = shard_writer.no_tick,
) -> None:
  """Writes the shard of a unit.

  Args:
    task: as of `Task`.
    unit: of the files.
    encoder: the tokenizer of the task.
    tick: is called after each batch of documents, with how many documents, tokens and bytes the
      batch had. What it raises ends the shard.

  Raises:
    shard_writer.TooManyBadError: more than `task.limit` records of the unit are bad.
    OSError: a file cannot be read, or the shard not be written.
  """
  folder, keys = task.folder / unit.id, {"limit": task.limit, "tick": tick}
  if task.chat_template is not None:
    from input_pipeline.text import (
      chat_documents,  # they import Jinja
      chat_template,
    )

    template = chat_template.load(task.chat_template, encoder)
    if task.template_digest not in ("", template.digest):
      raise ValueError(f"{template.name} was changed while it was used; run again")
    records = documents.read_records(unit)
    keys |= {"facts": {"files": unit.name}, "pairs": task.pairs}
    chat_documents.write(folder, records, encoder, template, **keys)
    return
  facts = {"files": unit.name, "feature": task.feature}
  write(folder, documents.read(unit, task.feature), encoder, facts=facts, **keys)


def write(
  folder: epath.Path,
  read: Iterable[documents.Item],
  encoder: tokenizer.Tokenizer,
  *,
  limit: int,
  facts: dict[str, Any],
  tick: Callable = shard_writer.no_tick,
) -> None:
  """Writes documents, in order, as a shard; arguments and errors as of `write_unit`."""

  def fill(shard: shard_writer.ShardWriter) -> None:
    end = np.array([encoder.end], np.uint32)
    for texts in _batches(_good(read, shard, limit)):
      tokens = size = 0
      for text, ids in zip(texts, encoder.encode(texts), strict=True):
        shard.add(np.concatenate([ids, end]), len(text) + 1, shard_writer.content_hash(text))
        tokens, size = tokens + len(ids) + 1, size + len(text)
      tick(len(texts), tokens, size)

  shard_writer.write_shard(folder, encoder.size, {"tokenizer": encoder.digest, **facts}, fill)


def _good(
  read: Iterable[documents.Item], shard: shard_writer.ShardWriter, limit: int
) -> Iterator[bytes]:
  """Yields the texts; counts documents without text, and records that are none."""
  for document in read:
    why = document.why
    if document.text is not None and len(document.text) > _LONGEST:
      why = f"it has {len(document.text):,} bytes, and at most {_LONGEST:,} can be stored"
    if document.text is None or why:
      shard.add_bad(document, why)
      if shard.bad_count > limit:
        raise shard_writer.TooManyBadError(shard.bad, shard.bad_count)
    elif document.text:
      yield document.text
    else:
      shard.add_empty()


def _batches(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
  batch, size = [], 0
  for text in texts:
    batch.append(text)
    size += len(text)
    if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


# ------------------------------ the process ------------------------------


def main() -> None:
  """Answers to messages until standard input is closed."""
  answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
  messages: queue.SimpleQueue = queue.SimpleQueue()
  threading.Thread(target=_listen, args=(messages,), daemon=True).start()

  def answer(**values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()

  task = messages.get()
  try:
    encoder = tokenizer.load(task.tokenizer)
    if encoder.digest != task.digest:
      raise ValueError(f"data.tokenizer={task.tokenizer} has changed while it was used")
    while True:
      unit = messages.get()
      counts = [0, 0, 0]
      write_unit(task, unit, encoder, _telling(answer, counts))
      answer(done=unit.id, so_far=counts)
  except shard_writer.TooManyBadError as error:
    answer(error="bad", bad=error.bad, count=error.count)
  except files.ChangedError as error:
    answer(error="changed", text=str(error), paths=[*error.paths])
  except OSError as error:
    answer(error="system", text=str(error), number=error.errno)
  except ValueError as error:
    answer(error="failed" if exit_codes.retryable(error) else "refused", text=str(error))


def _listen(messages: queue.SimpleQueue) -> None:
  """Passes messages on; ends this process, whatever it is doing, when there are no more."""
  while True:
    try:
      messages.put(pickle.load(sys.stdin.buffer))
    except EOFError:
      os._exit(exit_codes.DONE)


def _telling(answer: Callable, counts: list[int]) -> Callable[[int, int, int], None]:
  """Returns the tick of a unit, which adds to `counts` and answers with them now and then."""
  last = time.monotonic()

  def tick(*more: int) -> None:
    nonlocal last
    counts[:] = [count + one for count, one in zip(counts, more, strict=True)]
    if time.monotonic() - last > _NEWS_SECONDS:
      last = time.monotonic()
      answer(so_far=counts)

  return tick


if __name__ == "__main__":
  main()
