"""Filling the store: by several processes, resumed after a kill, nothing half-written taken."""

import contextlib
import errno
import json
import os
import pathlib
import pickle
import subprocess
import sys
import types

import numpy as np
import psutil
import pytest
from etils import epath

from input_pipeline import shard_writer, store
from input_pipeline.text import preparation, tokenizer
from runtime import exit_codes
from tests.input_pipeline.text.corpora import section, texts, write_lines
from tests.training.checkpointing.test_full_disk import full_disk

ROOT = pathlib.Path(__file__).parents[3]
UNITS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """A folder with a unit for each of four files of different sizes."""
  folder = tmp_path_factory.mktemp("corpus")
  for number in range(UNITS):
    write_lines(folder / f"{number}.jsonl", texts(1500 + 100 * number, seed=number, longest=20))
  return folder


@pytest.fixture(scope="module")
def contents(corpus, tmp_path_factory):
  """What the store holds when nothing has interrupted its preparation."""
  data = section(corpus, tmp_path_factory.mktemp("undisturbed"))
  preparation.prepare(data, data.files)
  return contents_of(data)


def contents_of(data):
  """Returns shard -> its manifest, after reading its tokens; nothing else may be there."""
  folder = pathlib.Path(data.data_dir) / "prepared" / "text"
  [folder] = [path for path in folder.iterdir() if path.is_dir()]
  assert not [*folder.glob("*.tmp")]
  shards = [path for path in folder.iterdir() if path.is_dir()]
  found = store.Documents([store.Shard.open(epath.Path(path)) for path in shards])
  assert found.unreadable(range_of(found)) == {}
  return {path.name: json.loads((path / store.MANIFEST).read_text()) for path in shards}


def range_of(found):
  """Returns the numbers of all records."""
  return np.arange(found.records)


def children():
  """Returns the worker processes, without those that have been killed."""
  found = []
  for one in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):  # so also of a zombie
      found += [one] if "input_pipeline.text.worker" in one.cmdline() else []
  return found


def test_documents_are_those_of_the_files_in_their_order(corpus, tmp_path):
  data = section(corpus, tmp_path)
  found = preparation.prepare(data, data.files).documents
  wanted = [t for i in range(UNITS) for t in texts(1500 + 100 * i, seed=i, longest=20)]
  assert bytes(found.read(range_of(found))[0]) == b"".join(t.encode() + b"\0" for t in wanted)
  assert found.index["bytes"].tolist() == [len(t.encode()) + 1 for t in wanted]
  assert found.index["hash"][7] == shard_writer.content_hash(wanted[7].encode())


def test_several_processes_write_the_same(corpus, contents, tmp_path):
  data, seen = section(corpus, tmp_path, prepare_processes=3), []
  preparation.prepare(data, data.files, tick=lambda *what: seen.append((*what, len(children()))))
  assert contents_of(data) == contents
  assert max(count for *_, count in seen) == 3
  assert not children()
  *_, (what, count, text, _) = seen
  documents = sum(shard["documents"] for shard in contents.values())
  assert (what, count) == ("documents", documents)
  size = (
    corpus.stat().st_size if corpus.is_file() else sum(f.stat().st_size for f in corpus.iterdir())
  )
  assert text.startswith(f"100 % of {size / 2**20:,.0f} MiB, 0:00 left, {documents:,} documents, ")
  assert text.endswith("k tokens/s")


PREPARE = """
import sys
from input_pipeline.text import preparation
from tests.input_pipeline.text.corpora import section
data = section(*sys.argv[1:3], prepare_processes=2)
preparation.prepare(data, data.files)
"""


def killed(corpus, folder):
  """Kills a preparation once it has a shard and writes another; returns its workers.

  Returns None where it, or one of its workers, has ended before.
  """
  process = subprocess.Popen(
    [sys.executable, "-c", PREPARE, str(corpus), str(folder)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  try:
    while True:
      done = [*folder.glob(f"prepared/text/*/*[0-9a-f]/{store.MANIFEST}")]
      if done and [*folder.glob(f"prepared/text/*/*.tmp/{store.TOKENS}")]:
        break
      if process.poll() is not None:
        return None
    workers = psutil.Process(process.pid).children()
    return workers if len(workers) == 2 else None  # one may have ended meanwhile
  finally:
    process.kill()
    process.wait()


def test_a_kill_costs_the_shards_that_were_being_written_alone(corpus, contents, tmp_path):
  for attempt in range(30):  # this process may look too late, or a worker finish its shard
    folder = tmp_path / str(attempt)
    if (workers := killed(corpus, folder)) is None:
      continue
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, "workers outlive the process that has started them"
    stored = folder / "prepared" / "text"
    done = {
      path.parent: path.stat().st_mtime_ns for path in stored.glob(f"*/*[0-9a-f]/{store.MANIFEST}")
    }
    if len(done) < UNITS:
      break
  assert 1 <= len(done) < UNITS
  data = section(corpus, folder)
  preparation.prepare(data, data.files)
  assert contents_of(data) == contents
  again = {path: (path / store.MANIFEST).stat().st_mtime_ns for path in done}
  assert again == done, "what was complete is not written again"


def test_a_stop_ends_the_workers_and_leaves_complete_shards(corpus, contents, tmp_path):
  data = section(corpus, tmp_path, prepare_processes=2)

  def tick(what, count, text):
    if count > 1500:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    preparation.prepare(data, data.files, tick=tick)
  assert not children()
  left = contents_of(data)
  assert left.items() < contents.items()


def test_a_worker_that_dies_is_named_and_a_retry_may_succeed(corpus, tmp_path):
  data = section(corpus, tmp_path, prepare_processes=2)

  def tick(what, count, text):
    for child in children():
      child.kill()

  message = (
    r"worker process \d of 2 has ended with signal 9 \(SIGKILL\); the system does so where memory "
    r"runs out .*while it prepared .*\d.jsonl; run again: .* data.prepare_processes=1 less memory"
  )
  with pytest.raises(exit_codes.RetryableError, match=message):
    preparation.prepare(data, data.files, tick=tick)
  assert not children()


def test_a_full_disk_is_one_message_and_leaves_no_shard(corpus, tmp_path):
  data = section(corpus, tmp_path, prepare_processes=2)
  message = r"data cannot be prepared in .*bytes-text-\w+ \(.*File too large.*free some space"
  with full_disk(20_000), pytest.raises(ValueError, match=message):
    preparation.prepare(data, data.files)
  assert contents_of(data) == {}


def test_a_disk_without_space_may_have_some_later(corpus, tmp_path, monkeypatch):
  (tmp_path / "full").symlink_to("/dev/full")
  writer = store.array_record_module.ArrayRecordWriter
  monkeypatch.setattr(
    store.array_record_module,
    "ArrayRecordWriter",
    lambda path, options: writer(str(tmp_path / "full"), options),
  )
  data = section(corpus, tmp_path / "data")
  with pytest.raises(ValueError, match=r"data cannot be prepared in .*No space left") as error:
    preparation.prepare(data, data.files)
  assert exit_codes.retryable(error.value)
  assert contents_of(data) == {}


@pytest.mark.parametrize(
  ("number", "cause"),
  [
    (errno.ENOSPC, "system"),
    (errno.EIO, "input"),
    (errno.EACCES, "system"),
    (errno.EACCES, "input"),
  ],
)
def test_what_a_worker_says_of_a_disk_decides_whether_a_retry_may_succeed(
  cause, number, monkeypatch, tmp_path
):
  """The worker's main, with what it reads and answers in memory, and the answer's reader."""

  def fail(*_):
    error = OSError(number, os.strerror(number))
    if cause == "system":
      raise error
    raise ValueError(f"a.jsonl cannot be read ({error.strerror})") from error

  worker, answers = preparation.worker, []
  messages = [worker.Task(tmp_path, "bytes", tokenizer.load("bytes").digest, "text", 0), None]
  monkeypatch.setattr(worker, "write_unit", fail)
  take = iter(messages).__next__
  worker.main(types.SimpleNamespace(recv=take, send=answers.append))
  [answer] = pickle.loads(pickle.dumps(answers))
  expected = pytest.raises((ValueError, exit_codes.RetryableError), match=os.strerror(number))
  with expected as error, shard_writer.writing_to(epath.Path(tmp_path)):
    raise answer
  assert exit_codes.retryable(error.value) == (number != errno.EACCES)


def test_a_folder_that_cannot_be_written_is_one_message(corpus, tmp_path):
  (tmp_path / "prepared").write_text("a file")
  data = section(corpus, tmp_path)
  with pytest.raises(ValueError, match=r"data cannot be prepared in .*; free some space or get"):
    preparation.prepare(data, data.files)


def test_files_that_are_added_or_changed_are_tokenized_and_no_others(tmp_path):
  folder, data_dir = tmp_path / "files", tmp_path / "data"
  for name in "ab":
    write_lines(folder / f"{name}.jsonl", texts(5))
  data = section(folder, data_dir)
  preparation.prepare(data, data.files)
  before = contents_of(data)
  write_lines(folder / "c.jsonl", texts(3, seed=1))
  write_lines(folder / "b.jsonl", texts(6, seed=2))
  documents = preparation.prepare(data, data.files).documents
  assert len(documents) == 5 + 6 + 3
  after = contents_of(data)
  assert len(after) == 4
  assert before.items() < after.items()


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_records_beyond_the_limit_are_refused_and_listed(tmp_path, processes):
  folder = tmp_path / "files"
  for name in "ab":
    path = write_lines(folder / f"{name}.jsonl", texts(3))
    path.write_text(path.read_text() + '{"n": 3}\nno JSON\n')

  def prepare(limit):
    data = section(folder, tmp_path / "data", prepare_processes=processes, max_bad_records=limit)
    return preparation.prepare(data, data.files)

  with pytest.raises(ValueError, match=r"so far: 1 bad record, more than .*=0; ") as error:
    prepare(0)
  assert ".jsonl:4: it has no key 'text', only 'n'" in str(error.value)
  with pytest.raises(ValueError, match=r"4 bad records, more than data.max_bad_records=3; .* 4 o"):
    prepare(3)
  found = prepare(4)
  assert (len(found.documents), found.bad_count) == (6, 4)
  assert [where.rpartition("/")[2] for where, _ in found.bad] == [
    *("a.jsonl:4", "a.jsonl:5", "b.jsonl:4", "b.jsonl:5"),
  ]


def test_documents_without_text_are_left_out_and_counted(tmp_path):
  write_lines(tmp_path / "a.jsonl", ["", "a", ""])
  found = preparation.prepare(section(tmp_path, tmp_path / "data"), str(tmp_path))
  assert (len(found.documents), found.empty) == (1, 2)


def test_worker_processes_import_nothing_slow():
  """Nor does whoever encodes bytes."""
  slow = {"jax", "flax", "orbax", "grain", "tensorflow", "tensorflow_datasets"}
  slow |= {"tokenizers", "sentencepiece", "pyarrow"}
  program = (
    f"import sys, {preparation.worker.__name__} as worker; worker.tokenizer.load('bytes');"
    f"print({slow} & set(sys.modules))"
  )
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", program]
  found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  assert found.stdout == "set()\n"


def test_a_tokenizer_that_encodes_otherwise_has_a_folder_of_its_own(tmp_path):
  data, encoder = section(tmp_path, tmp_path), tokenizer.load("bytes")

  class Other:
    name, digest = encoder.name, "0" * 64

  folders = {store.folder_of(data, one, f) for one in (encoder, Other()) for f in ("a", "b")}
  assert len(folders) == 4
