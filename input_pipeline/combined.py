"""Several sources as one: the rows of each after those of the one before."""

import hashlib

import numpy as np

from input_pipeline.bad_records import BadRecords
from input_pipeline.order import Part
from input_pipeline.row_store import UnreadableError
from input_pipeline.source import Source


def combine(name, sources, *, maximum_epochs=None, stages=()) -> Source:
  """Returns a Source of the rows of several.

  Args:
    name: as messages call it.
    sources: name -> Source; all have the same fields.
    maximum_epochs: name -> see `mixture.Part`; default 1.
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


def check_epochs(order, rows: int, position, steps: int) -> None:
  """Raises ValueError where a run takes rows of a source more often than its maximum_epochs.

  Args:
    order: an `order.MixtureOrder`.
    rows: how many the whole run takes.
    position: of the run.
    steps: of the whole run, for the message.
  """
  wrong = []
  counts = order.counts(rows, position)
  for part in order.parts:
    most = part.maximum_epochs * part.rows
    if part.maximum_epochs and counts[part.name] > most:
      epochs = counts[part.name] / part.rows
      wrong.append(
        f"source {part.name!r} of data.sources has {part.rows} rows, and {steps} steps take"
        f" {counts[part.name]} of it, {epochs:.2f} epochs, but its maximum_epochs is"
        f" {part.maximum_epochs}; set maximum_epochs={-(-counts[part.name] // part.rows)} (0: no"
        f" limit), lower its weight, or train about {int(steps / epochs * part.maximum_epochs)}"
        f" steps"
      )
  if wrong:
    raise ValueError("\n".join(wrong))


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
  rows = tuple(
    row + int(first) for bad, first in zip(lists, offsets, strict=False) for row in bad.rows
  )
  left_out = tuple(number for bad in lists for number in bad.left_out)
  return BadRecords(rows, left_out, next((bad.why for bad in lists if bad), ""))
