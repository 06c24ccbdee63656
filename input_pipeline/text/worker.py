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
from collections.abc import Callable
from typing import Any

from etils import epath

from input_pipeline import store
from input_pipeline.text import documents, files, tokenizer
from runtime import exit_codes

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
  tick: Callable = store.no_tick,
) -> None:
  """Writes the shard of a unit; `tick` and errors are those of `store.write_documents`."""
  folder, facts = task.folder / unit.id, {"files": unit.name}
  if task.chat_template is None:
    found = documents.read(unit, task.feature)
    facts["feature"] = task.feature
    store.write_documents(folder, found, encoder, facts, limit=task.limit, tick=tick)
    return
  from input_pipeline.text import chat_documents, chat_template  # they import Jinja

  template = chat_template.load(task.chat_template, encoder)
  if task.template_digest not in ("", template.digest):
    raise ValueError(f"{template.name} was changed while it was used; run again")
  records = documents.read_records(unit)
  chat_documents.write_conversations(
    folder, records, encoder, template, facts, limit=task.limit, pairs=task.pairs, tick=tick
  )


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
  except store.TooManyBadError as error:
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
