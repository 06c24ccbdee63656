"""A Source: the rows of one split, by number."""

import dataclasses
import hashlib
import json
from collections.abc import Callable

import numpy as np
from array_record.python import array_record_module

from input_pipeline import catalog, preparation

_LABEL_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Source:
  """Rows with random access.

  Attributes:
    name: the data set and its split, as messages call it.
    fingerprint: hex digest; two sources with the same one have the same rows.
    rows: how many there are; also len(source).
    fields: field name -> (shape of one row, numpy dtype).
    read: row numbers int[N] -> field name -> the N rows stacked, in that order. Raises ValueError
      that names the row if one cannot be read. May be called from several threads.
  """

  name: str
  fingerprint: str
  rows: int
  fields: dict[str, tuple[tuple[int, ...], np.dtype]]
  read: Callable[[np.ndarray], dict[str, np.ndarray]]

  def __len__(self):
    return self.rows


def open_source(data, split, seed):
  """Opens a split of the data set that the config names, and prepares it on first use.

  Args:
    data: the config's `data` section.
    split: name of the split.
    seed: int; only "random_normal" depends on it.

  Returns:
    A Source. Fields by data.kind, with T = sequence_length, P = input_size, C = target_size:
      text: tokens int32 [T], targets int32 [T], weights float32 [T]
      image: inputs float32 [P] in 0..1, targets int32 [], weights float32 []
      random: inputs float32 [P], targets float32 [C], weights float32 []

  Raises:
    ValueError: the data set or split is unknown, empty, damaged or does not fit the config.
  """
  if (data.kind == "random") != (data.name == catalog.RANDOM_NORMAL):
    raise ValueError(
      f"data.name={data.name!r} and data.kind={data.kind!r} do not go together: kind random is for"
      f" {catalog.RANDOM_NORMAL}, which has no other"
    )
  if data.kind == "random":
    return _random_normal(data, split, seed)
  store = preparation.prepare(data, split)
  return _text_source(store) if data.kind == "text" else _image_source(store, data)


def array_source(name, arrays):
  """Returns a Source over arrays in memory: field name -> [rows, ...]."""
  digest = hashlib.sha256()
  for field, array in sorted(arrays.items()):
    digest.update(f"{field} {array.shape} {array.dtype.str}".encode() + array.tobytes())
  return Source(
    name=name,
    fingerprint=digest.hexdigest(),
    rows=min(len(array) for array in arrays.values()),
    fields={field: (array.shape[1:], array.dtype) for field, array in arrays.items()},
    read=lambda indices: {field: array[indices] for field, array in arrays.items()},
  )


def _random_normal(data, split, seed):
  """Draws the whole set at once; both splits are the same set."""
  if seed < 0 or min(data.examples, data.input_size, data.target_size) < 1:
    raise ValueError(
      f"{data.name}: seed={seed} must not be negative, and data.examples={data.examples},"
      f" data.input_size={data.input_size}, data.target_size={data.target_size} must be at least 1"
    )
  generator = np.random.Generator(np.random.Philox(key=seed))
  # Row after row, and rounded from float64, so that neither more examples nor another machine's
  # mathematics library changes a row.
  drawn = generator.standard_normal((data.examples, data.input_size + data.target_size))
  inputs, targets = np.split(drawn.astype(np.float32), [data.input_size], axis=1)
  weights = np.ones(data.examples, np.float32)
  arrays = {"inputs": inputs, "targets": targets, "weights": weights}
  return array_source(f"{data.name} {split}", arrays)


def _reader(store):
  """Returns a function from row numbers to the records (bytes) of a store."""
  path, rows = str(store.rows_path), store.manifest["rows"]
  again = f"delete {store.folder} and run again to prepare it anew"
  try:
    # Without read-ahead: rows are asked for in no order.
    reader = array_record_module.ArrayRecordReader(
      path, options="readahead_buffer_size:0", file_reader_buffer_size=32768
    )
    there = reader.num_records()
  except RuntimeError as error:
    raise ValueError(f"{store.name}: {path} cannot be opened ({error}); {again}") from error
  if there != rows:
    raise ValueError(f"{store.name}: {path} has {there} rows, store.json says {rows}; {again}")

  def read(indices):
    numbers = np.asarray(indices).tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) < rows:
      raise IndexError(f"{store.name}: row numbers {numbers} are not all in 0..{rows - 1}")
    try:
      return reader.read(numbers) if numbers else []
    except RuntimeError:  # one by one: which of them was it?
      return [read_one(number) for number in numbers]

  def read_one(number):
    try:
      return reader.read([number])[0]
    except RuntimeError as error:
      raise ValueError(
        f"{store.name}: row {number} of {path} cannot be read ({error}); {again}"
      ) from error

  return read


def _fingerprint(store):
  return hashlib.sha256(json.dumps(store.manifest, sort_keys=True).encode()).hexdigest()


def _text_source(store):
  T = store.manifest["sequence_length"]
  read_records = _reader(store)

  def read(indices):
    records = read_records(indices)
    lengths_B = np.fromiter(map(len, records), np.int64, len(records))
    # Only the last row of a split can be short.
    whole = b"".join(records) if (lengths_B == T + 1).all() else _pad(records, T + 1)
    stream_BS = np.frombuffer(whole, np.uint8).reshape(-1, T + 1).astype(np.int32)
    weights_BT = np.arange(T) < (lengths_B - 1)[:, None]
    return {
      "tokens": stream_BS[:, :-1],
      "targets": stream_BS[:, 1:],
      "weights": weights_BT.astype(np.float32),
    }

  fields = {
    "tokens": ((T,), np.dtype(np.int32)),
    "targets": ((T,), np.dtype(np.int32)),
    "weights": ((T,), np.dtype(np.float32)),
  }
  return Source(store.name, _fingerprint(store), store.manifest["rows"], fields, read)


def _pad(records, length):
  return b"".join(record.ljust(length, b"\0") for record in records)


def _image_source(store, data):
  shape = tuple(store.manifest["shape"])
  P = int(np.prod(shape))
  if data.input_size != P:
    raise ValueError(
      f"{store.name}: an image has {P} values {shape}, but data.input_size={data.input_size}; set"
      f" data.input_size={P}"
    )
  low, high = store.manifest["smallest_label"], store.manifest["largest_label"]
  if low < 0 or high >= data.target_size:
    raise ValueError(
      f"{store.name}: the labels run from {low} to {high}, but data.target_size="
      f"{data.target_size} allows 0 to {data.target_size - 1}; "
      + (f"set data.target_size={high + 1}" if low >= 0 else "take a split that has labels")
    )
  read_records = _reader(store)

  def read(indices):
    records = read_records(indices)
    bytes_BX = np.frombuffer(b"".join(records), np.uint8).reshape(-1, P + _LABEL_BYTES)
    labels_B1 = np.ascontiguousarray(bytes_BX[:, P:]).view("<i4").astype(np.int32)
    return {
      "inputs": bytes_BX[:, :P].astype(np.float32) / np.float32(255),
      "targets": labels_B1[:, 0],
      "weights": np.ones(len(records), np.float32),
    }

  fields = {
    "inputs": ((P,), np.dtype(np.float32)),
    "targets": ((), np.dtype(np.int32)),
    "weights": ((), np.dtype(np.float32)),
  }
  return Source(store.name, _fingerprint(store), store.manifest["rows"], fields, read)
