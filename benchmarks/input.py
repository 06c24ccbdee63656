r"""Tokens per second of the input pipeline: rows, documents in random order, tokenization.

  python -m benchmarks.input

Ours is TrainingBatches over the prepared store of python_source, up to the jax arrays. Bare is
`MapDataset.source(rows).map(decode).shuffle().repeat().batch(B)` over a file of the same rows, up
to the NumPy arrays. They run in turns, one process, one thread; the medians are printed. Exits with
1 where ours reaches less than 0.9 of bare. Also printed: how fast one process reads everything
once, as data.max_bad_records makes it do.

  python -m benchmarks.input --of=text [--documents=20000]

Random reads: rows of packed documents of 830 tokens on average, from a store of 16-bit tokens, in
tokens per second of CPU time (of all threads) and by the clock; exits with 1 where that is below 5
million per core. Tokenization: the source of the standard library by a BPE of 8192 tokens that is
trained on it, from .jsonl files to shards, compared with a bare loop over the same tokenizer and
texts; exits with 1 where one process reaches less than 0.8 of the loop (CPU time), or two processes
less than 1.7 times one (by the clock: of no meaning on a busy machine).

  python -m benchmarks.input --of=conversations [--documents=20000]

Conversations of 1 to 3 turns, from a .jsonl file to a shard, compared with a bare loop that
tokenizes the texts that the chat template has written; exits with 1 below 0.8 (CPU time).
"""

import json
import os
import pathlib
import statistics
import sysconfig
import tempfile
import time

import grain
import jax
import ml_collections
import numpy as np
from absl import app, flags
from array_record.python import array_record_module
from etils import epath

from input_pipeline import batches, row_source, rows, shard_writer, store, tfds_documents
from input_pipeline.text import (
  chat_template,
  conversations,
  preparation,
  tokenizer,
  train_tokenizer,
  worker,
)
from input_pipeline.text import documents as text_documents
from input_pipeline.text import files as text_files

_OF = flags.DEFINE_enum("of", "rows", ["rows", "text", "conversations"], "What is measured.")
_DOCUMENTS = flags.DEFINE_integer("documents", 20_000, "Documents in the store of random reads.")

LENGTH, ROWS = 512, 64  # of a row in tokens, of a batch
STEPS, REPEATS = 20, 15  # batches of a measurement, and measurements of each, taken in turns
COPIES = 2  # files of all the text, of which one is a unit
_FIELDS = ("tokens", "targets", "weights")
_LEAST_RATIO = 0.9
_LEAST_READ, _MEAN_TOKENS = 5e6, 830
_LEAST_TOKENIZED, _LEAST_OF_TWO = 0.8, 1.7


def _data():
  return ml_collections.ConfigDict(
    {
      "name": "python_source",
      "kind": "text",
      "data_dir": "",
      "train_split": "train",
      "sequence_length": LENGTH,
      "text_feature": "",
      "max_bad_records": 0,
      "tokenizer": "bytes",
      "packing": "concatenate",
    }
  )


def _stored_rows(source, path):
  """Writes a file of the source's rows, of T + 1 bytes each."""
  writer = array_record_module.ArrayRecordWriter(path, "group_size:1,uncompressed")
  for start in range(0, len(source), 1000):
    found = source.read(np.arange(start, min(start + 1000, len(source))))
    for tokens, targets, weights in zip(*(found[key] for key in _FIELDS), strict=True):
      row = np.append(tokens[:1], targets[weights > 0]).astype(np.uint8)
      writer.write(row.tobytes())
  writer.close()
  return path


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


def _checked_per_second(prepared):
  """Returns the bytes per second that are looked at for bad records."""
  begin = time.perf_counter()
  for first in range(0, prepared.documents.records, 512):
    stop = min(first + 512, prepared.documents.records)
    assert not prepared.documents.unreadable(np.arange(first, stop))
  return prepared.documents.index["bytes"].sum() / (time.perf_counter() - begin)


# ------------------------------ documents ------------------------------


class _Ids:
  """Stands for a tokenizer of 16-bit tokens."""

  name, digest, size, end, start, has_bos = "ids", "ids", 2**16, 0, 0, False


def _random_reads(folder):
  """Prints the rate of random reads of packed documents; returns tokens per second of CPU time."""
  draw = np.random.default_rng(0)

  def fill(shard):
    for number, length in enumerate(draw.integers(1, 2 * _MEAN_TOKENS, _DOCUMENTS.value)):
      shard.add(draw.integers(0, 2**16, length).astype(np.uint32), int(length), number)

  shard_writer.write_shard(folder / "reads", 2**16, {}, fill)
  prepared = store.open_prepared(folder, ["reads"], _Ids(), "documents", 0)
  keys = {"packing": "best_fit", "sequence_length": 4096, "max_bad_records": 0}
  everything = np.arange(_DOCUMENTS.value)
  data = ml_collections.ConfigDict(keys)
  source = rows.source_of(prepared, everything, "documents", data, seed=0)
  order = draw.permutation(len(source))
  wall, cpu, tokens = time.perf_counter(), time.process_time(), 0.0
  for start in range(0, len(source), 32):
    tokens += source.read(order[start : start + 32])["weights"].sum()
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  print(f"random reads: {tokens / cpu / 1e6:.1f} M tokens per second of CPU time")
  print(f"random reads: {tokens / wall / 1e6:.1f} M tokens/s by the clock, one thread reading")
  return tokens / cpu


def _trained(folder, texts):
  """Returns a BPE of 8192 tokens that is trained on texts, in a folder."""
  folder.mkdir(exist_ok=True)
  (folder / "tokenizer.json").write_bytes(train_tokenizer.train(iter(texts), 8192))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": train_tokenizer.END}))
  return tokenizer.load(folder)


def _tokenization(folder):
  """Prints the rates of tokenization; returns ours / bare, and two processes / one."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  texts = [path.read_bytes() for path in sorted(library.rglob("*.py"))]
  texts = [text for text in texts if text and _is_text(text)][:3000]
  lines = "".join(json.dumps({"text": text.decode()}) + "\n" for text in texts)
  for copy in range(COPIES):
    (folder / f"{copy}.jsonl").write_text(lines)
  size = sum(map(len, texts))
  encoder = _trained(folder / "tokenizer", texts)
  units = text_documents.units(text_files.find(f"{folder}/*.jsonl"))

  def bare():
    for start in range(0, len(texts), 256):
      encoder.encode(texts[start : start + 256])

  def ours():
    task = worker.Task(folder / "one", encoder.name, encoder.digest, "text", 0)
    task.folder.mkdir()
    worker.write_unit(task, units[0], encoder)

  seconds = {}
  for what in (bare, ours):
    begin = time.process_time()
    what()
    seconds[what] = time.process_time() - begin
  print(f"bare loop: {size / seconds[bare] / 1e6:.2f} MB/s of CPU time")
  print(f"from .jsonl to a shard: {size / seconds[ours] / 1e6:.2f} MB/s of CPU time")
  clock = {}
  for processes in (1, 2):
    task = worker.Task(folder / str(processes), encoder.name, encoder.digest, "text", 0)
    begin = time.perf_counter()
    preparation.fill(task, units, encoder, processes)
    clock[processes] = time.perf_counter() - begin
    rate = COPIES * size / clock[processes] / 1e6
    print(f"{processes} process{'es' if processes > 1 else ''}: {rate:.2f} MB/s by the clock")
  return seconds[bare] / seconds[ours], clock[1] / clock[2]


_TEMPLATE = (
  "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def _of_conversations(folder):
  """Returns ours / bare for conversations."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  texts = [path.read_bytes() for path in sorted(library.glob("*.py"))]
  text = b"".join(texts).decode()
  (folder / "chat_template.jinja").write_text(_TEMPLATE)
  encoder, random = _trained(folder, texts), np.random.default_rng(0)
  records = []
  for _ in range(_DOCUMENTS.value):
    starts = random.integers(0, len(text) - 2000, random.integers(1, 4)).tolist()
    turns = [(text[at : at + 200], text[at + 200 : at + 1200]) for at in starts]
    speakers = ("user", "assistant")
    messages = [
      {"role": r, "content": c} for turn in turns for r, c in zip(speakers, turn, strict=True)
    ]
    records.append({"messages": messages})
  (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  template = chat_template.load("", encoder)
  written = [template.render(conversations.parse(one)) for one in records]
  [unit, *rest] = text_documents.units(text_files.find(str(folder / "chats.jsonl")), 2**40)
  assert not rest
  begin = time.process_time()
  tokens = sum(len(encoder.encode_template(one)[0]) for one in written)
  bare = time.process_time() - begin
  task = worker.Task(epath.Path(folder), str(folder), encoder.digest, "", 0, "")
  begin = time.process_time()
  worker.write_unit(task, unit, encoder)
  ours = time.process_time() - begin
  print(f"{len(records):,} conversations of {tokens / len(records):.0f} tokens on average")
  print(f"bare loop: {tokens / bare:,.0f} tokens per second of CPU time")
  print(f"from .jsonl to a shard: {tokens / ours:,.0f} tokens per second of CPU time")
  print(f"ratio {bare / ours:.2f}")
  return bare / ours


def _is_text(content):
  try:
    return bool(content.decode())
  except UnicodeDecodeError:
    return False


def _rows(folder):
  """Prints the rates of batches of rows; returns whether ours is fast enough."""
  T, B, steps = LENGTH, ROWS, STEPS
  data = _data()
  source = row_source.open_source(data, "train", seed=0)
  training = batches.TrainingBatches(source, global_batch_size=B, seed=0)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shardings = dict.fromkeys(training.abstract, device)
  loops = {
    "ours": lambda step: jax.block_until_ready(training.batch(step, shardings)),
    "bare": _bare(_stored_rows(source, f"{folder}/rows.array_record"), T, B),
  }
  rates = {name: [] for name in loops}
  for repeat in range(REPEATS + 1):
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
  prepared, _ = tfds_documents.prepare(data, "train")
  checked = statistics.median(_checked_per_second(prepared) for _ in "abc")
  print(f"check for bad records: {checked / 1e6:.0f} MB/s")
  return ours >= _LEAST_RATIO * bare


def main(argv):
  del argv
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one thread
  with tempfile.TemporaryDirectory() as name:
    if _OF.value == "rows":
      return 0 if _rows(name) else 1
    if _OF.value == "conversations":
      return 0 if _of_conversations(pathlib.Path(name)) >= _LEAST_TOKENIZED else 1
    read = _random_reads(epath.Path(name))
    ratio, two = _tokenization(epath.Path(name))
  print(f"tokenization: {ratio:.2f} of the bare loop; two processes: {two:.2f} times one")
  enough = read >= _LEAST_READ and ratio >= _LEAST_TOKENIZED and two >= _LEAST_OF_TWO
  return 0 if enough else 1


if __name__ == "__main__":
  app.run(main)
