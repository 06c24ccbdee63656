"""Tokenizes a unit of the files into a shard; also as a process: `-m ... FD`.

The process receives from a connection, which is open as FD, a Task and then one unit after the
other, and answers with the counts of the unit so far, DONE when its shard is complete, or the
exception that has ended it. It ends at the next answer where the connection has been closed, so
also when the process that started it is killed.
"""

import dataclasses
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from etils import epath

from input_pipeline import shard_writer, store
from input_pipeline.text import documents, files, tokenizer
from runtime import exit_codes

DONE = "done"


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
  """Writes the shard of a unit; `tick` and errors are those of `shard_writer.write_documents`."""
  folder, facts = task.folder / unit.id, {"files": unit.name}
  if task.chat_template is None:
    found = documents.read(unit, task.feature)
    facts["feature"] = task.feature
    shard_writer.write_documents(folder, found, encoder, facts, limit=task.limit, tick=tick)
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


def main(connection: Connection) -> None:
  """Answers to messages until the connection is closed."""
  task = connection.recv()
  try:
    encoder = tokenizer.load(task.tokenizer)
    if encoder.digest != task.digest:
      raise ValueError(f"data.tokenizer={task.tokenizer} has changed while it was used")
    while True:
      write_unit(task, connection.recv(), encoder, lambda *counts: connection.send(counts))
      connection.send(DONE)
  except (EOFError, ConnectionError):
    return
  except (OSError, shard_writer.TooManyBadError, files.ChangedError) as error:
    connection.send(error)
  except ValueError as error:  # its cause, which tells whether a retry may succeed, stays here
    kind = exit_codes.RetryableError if exit_codes.retryable(error) else ValueError
    connection.send(kind(str(error)))


if __name__ == "__main__":
  main(Connection(int(sys.argv[1])))
