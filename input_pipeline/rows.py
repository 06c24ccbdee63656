"""Sources over what is in the store: rows are an index, and tokens are read where they are needed.

A row of text is made of pieces of documents, which `packing` chooses; of images, it is a document.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath, epy

from input_pipeline import catalog, packing, store
from input_pipeline.source import (
  BadRecords,
  Sharing,
  Source,
  UnreadableError,
  counted,
  few,
  skipping,
)
from input_pipeline.text import tokenizer

with epy.lazy_imports():  # few data need them
  from input_pipeline import bad_records, tfds_documents

_ALL = 2.0**64  # the hashes of documents are below
SPLITS = ("train", "test")


def open_source(
  data: Any,
  split: str,
  seed: int,
  sharing: Sharing | None = None,
  tick: Callable = store.no_tick,
) -> Source:
  """Opens a split of text or images; arguments and errors are those of `row_source.open_source`."""
  if data.name == catalog.PROMPTS:
    _check_split(data, split)
    from input_pipeline.text import prompts  # no other data needs it

    return prompts.open_source(data, split, tick)
  if data.kind == "image":
    return _image_source(*tfds_documents.prepare(data, split, tick), data, sharing)
  # The same rows for every seed, so that runs with several seeds are evaluated on the same.
  seed = seed if split == data.train_split else 0
  return source_of(*documents_of(data, split, tick), data, seed, sharing)


def documents_of(
  data: Any, split: str, tick: Callable = store.no_tick
) -> tuple[store.Prepared, np.ndarray, str]:
  """Returns documents, the numbers int64 [N] of those of a split, and the split's name."""
  if data.name not in catalog.OF_FILES:
    prepared, name = tfds_documents.prepare(data, split, tick)
    return prepared, np.arange(len(prepared.documents)), name
  from input_pipeline.text import preparation  # no other data needs it

  _check_split(data, split)
  apart = bool(data.evaluation_files)
  key = "data.evaluation_files" if apart and split == "test" else "data.files"
  spec = data.evaluation_files if apart and split == "test" else data.files
  prepared = preparation.prepare(data, spec, key, tick)
  name = f"{data.name} {split}"
  if apart:
    return prepared, np.arange(len(prepared.documents)), name
  if share := prepared.units[0].held_out:
    which = f"last {100 * share:g}" if split == "test" else f"first {100 - 100 * share:g}"
    return prepared, _of_divided(prepared, data, split, spec), f"{name} ({which} % of {spec})"
  return prepared, _side(prepared, data, split, spec), name


def _check_split(data: Any, split: str) -> None:
  """Raises ValueError for a split that files do not have."""
  if split not in SPLITS:
    raise ValueError(
      f"data.name={data.name!r} has no split {split!r}; it has {' and '.join(SPLITS)}, the latter "
      f"data.evaluation_fraction of the documents (of a single text file its end), or those of "
      f"data.evaluation_files"
    )


def _of_divided(prepared: store.Prepared, data: Any, split: str, spec: str) -> np.ndarray:
  """Returns the number of a split's document, int64 [1], of a text file that is divided."""
  if len(prepared.documents) < 2:
    share = data.evaluation_fraction
    raise ValueError(
      f"{spec} is too short to be divided: its last {100 * share:g} % are the evaluation split"
      f" (data.evaluation_fraction={share}); raise it, or name other files with"
      " data.evaluation_files"
    )
  return np.array([split == "test"], np.int64)


def _side(prepared: store.Prepared, data: Any, split: str, spec: str) -> np.ndarray:
  """Returns the numbers of the documents of a split, int64 [N], chosen by their content.

  So equal documents are on the same side. The document of the smallest hash is always held out.
  """
  hashes = prepared.documents.index["hash"]
  if len(hashes) == 0:
    raise ValueError(f"{spec}: no document in it has any text ({prepared.empty:,} are empty)")
  share = hashes.astype(np.float64) < data.evaluation_fraction * _ALL
  held_out = share | (hashes == hashes.min())
  if held_out.all():
    raise ValueError(
      f"{spec}: {counted(hashes, 'document')}, and none is left to train on after "
      f"data.evaluation_fraction={data.evaluation_fraction} is held out by content; name the "
      f"documents of the validation split with data.evaluation_files"
    )
  return np.flatnonzero(held_out if split == "test" else ~held_out)


def source_of(
  prepared: store.Prepared,
  chosen: np.ndarray,
  name: str,
  data: Any,
  seed: int,
  sharing: Sharing | None = None,
) -> Source:
  """Returns the Source of some of the documents.

  Args:
    prepared: the documents.
    chosen: int64 [N], the numbers of those that the rows are made of.
    name: of the split, for messages.
    data: the config's `data` section.
    seed: of the packing.
    sharing: the processes that open it together.

  Raises:
    ValueError: no rows, or more records that cannot be read than data.max_bad_records.
  """
  encoder, masked = prepared.encoder, prepared.documents.masked
  left_out: dict[str, int] = {}
  pairs, T = data.name == catalog.PREFERENCES, data.sequence_length
  row_slots = T
  if prepared.template is not None:
    from input_pipeline.text import chat_documents  # no other data needs it

    chosen, left_out = chat_documents.select_conversations(prepared, chosen, data, name)
    row_slots = chat_documents.pair_row_slots(T) if pairs else T
  prefix = _prefix(encoder, masked, data.packing == "concatenate")
  index = prepared.documents.index[chosen]
  slots = np.maximum(index["tokens"].astype(np.int64) + len(prefix) - 1, 0)
  packed = packing.pack(slots, row_slots, data.packing, seed, may_split=not masked)
  if not len(packed):
    raise ValueError(f"{name} is empty: {len(index):,} documents with nothing to predict")
  packed = dataclasses.replace(packed, document=chosen[packed.document])
  reader = _Reader(prepared, packed, prefix, name, data.max_bad_records)
  bad = reader.bad_rows(sharing or Sharing())
  size = int(index["bytes"].sum(dtype=np.int64))
  predicted = int(index["trained"].sum(dtype=np.int64)) if masked else int(slots.sum())
  facts = [data.sequence_length, data.packing, seed if data.packing != "concatenate" else 0]
  source = Source(
    name=name,
    fingerprint=_fingerprint(prepared, index, facts),
    rows=len(packed),
    fields=_fields(row_slots),
    read=skipping(reader.rows, bad.rows),
    bad=bad,
    ids=encoder.size,
    tokenizer="" if encoder.name == tokenizer.BYTES else encoder.name,
    tokenizer_digest=encoder.digest,
    chat_template_digest=prepared.template.digest if prepared.template else "",
    bytes_per_token=size / predicted,
    report={
      "documents": len(index),
      "bytes": size,
      "tokens": packed.tokens,
      "rows": len(packed),
      "padding": packed.padding,
      "split_documents": packed.split_documents,
      **({"trained": predicted, **left_out} if masked else {}),
    },
    origins=reader.origins,
  )
  if not pairs:
    return source
  documents = packed.document[packed.starts[:-1]]  # a row is one
  sides = chat_documents.pair_slots(prepared.documents.index["tokens"][documents])
  return chat_documents.divide_pairs(source, sides, T)


def _image_source(
  prepared: store.Prepared, name: str, data: Any, sharing: Sharing | None
) -> Source:
  """Returns the Source of a split of images, a row each; arguments as of `source_of`."""
  [shard] = prepared.documents.shards
  try:
    shape, (low, high) = tuple(map(int, shard.manifest["shape"])), shard.manifest["labels"]
    P, sizes = int(np.prod(shape)), np.unique(prepared.documents.index["tokens"]).tolist()
    if sizes != [P + tfds_documents.LABEL_BYTES] or not low <= high:
      raise ValueError(f"its images of {shape} are documents of {sizes} tokens")
  except (ValueError, KeyError, TypeError) as error:
    path = shard.folder / store.MANIFEST
    raise ValueError(f"{path} cannot be read ({error}); {store.again(shard.folder)}") from error
  # The data's sizes are derived from the model's, which the user sets.
  if data.input_size != P:
    raise ValueError(
      f"{name}: an image has {P} values {shape}, but model.input_size={data.input_size}; set"
      f" model.input_size={P}"
    )
  if low < 0 or high >= data.target_size:
    raise ValueError(
      f"{name}: the labels run from {low} to {high}, but model.output_size="
      f"{data.target_size} allows 0 to {data.target_size - 1}; "
      + (f"set model.output_size={high + 1}" if low >= 0 else "take a split that has labels")
    )
  numbers = np.arange(len(prepared.documents))
  rows = numbers.size
  counts = np.full(rows, P + tfds_documents.LABEL_BYTES)
  packed = packing.Packed(counts[0], np.arange(rows + 1), numbers, np.zeros_like(numbers), counts)
  # As if every token were predicted from the one before it, the first from a token in front of all.
  reader = _Reader(prepared, packed, np.zeros(1, np.int64), name, data.max_bad_records)
  bad = reader.bad_rows(sharing or Sharing())

  def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
    bytes_BX = reader.tokens(numbers)[0].reshape(-1, P + tfds_documents.LABEL_BYTES)
    labels_B1 = np.ascontiguousarray(bytes_BX[:, P:]).view("<i4").astype(np.int32)
    return {
      "inputs": bytes_BX[:, :P].astype(np.float32) / np.float32(255),
      "targets": labels_B1[:, 0],
      "weights": np.ones(len(numbers), np.float32),
    }

  return Source(
    name=name,
    fingerprint=_fingerprint(prepared, prepared.documents.index, [*shape]),
    rows=rows,
    fields={
      "inputs": ((P,), np.dtype(np.float32)),
      "targets": ((), np.dtype(np.int32)),
      "weights": ((), np.dtype(np.float32)),
    },
    read=skipping(read, bad.rows),
    bad=bad,
    origins=reader.origins,
  )


def _prefix(encoder: tokenizer.Tokenizer, masked: bool, concatenated: bool) -> np.ndarray:
  """Returns the tokens from which the first one of a document is predicted, int64 [0 to 2]."""
  if masked:  # a conversation: its template writes everything
    return np.zeros(0, np.int64)
  if concatenated and encoder.has_bos:
    return np.array([encoder.end, encoder.start])
  return np.array([encoder.start])


def _fields(T: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  names = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "segments": np.int32}
  return {name: ((T,), np.dtype(kind)) for name, kind in names.items()}


def _fingerprint(prepared: store.Prepared, index: np.ndarray, facts: list[Any]) -> str:
  """Returns the digest of all that rows follow from: paths are no part of it."""
  facts = [
    [shard.digest for shard in prepared.documents.shards],
    prepared.encoder.digest,
    hashlib.sha256(np.ascontiguousarray(index)).hexdigest(),
    *facts,
  ]
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# ------------------------------ reading ------------------------------


class _Reader:
  """Reads rows of an index over documents."""

  def __init__(
    self,
    prepared: store.Prepared,
    packed: packing.Packed,
    prefix: np.ndarray,
    name: str,
    limit: int,
  ):
    self._prepared, self.documents, self.packed = prepared, prepared.documents, packed
    self._prefix, self.name, self._limit = prefix, name, limit

  def records(self, pieces: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first record of pieces and the one after the last, int64 [P] each."""
    packed, before = self.packed, len(self._prefix)
    # A slot's input and target are two neighbors among the prefix and the document's tokens.
    first = np.maximum(packed.first[pieces] - before, 0) // store.RECORD_TOKENS
    last = packed.first[pieces] + packed.count[pieces] - before
    base = self.documents.first_record[packed.document[pieces]]
    return base + first, base + np.maximum(last, 0) // store.RECORD_TOKENS + 1

  def origins(self, row: int) -> list[str]:
    """Returns where the documents of a row come from, such as `document 17 of a.jsonl`.

    Documents are counted from 0 in what was prepared together, see `documents.Unit`.
    """
    found, documents = [], self.documents
    for number in self.packed.document[slice(*self.packed.starts[row : row + 2])].tolist():
      place = documents.place(int(documents.first_record[number]))
      if self._prepared.units:
        document = place.partition(" of ")[0]
        place = f"{document} of {self._prepared.units[documents.shard_of(number)].name}"
      found.append(place)
    return found

  def tokens(self, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
    """Reads the records of rows.

    Args:
      numbers: int [N], of the rows.

    Returns:
      Their tokens, one after the other; bool, which are learned, or None for all. Of the P pieces
      of the rows, int64 [P]: the row among these, the number of the piece, and where among the
      tokens its document begins, or would if it were read from there.

    Raises:
      UnreadableError: a record cannot be read; names the document and the shard.
    """
    packed = self.packed
    numbers = np.asarray(numbers, np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(packed):
      raise IndexError(f"{self.name}: row numbers {numbers} are not all in 0..{len(packed) - 1}")
    begin, stop = packed.starts[numbers], packed.starts[numbers + 1]
    row, pieces = _ranges(begin, stop - begin)
    first, last = self.records(pieces)
    piece, records = _ranges(first, last - first)
    try:
      tokens, trained = self.documents.read(records)
    except store.RecordError as error:
      raise self._unreadable(error, numbers[row[piece]], records) from error
    sizes = self.documents.sizes(records)
    begins = np.cumsum(sizes) - sizes
    at = begins[np.cumsum(last - first) - (last - first)] if len(pieces) else first
    before = (first - self.documents.first_record[packed.document[pieces]]) * store.RECORD_TOKENS
    return tokens, trained, row, pieces, at - before

  def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Returns field -> rows [N, T]; errors are those of `tokens`."""
    tokens, trained, row, pieces, base = self.tokens(numbers)
    packed, T, before = self.packed, self.packed.row_length, len(self._prefix)
    begin, stop = packed.starts[numbers], packed.starts[np.asarray(numbers) + 1]
    first, count = packed.first[pieces], packed.count[pieces]
    # Of a piece, all but the last are inputs, and all but the first are targets.
    of_piece, place = _ranges(first, count + 1)  # among the prefix and the document's tokens
    is_input, is_target = place < (first + count)[of_piece], place > first[of_piece]
    where = np.maximum(base[of_piece] + place - before, 0)
    values = tokens[where].astype(np.int32)
    values[place < before] = self._prefix[place[place < before]]
    filled = np.bincount(row, weights=count, minlength=len(numbers)).astype(np.int64)
    of_row, column = _ranges(np.zeros_like(filled), filled)
    slot = of_row * T + column
    found = {name: np.zeros(len(numbers) * T, kind) for name, (_, kind) in _fields(T).items()}
    found["tokens"][slot] = values[is_input]
    found["targets"][slot] = values[is_target]
    found["weights"][slot] = 1 if trained is None else trained[where[is_target]]
    found["segments"][:] = np.repeat(stop - begin, T)  # of padding: the number after the last
    found["segments"][slot] = (pieces - begin[row])[of_piece[is_target]]
    return {name: array.reshape(len(numbers), T) for name, array in found.items()}

  def _unreadable(self, error: store.RecordError, row, records) -> UnreadableError:
    first = min(error.records)
    numbered = zip(row.tolist(), records.tolist(), strict=True)
    bad = {number: error.records[n] for number, n in numbered if n in error.records}
    more = f", and {len(error.records) - 1} more" if len(error.records) > 1 else ""
    place = self.documents.place(first)
    text = f"{self.name}: row {min(bad)} ({place}) cannot be read ({error.records[first]}){more}"
    if self._limit:
      bad_records.suspect(self._prepared, error.records)
      return UnreadableError(
        f"{text}, and could be when all were checked; the same command checks them again and"
        f" continues without their rows, as far as data.max_bad_records={self._limit} allows",
        bad,
      )
    shard = epath.Path(place.partition(" of ")[2]).parent
    return UnreadableError(
      f"{text}; {store.again(shard)}, or set data.max_bad_records to continue without its rows", bad
    )

  def bad_rows(self, sharing: Sharing) -> BadRecords:
    """Returns what cannot be read; all processes call this.

    Raises:
      ValueError: that is more than data.max_bad_records, or everything.
    """
    if not self._limit:
      return BadRecords()
    documents, prepared = self.documents, self._prepared
    records, why = bad_records.find(prepared, self.name, sharing)
    before = np.concatenate([[0], np.cumsum(np.isin(np.arange(documents.records), records))])
    first, stop = self.records()
    pieces = np.flatnonzero(before[stop] > before[first])
    rows = np.unique(np.searchsorted(self.packed.starts, pieces, side="right") - 1)
    why = f"{documents.place(records[0])}: {why}" if len(rows) else ""
    left_out = tuple(where for where, _ in prepared.bad)
    if prepared.bad:
      why = why or ": ".join(prepared.bad[0])
    bad = BadRecords(tuple(rows.tolist()), left_out, why)
    total = len(rows) + prepared.bad_count
    if total > self._limit:
      out = f", and {prepared.bad_count:,} bad records are left out" if prepared.bad_count else ""
      raise ValueError(
        f"{self.name}: {len(rows):,} of {len(self.packed):,} rows cannot be read{out}, more than "
        f"data.max_bad_records={self._limit}: rows {few(bad.rows)} (the first: {bad.why}); delete "
        f"the folder of that file and run again to prepare it from scratch, or set "
        f"data.max_bad_records={total} to continue without them"
      )
    if len(rows) == len(self.packed):
      raise ValueError(f"{self.name}: none of its {len(rows):,} rows can be read ({why})")
    return bad


def _ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the number of the range, and the value, of all values of ranges one after the other."""
  number = np.repeat(np.arange(len(count)), count)
  return number, np.arange(len(number)) + (first - np.cumsum(count) + count)[number]
