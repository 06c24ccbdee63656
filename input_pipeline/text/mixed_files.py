"""The Source of a mixture: that of each of data.sources, as one."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from input_pipeline.bad_records import Sharing
from input_pipeline.combined import combine
from input_pipeline.source import Source
from input_pipeline.text import chat_documents, preparation, rows
from input_pipeline.text.store import RecordError
from runtime.exit_codes import RetryableError


def open_source(
  data: Any,
  split: str,
  seed: int,
  sharing: Sharing | None = None,
  tick: Callable = preparation.no_tick,
) -> Source:
  """Opens a split of every source; arguments and errors are those of `rows.open_source`.

  Raises:
    ValueError: likewise, naming the source.
  """
  sources = {}
  for source in data.sources:
    try:
      sources[source["name"]] = rows.open_source(of(data, source), split, seed, sharing, tick)
    except (ValueError, RetryableError) as error:  # from which a supervisor's exit code follows
      raise ValueError(f"source {source['name']!r} of data.sources: {error}") from error
  first = {source["name"]: float(source["weight"]) for source in data.sources}
  return combine(
    f"{data.name} {split}",
    sources,
    maximum_epochs={s["name"]: s.get("maximum_epochs", 1) for s in data.sources},
    stages=((0, first), *((step, dict(weights)) for step, weights in data.stages)),
  )


def of(data: Any, source: Any) -> Any:
  """Returns the `data` section of one source of a mixture."""
  data = copy.deepcopy(data)
  with data.unlocked():
    data.sources, data.stages = (), ()
    data.files = source["files"]
    data.evaluation_files = source.get("evaluation_files", "")
    data.text_feature = source.get("text_feature", "")
  return data


def conversations(data: Any, count: int) -> list[chat_documents.Example]:
  """Returns the first conversations that are trained on, of a mixture those of its first source.

  Args:
    data: the config's `data` section.
    count: how many.

  Raises:
    ValueError: as of `rows.open_source`.
  """
  data = of(data, data.sources[0]) if data.sources else data
  prepared, chosen, name = rows.documents_of(data, data.train_split)
  chosen, _ = chat_documents.select_conversations(prepared, chosen, data, name)
  found = []
  for number in chosen[:count].tolist():
    with contextlib.suppress(RecordError):  # data.max_bad_records decides about those
      found.append(chat_documents.example(prepared, number))
  return found
