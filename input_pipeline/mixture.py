"""Several sources as one: their rows, and the order in which a run takes them.

In the order, each source has its share of the tokens. Which source a row comes from is a function
of the row's index alone: at every index each source has had its share of the rows so far to within
one row. It is Tijdeman's for the chairman assignment problem (R. Tijdeman, Discrete Mathematics 32,
1980), whose deviation is at most 1 - 1/(2k - 2) rows for k sources. It needs the counts so far, so
the shares are rounded to multiples of 1 / PERIOD: then every period is the same, and no more than
one is ever computed.
"""

import contextlib
import copy
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epy

from input_pipeline import rows, store
from input_pipeline.order import EpochOrder
from input_pipeline.position import Position
from input_pipeline.source import BadRecords, Part, Sharing, Source, UnreadableError
from runtime.exit_codes import RetryableError

with epy.lazy_imports():  # texts need no chat template
  from input_pipeline.text import chat_documents


# ------------------------------ which source each row comes from ------------------------------

PERIOD = 2**22
_COUNTED_ROWS = 2**12  # rows between two counts that are kept


def row_shares(parts: Sequence[Part], weights: Mapping[str, float]) -> list[float]:
  """Returns the share of the rows of each part.

  Args:
    parts: with at least one row each.
    weights: name -> relative share of the tokens; a name that is missing counts as 0.
  """
  rates = [weights.get(part.name, 0.0) * part.rows / max(1, part.tokens) for part in parts]
  return [rate / sum(rates) for rate in rates]


def rounded(shares: Sequence[float]) -> tuple[int, ...]:
  """Returns the shares as whole numbers of rows per PERIOD: at least 1 where a share is above 0."""
  quotas = [max(1, round(share * PERIOD)) if share > 0 else 0 for share in shares]
  # What rounding has added or taken goes to the largest, which notices it least.
  largest = max(range(len(quotas)), key=quotas.__getitem__)
  quotas[largest] += PERIOD - sum(quotas)
  return tuple(quotas)


class Interleaving:
  """Which source each row comes from, where the shares stay the same."""

  def __init__(self, shares: Sequence[float]):
    """Computes nothing yet.

    Args:
      shares: of the rows, of each source; their sum is 1.
    """
    self.quotas = rounded(shares)
    self._taken = [0] * len(self.quotas)  # of each source in the first `len(self._chosen)` rows
    self._chosen = np.zeros(0, np.int16)
    self._counts = [tuple(self._taken)]  # the same after every _COUNTED_ROWS

  def counts(self, index: int) -> np.ndarray:
    """Returns how many of the first `index` rows come from each source, int64 [k]."""
    periods, rest = divmod(index, PERIOD)
    self._extend(rest)
    block = rest // _COUNTED_ROWS
    counts = np.array(self._counts[block], np.int64) + periods * np.array(self.quotas, np.int64)
    return counts + np.bincount(
      self._chosen[block * _COUNTED_ROWS : rest], minlength=len(self.quotas)
    )

  def sources(self, first: int, stop: int) -> np.ndarray:
    """Returns the number of the source of rows `first` to `stop` - 1."""
    self._extend(PERIOD if first // PERIOD < (stop - 1) // PERIOD else (stop - 1) % PERIOD + 1)
    return self._chosen[np.arange(first, stop) % PERIOD]

  def _extend(self, length: int) -> None:
    while len(self._chosen) < length:
      block = self._next_block()
      self._chosen = np.concatenate([self._chosen, block])
      self._counts.append(tuple(self._taken))

  def _next_block(self) -> np.ndarray:
    """Returns the sources of the next _COUNTED_ROWS rows, and counts them."""
    quotas, taken, chosen = self.quotas, self._taken, []
    parts = max(1, 2 * sum(quota > 0 for quota in quotas) - 2)
    used = [i for i, quota in enumerate(quotas) if quota]
    first = len(self._chosen) + 1
    for n in range(first, first + _COUNTED_ROWS):
      best, earliest = -1, 0.0
      for i in used:
        quota = quotas[i]
        behind = (n * quota - taken[i] * PERIOD) * parts  # of its share, in rows x PERIOD x parts
        if behind >= PERIOD:
          deadline = (PERIOD * (parts - 1) - behind) / quota
          if best < 0 or deadline < earliest:
            best, earliest = i, deadline
      taken[best] += 1
      chosen.append(best)
    return np.array(chosen, np.int16)


@functools.lru_cache(maxsize=16)
def _interleaving(shares: tuple[float, ...]) -> Interleaving:
  return Interleaving(shares)


class MixtureOrder:
  """Rows of several sources by their weights; the rows of a source in its own epochs."""

  def __init__(
    self,
    parts: Sequence[Part],
    stages: Sequence[tuple[int, Mapping[str, float]]],
    seed: int,
    *,
    shuffle: bool = True,
  ):
    """Prepares nothing yet.

    Args:
      parts: the sources; in a mixture their rows are numbered one source after the other.
      stages: (step, name -> share of the tokens from that step on), ascending from step 0.
      seed: at least 0; of the order of each source's rows.
      shuffle: False keeps each source's order in each epoch.
    """
    self.parts = tuple(parts)
    self._stages = [
      (step, _interleaving(tuple(row_shares(parts, weights)))) for step, weights in stages
    ]
    self._offsets = np.cumsum([0, *(part.rows for part in parts)])
    # By name: another source beside it does not change the order of a source's rows.
    self._orders = [
      EpochOrder(part.rows, _part_seed(seed, part.name), shuffle=shuffle) for part in parts
    ]

  def ids(self, first: int, stop: int, position: Position) -> np.ndarray:
    """Returns the mixture's rows that are numbers `first` to `stop` - 1 of a run.

    Args:
      first: counted from 0 over the whole run.
      stop: one after the last.
      position: of the run; a stage begins with the first row of its step.
    """
    sources = np.concatenate(
      [
        interleaving.sources(max(first - start, 0), end - start)
        for interleaving, start, end in self._spans(stop, position)
        if first < end
      ]
    )
    ids = np.empty(stop - first, np.int64)
    for source, taken in enumerate(self._counts(first, position).tolist()):
      mask = sources == source
      if count := np.count_nonzero(mask):
        ids[mask] = self._offsets[source] + self._orders[source].ids(taken, taken + count)
    return ids

  def counts(self, rows: int, position: Position) -> dict[str, int]:
    """Returns how many of a run's first rows come from each source."""
    counts = self._counts(rows, position).tolist()
    return {part.name: count for part, count in zip(self.parts, counts, strict=True)}

  def _counts(self, rows: int, position: Position) -> np.ndarray:
    counts = np.zeros(len(self.parts), np.int64)
    for interleaving, start, end in self._spans(rows, position):
      counts += interleaving.counts(end - start)
    return counts

  def _spans(self, stop: int, position: Position) -> Iterator[tuple[Interleaving, int, int]]:
    """Yields (order, its first row, the one after its last) of the stages of rows 0 to stop - 1."""
    starts = [position.reached(step) if step else 0 for step, _ in self._stages]
    for (_, interleaving), start, end in zip(
      self._stages, starts, [*starts[1:], stop], strict=True
    ):
      if start < stop:
        yield interleaving, start, min(end, stop)


def check_epochs(order: MixtureOrder, rows: int, position: Position, steps: int) -> None:
  """Raises ValueError where a run takes rows of a source more often than its maximum_epochs.

  Args:
    order: of the mixture.
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


def _part_seed(seed, name):
  """Returns the seed of one source of a mixture."""
  words = [seed, zlib.crc32(name.encode())]
  return int(np.random.SeedSequence(words).generate_state(1)[0])


# ------------------------------ their rows ------------------------------


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
  """Opens a split of every source; arguments and errors are those of `row_source.open_source`.

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
    ValueError: as of `row_source.open_source`.
  """
  data = data_of(data, data.sources[0]) if data.sources else data
  prepared, chosen, name = rows.documents_of(data, data.train_split)
  chosen, _ = chat_documents.select_conversations(prepared, chosen, data, name)
  found = []
  for number in chosen[:count].tolist():
    with contextlib.suppress(store.RecordError):  # data.max_bad_records decides about those
      found.append(chat_documents.example(prepared, number))
  return found
