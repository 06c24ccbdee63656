r"""Tokens per second of the input pipeline compared with a bare Grain loop over the same rows.

  python -m benchmarks.input [--sequence_length=512] [--global_batch_size=64] [--data_dir=DIR]

Ours is TrainingBatches over the prepared store of python_source, up to the jax arrays. Bare is
`MapDataset.source(rows).map(decode).shuffle().repeat().batch(B)`, up to the NumPy arrays. Both read
the same files in turns, one process, one thread; the medians are printed. Exits with 1 where ours
reaches less than 0.9 of bare. Also printed: the rows per second of one process that reads all rows
once, as data.max_bad_records makes it do.
"""

import statistics
import time

import grain
import jax
import ml_collections
import numpy as np
from absl import app, flags

from input_pipeline import batches, prepare, row_source, row_store

_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 512, "Tokens per row.")
_BATCH = flags.DEFINE_integer("global_batch_size", 64, "Rows per batch.")
_STEPS = flags.DEFINE_integer("steps", 20, "Batches per measurement.")
_REPEATS = flags.DEFINE_integer("repeats", 15, "Measurements of each, taken in turns.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Empty: TFDS's default folder.")

_LEAST_RATIO = 0.9


def _data():
  return ml_collections.ConfigDict(
    {
      "name": "python_source",
      "kind": "text",
      "data_dir": _DATA_DIR.value,
      "sequence_length": _SEQUENCE_LENGTH.value,
      "text_feature": "",
      "max_bad_records": 0,
    }
  )


def _bare(path, T, B):
  """Returns step -> batch, written as Grain's documentation does."""

  def decode(record):
    row = np.frombuffer(record, np.uint8).astype(np.int32)
    weights = np.ones(T, np.float32)
    if len(row) < T + 1:
      weights[len(row) - 1 :] = 0
      row = np.pad(row, (0, T + 1 - len(row)))
    return {"tokens": row[:-1], "targets": row[1:], "weights": weights}

  rows = grain.sources.ArrayRecordDataSource(path)
  return grain.MapDataset.source(rows).map(decode).shuffle(seed=0).repeat().batch(B).__getitem__


def _checked_per_second(store):
  """Returns the rows per second that are looked at for bad ones."""
  rows = row_store.Records(store, lambda number, length: True)
  begin = time.perf_counter()
  for start in range(0, len(rows), rows.per_read):
    assert not rows.unreadable(range(start, min(start + rows.per_read, len(rows))))
  return len(rows) / (time.perf_counter() - begin)


def main(argv):
  del argv
  T, B, steps = _SEQUENCE_LENGTH.value, _BATCH.value, _STEPS.value
  data = _data()
  source = row_source.open_source(data, "train", seed=0)
  training = batches.TrainingBatches(source, global_batch_size=B, seed=0)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shardings = dict.fromkeys(training.abstract, device)
  loops = {
    "ours": lambda step: jax.block_until_ready(training.batch(step, shardings)),
    "bare": _bare(str(prepare.prepare(data, "train").rows_path), T, B),
  }
  rates = {name: [] for name in loops}
  for repeat in range(_REPEATS.value + 1):
    for name, batch in loops.items():
      begin = time.perf_counter()
      for step in range(repeat * steps, (repeat + 1) * steps):
        batch(step)
      if repeat:  # the first one opens files and fills caches
        rates[name].append(steps * B * T / (time.perf_counter() - begin))
  ours, bare = (statistics.median(rates[name]) for name in ("ours", "bare"))
  print(f"{source.name}: {len(source)} rows of {T} tokens, {B} rows a batch")
  print(f"ours {ours:.0f} tokens/s (rows on the device)")
  print(f"bare {bare:.0f} tokens/s (rows as NumPy arrays)")
  print(f"ratio {ours / bare:.2f}")
  checked = statistics.median(_checked_per_second(prepare.prepare(data, "train")) for _ in "abc")
  print(f"check for bad rows: {checked:.0f} rows/s")
  return 0 if ours >= _LEAST_RATIO * bare else 1


if __name__ == "__main__":
  app.run(main)
