"""A Source over stored documents: rows are an index, and tokens are read where they are needed."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from input_pipeline.bad_records import BadRecords, Sharing, counted, few, skipping
from input_pipeline.row_store import UnreadableError
from input_pipeline.source import Source
from input_pipeline.sources import catalog
from input_pipeline.text import (
  chat_documents,
  packing,
  preparation,
  store,
  tfds_documents,
  tokenizer,
)
from runtime import files

_ALL = 2.0**64  # the hashes of documents are below
SPLITS = ("train", "test")
_RECORDS_PER_READ = 512


def open_source(
  data: Any,
  split: str,
  seed: int,
  sharing: Sharing | None = None,
  tick: Callable = preparation.no_tick,
) -> Source:
  """Opens a split, and tokenizes on first use what is not in the store.

  Args:
    data: the config's `data` section.
    split: of a TFDS data set, its name or a slice. Of files, `train` or `test`: the documents that
      are held out, or those of data.evaluation_files.
    seed: decides which documents share a row of the split that is trained on.
    sharing: the processes that open it together, where there are several; all call this.
    tick: as of `preparation.prepare`.

  Returns:
    A Source with the fields tokens, targets, segments int32 [T] and weights float32 [T].

  Raises:
    ValueError: as of `preparation.prepare`; or an unknown or empty split, or more records that
      cannot be read than data.max_bad_records.
  """
  # The same rows for every seed, so that runs with several seeds are evaluated on the same.
  seed = seed if split == data.train_split else 0
  return source_of(*documents_of(data, split, tick), data, seed, sharing)


def documents_of(
  data: Any, split: str, tick: Callable = preparation.no_tick
) -> tuple[preparation.Prepared, np.ndarray, str]:
  """Returns documents, the numbers int64 [N] of those of a split, and the split's name.

  Arguments and errors are those of `open_source`.
  """
  if data.name not in catalog.OF_FILES:
    prepared, name = tfds_documents.prepare(data, split, tick)
    return prepared, np.arange(len(prepared.documents)), name
  if split not in SPLITS:
    raise ValueError(
      f"data.name={data.name!r} has no split {split!r}; it has {' and '.join(SPLITS)}, the latter "
      f"data.evaluation_fraction of the documents, or those of data.evaluation_files"
    )
  apart = bool(data.evaluation_files)
  key = "data.evaluation_files" if apart and split == "test" else "data.files"
  spec = data.evaluation_files if apart and split == "test" else data.files
  prepared = preparation.prepare(data, spec, key, tick)
  chosen = np.arange(len(prepared.documents)) if apart else _side(prepared, data, split, spec)
  return prepared, chosen, f"{data.name} {split}"


def _side(prepared: preparation.Prepared, data: Any, split: str, spec: str) -> np.ndarray:
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
  prepared: preparation.Prepared,
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
  encoder, concatenated = prepared.encoder, data.packing == "concatenate"
  left_out: dict[str, int] = {}
  if prepared.template is not None:
    chosen, left_out = chat_documents.select_conversations(prepared, chosen, data, name)
  prefix = _prefix(encoder, prepared.documents.masked, concatenated)
  index = prepared.documents.index[chosen]
  slots = np.maximum(index["tokens"].astype(np.int64) + len(prefix) - 1, 0)
  may_split = not prepared.documents.masked
  pairs, T = data.name == catalog.PREFERENCES, data.sequence_length
  row_slots = chat_documents.pair_row_slots(T) if pairs else T
  packed = packing.pack(slots, row_slots, data.packing, seed, may_split=may_split)
  if not len(packed):
    raise ValueError(f"{name} is empty: {len(index):,} documents with nothing to predict")
  packed = dataclasses.replace(packed, document=chosen[packed.document])
  reader = _Reader(prepared, packed, prefix, name)
  bad = BadRecords()
  limit = data.max_bad_records
  if limit:
    bad = _bad_rows(reader, limit, sharing or Sharing())
    if prepared.bad:
      bad_places = tuple(where for where, _ in prepared.bad)
      bad = BadRecords(bad.rows, bad_places, bad.why or ": ".join(prepared.bad[0]))
    _judge(prepared, bad, len(packed), name, limit)
  size = int(index["bytes"].sum(dtype=np.int64))
  masked = prepared.documents.masked
  predicted = int(index["trained"].sum(dtype=np.int64)) if masked else int(slots.sum())
  source = Source(
    name=name,
    fingerprint=_fingerprint(prepared, index, data, seed),
    rows=len(packed),
    fields=_fields(row_slots),
    read=skipping(reader.rows, bad.rows) if bad.rows else reader.rows,
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


def _fingerprint(prepared: preparation.Prepared, index: np.ndarray, data: Any, seed: int) -> str:
  """Returns the digest of all that rows follow from: paths are no part of it."""
  facts = [
    [shard.digest for shard in prepared.documents.shards],
    prepared.encoder.digest,
    hashlib.sha256(np.ascontiguousarray(index)).hexdigest(),
    data.sequence_length,
    data.packing,
    seed if data.packing != "concatenate" else 0,
  ]
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# ------------------------------ reading ------------------------------


class _Reader:
  """Reads rows of an index over documents."""

  def __init__(self, prepared, packed: packing.Packed, prefix: np.ndarray, name: str):
    self.documents, self.packed, self.folder = prepared.documents, packed, prepared.folder
    self.name, self._prefix, self._units = name, prefix, prepared.units

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
      if self._units:
        document = place.partition(" of ")[0]
        place = f"{document} of {self._units[documents.shard_of(number)].name}"
      found.append(place)
    return found

  def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Returns field -> rows [N, T]; raises UnreadableError that names document and shard."""
    packed, T = self.packed, self.packed.row_length
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
    # Where each piece begins among the tokens that were read, and in its document.
    begins = np.cumsum(sizes) - sizes
    at = begins[np.cumsum(last - first) - (last - first)] if len(pieces) else first
    read_from = (first - self.documents.first_record[packed.document[pieces]]) * store.RECORD_TOKENS
    count = packed.count[pieces]
    of_slot, slot = _ranges(packed.first[pieces], count)
    target = slot + 1 - len(self._prefix)  # among the document's tokens; below 0: in the prefix
    place = (at - read_from)[of_slot] + target
    filled = np.bincount(row, weights=count, minlength=len(numbers)).astype(np.int64)
    of_row, column = _ranges(np.zeros_like(filled), filled)
    where = of_row * T + column
    found = {
      name: np.zeros(len(numbers) * T, kind)
      for name, (_, kind) in _fields(T).items()
      if name != "segments"
    }
    found["targets"][where] = self._take(tokens, place, target)
    found["tokens"][where] = self._take(tokens, place - 1, target - 1)
    found["weights"][where] = 1 if trained is None else trained[place]
    segments = np.repeat(stop - begin, T)  # of padding: the number after the last
    segments[where] = (pieces - begin[row])[of_slot]
    found["segments"] = segments.astype(np.int32)
    return {name: array.reshape(len(numbers), T) for name, array in found.items()}

  def _take(self, tokens, place, number) -> np.ndarray:
    """Returns the tokens at places; where their number in the document is below 0, the prefix's."""
    taken = tokens[np.maximum(place, 0)]
    in_prefix = np.flatnonzero(number < 0)
    if len(in_prefix):
      taken = taken.astype(np.int32)
      taken[in_prefix] = self._prefix[number[in_prefix]]
    return taken

  def _unreadable(self, error: store.RecordError, row, records) -> UnreadableError:
    first = min(error.records)
    numbered = zip(row.tolist(), records.tolist(), strict=True)
    bad = {number: error.records[n] for number, n in numbered if n in error.records}
    more = f", and {len(error.records) - 1} more" if len(error.records) > 1 else ""
    kept = _kept(self)
    if kept.exists():  # so that the next start reads all records again
      kept.unlink()
    place = self.documents.place(first)
    shard = place.partition(" of ")[2].rpartition("/")[0]
    return UnreadableError(
      f"{self.name}: {place} cannot be read ({error.records[first]}){more}; "
      f"{store.again(epath.Path(shard))}, or set data.max_bad_records to continue without its rows",
      bad,
    )


def _ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the number of the range, and the value, of all values of ranges one after the other."""
  number = np.repeat(np.arange(len(count)), count)
  return number, np.arange(len(number)) + (first - np.cumsum(count) + count)[number]


# ------------------------------ records that cannot be read ------------------------------


def _bad_rows(reader: _Reader, limit: int, sharing: Sharing) -> BadRecords:
  """Returns the rows that cannot be read, the same on all processes: each reads a share once."""
  documents = reader.documents
  stamp, known = _stamp(documents.shards), _load_kept(reader)
  checked = known is not None and known["stamp"] == stamp
  mine = {"checked": checked, "records": known["records"] if checked else []}
  reports = sharing.gather(mine)
  if not all(report["checked"] for report in reports):
    share = range(
      documents.records * sharing.index // sharing.count,
      documents.records * (sharing.index + 1) // sharing.count,
    )
    found: dict[int, str] = {}
    for start in range(share.start, share.stop, _RECORDS_PER_READ):
      numbers = np.arange(start, min(start + _RECORDS_PER_READ, share.stop))
      found |= documents.unreadable(numbers)
    reports = sharing.gather({"records": sorted(found.items())})
    records = sorted((number, why) for report in reports for number, why in report["records"])
    _keep(reader, {"stamp": stamp, "records": records})
  # As lists, as JSON gives them back.
  bad = {number: why for report in reports for number, why in report["records"]}
  if not bad:
    return BadRecords()
  before = np.concatenate([[0], np.cumsum(np.isin(np.arange(documents.records), [*bad]))])
  first, stop = reader.records()
  pieces = np.flatnonzero(before[stop] > before[first])
  rows = np.unique(np.searchsorted(reader.packed.starts, pieces, side="right") - 1)
  why = f"{documents.place(min(bad))}: {bad[min(bad)]}"
  return BadRecords(tuple(rows.tolist()), (), why if len(rows) else "")


def _judge(prepared, bad: BadRecords, rows: int, name: str, limit: int) -> None:
  """Raises ValueError where more is bad than may be, or everything."""
  total = len(bad.rows) + prepared.bad_count
  if total > limit:
    out = f", and {prepared.bad_count:,} records are bad" if prepared.bad_count else ""
    raise ValueError(
      f"{name}: {len(bad.rows):,} of {rows:,} rows cannot be read{out}, more than "
      f"data.max_bad_records={limit}: rows {few(bad.rows)} (the first: {bad.why}); delete the "
      f"folder of that file and run again to prepare it from scratch, or set "
      f"data.max_bad_records={total} to continue without them"
    )
  if len(bad.rows) == rows:
    raise ValueError(f"{name}: none of its {rows:,} rows can be read ({bad.why})")


def _stamp(shards: Sequence[store.Shard]) -> str:
  """Returns what changes where one of the files of tokens does."""
  facts = []
  for shard in shards:
    path = shard.folder / store.TOKENS
    local = files.is_local(path)
    facts.append([shard.digest, os.stat(path).st_mtime_ns if local else path.stat().mtime])
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kept(reader: _Reader) -> epath.Path:
  """Returns where it is kept which records of these shards cannot be read."""
  digest = hashlib.sha256("".join(s.folder.name for s in reader.documents.shards).encode())
  return reader.folder / f"bad_records-{digest.hexdigest()[:16]}.json"


def _load_kept(reader: _Reader) -> dict[str, Any] | None:
  try:
    kept = files.read_json(_kept(reader), follow=True)
    whole = all(
      type(number) is int and 0 <= number < reader.documents.records and isinstance(why, str)
      for number, why in kept["records"]
    )
    return kept if whole and isinstance(kept["stamp"], str) else None
  except (OSError, ValueError, KeyError, TypeError):  # torn, or written by something else
    return None


def _keep(reader: _Reader, found: dict[str, Any]) -> None:
  try:
    files.replace(_kept(reader), files.json_text(found) + "\n", shared=True)
  except OSError as error:
    logging.warning("%s cannot be written (%s): each start reads all records", _kept(reader), error)
