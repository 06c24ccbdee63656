"""Several sources as one: the rows of each after those of the one before."""

import contextlib
import copy
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epy

from input_pipeline import rows, store
from input_pipeline.bad_records import Sharing
from input_pipeline.source import BadRecords, Part, Source, UnreadableError
from runtime.exit_codes import RetryableError

with epy.lazy_imports():  # texts need no chat template
  from input_pipeline.text import chat_documents


def combine(name, sources, *, maximum_epochs=None, stages=()) -> Source:
  """Returns a Source of the rows of several.

  Args:
    name: as messages call it.
    sources: name -> Source; all have the same fields.
    maximum_epochs: name -> see `source.Part`; default 1.
    stages: see `Source`.

  Raises:
    ValueError: a source has no rows, or other fields than the first.
  """
  names = list(sources)
  fields = sources[names[0]].fields
  for each, source in sources.items():
    if not len(source):
      raise ValueError(f"source {each!r} of data.sources is empty ({source.name} has 0 rows)")
    if source.fields != fields:
      raise ValueError(f"source {each!r} has rows of {source.fields}, {names[0]!r} of {fields}")
  first = sources[names[0]]
  offsets = np.cumsum([0, *(len(sources[each]) for each in names)])
  parts = tuple(
    Part(
      each,
      len(source),
      source.report.get("tokens", len(source)),
      1 if maximum_epochs is None else maximum_epochs[each],
      source.bytes_per_token,
    )
    for each, source in sources.items()
  )
  # Of conversations, bytes_per_token is per token that is trained on.
  weights = [
    source.report.get("trained", part.tokens)
    for source, part in zip(sources.values(), parts, strict=True)
  ]
  rates = [part.bytes_per_token for part in parts]
  digest = hashlib.sha256(
    repr([(each, sources[each].fingerprint) for each in names]).encode()
  ).hexdigest()
  return Source(
    name=name,
    fingerprint=digest,
    rows=int(offsets[-1]),
    fields=fields,
    read=_reading([sources[each].read for each in names], offsets, fields),
    bad=_bad([sources[each].bad for each in names], offsets),
    ids=max(source.ids for source in sources.values()),
    parts=parts,
    stages=tuple(stages),
    tokenizer=first.tokenizer,
    tokenizer_digest=first.tokenizer_digest,
    chat_template_digest=first.chat_template_digest,
    bytes_per_token=float(np.dot(rates, weights)) / max(1, sum(weights)),
    report=_report(sources),
    origins=_origins(sources, offsets),
  )


def _origins(sources, offsets):
  """Returns Source.origins over several."""
  names = list(sources)

  def origins(row):
    part = int(np.searchsorted(offsets, row, side="right")) - 1
    found = sources[names[part]].origins(row - int(offsets[part]))
    return [f"{names[part]}: {place}" for place in found] or [names[part]]

  return origins


def _report(sources):
  """Returns each source's facts, and their sums."""
  total: dict[str, int] = {}
  for source in sources.values():
    for key, value in source.report.items():
      total[key] = total.get(key, 0) + value
  each = {
    f"{key}/{name}": v for name, source in sources.items() for key, v in source.report.items()
  }
  return total | each


def _reading(reads, offsets, fields):
  """Returns Source.read over several."""

  def read(indices):
    indices = np.asarray(indices, np.int64)
    found = {
      field: np.zeros((len(indices), *shape), dtype) for field, (shape, dtype) in fields.items()
    }
    parts = np.searchsorted(offsets, indices, side="right") - 1
    whys: dict[int, str] = {}
    messages = []
    for part in np.unique(parts):
      mask = parts == part
      try:
        rows = reads[part](indices[mask] - offsets[part])
      except UnreadableError as error:
        messages.append(str(error))
        whys.update({row + int(offsets[part]): why for row, why in error.rows.items()})
        continue
      for field, array in found.items():
        array[mask] = rows[field]
    if messages:
      raise UnreadableError("; ".join(messages), whys)
    return found

  return read


def _bad(lists, offsets) -> BadRecords:
  """Returns the unreadable rows of all; left-out documents are named per source only."""
  numbers = tuple(
    row + int(first) for bad, first in zip(lists, offsets, strict=False) for row in bad.rows
  )
  left_out = tuple(place for bad in lists for place in bad.left_out)
  return BadRecords(numbers, left_out, next((bad.why for bad in lists if bad), ""))


def open_mixture(
  data: Any,
  split: str,
  seed: int,
  sharing: Sharing | None = None,
  tick: Callable = store.no_tick,
) -> Source:
  """Opens a split of every source; arguments and errors are those of `rows.open_source`.

  Raises:
    ValueError: likewise, naming the source.
  """
  sources = {}
  for source in data.sources:
    try:
      sources[source["name"]] = rows.open_source(data_of(data, source), split, seed, sharing, tick)
    except (ValueError, RetryableError) as error:  # from which a supervisor's exit code follows
      raise ValueError(f"source {source['name']!r} of data.sources: {error}") from error
  first = {source["name"]: float(source["weight"]) for source in data.sources}
  return combine(
    f"{data.name} {split}",
    sources,
    maximum_epochs={s["name"]: s.get("maximum_epochs", 1) for s in data.sources},
    stages=((0, first), *((step, dict(weights)) for step, weights in data.stages)),
  )


def data_of(data: Any, source: Any) -> Any:
  """Returns the `data` section of one source of a mixture."""
  data = copy.deepcopy(data)
  with data.unlocked():
    data.sources, data.stages = (), ()
    data.files = source["files"]
    data.evaluation_files = source.get("evaluation_files", "")
    data.text_feature = source.get("text_feature", "")
  return data


def example_conversations(data: Any, count: int) -> list["chat_documents.Example"]:
  """Returns the first conversations that are trained on, of a mixture those of its first source.

  Args:
    data: the config's `data` section.
    count: how many.

  Raises:
    ValueError: as of `rows.open_source`.
  """
  data = data_of(data, data.sources[0]) if data.sources else data
  prepared, chosen, name = rows.documents_of(data, data.train_split)
  chosen, _ = chat_documents.select_conversations(prepared, chosen, data, name)
  found = []
  for number in chosen[:count].tolist():
    with contextlib.suppress(store.RecordError):  # data.max_bad_records decides about those
      found.append(chat_documents.example(prepared, number))
  return found
