"""Files that change while they are read: refused with the numbers, and nothing of them stored."""

import os
import re
import shutil
import time
import types

import pyarrow
import pytest
from etils import epath
from pyarrow import fs, parquet

from commands import prepare as verb
from input_pipeline import mixture, rows, store
from input_pipeline.text import documents, files, preparation, tokenizer, train_tokenizer
from tests.input_pipeline.text.corpora import section, texts, write_lines
from tests.input_pipeline.text.writing import PACKED, lines, write
from training import splits

TEXTS = texts(600, longest=20)  # several batches of the tokenizer, and little more than a block


def content(suffix, documents_):
  """Returns what a file of these documents has."""
  if suffix == ".txt":
    return "\n".join(documents_).encode()
  if suffix == ".parquet":
    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": documents_}), out, row_group_size=100)
    return out.getvalue().to_pybytes()
  return PACKED[suffix.removeprefix(".jsonl")](lines([{"text": text} for text in documents_]))


# ------------------------------ changes ------------------------------


def rewrite(path):
  """Writes as many other bytes in place."""
  with path.open("r+b") as file:
    size = path.stat().st_size
    file.seek(size // 2)
    file.write(b"\0" * (size - size // 2))


def rewrite_and_set_back(path):
  before = path.stat()
  rewrite(path)
  os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path):
  """Puts another file of the same size and modification time in its place."""
  other = path.with_name("other.tmp")
  shutil.copy2(path, other)
  rewrite_and_set_back(other)
  other.rename(path)


def append(path):
  with path.open("ab") as file:
    file.write(b'{"text": "more"}\n')


def truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def remove(path):
  path.unlink()


def add(path):
  write(path.with_name(f"new{''.join(path.suffixes)}"), path.read_bytes())


STATE = r"[\d,]+ bytes of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{9}"
CHANGED = f"had {STATE} and now has {STATE}"
CHANGES = [
  *((change, CHANGED) for change in (rewrite, rewrite_and_set_back, replace, append, truncate)),
  (remove, r"was there and is gone"),
  (add, r"new\.\S+ was added"),
]


def stored(data):
  """Returns how many shards there are, and refuses what is no shard."""
  folder = text_folder(data)
  assert not [*folder.glob("*/*.tmp")]
  return len([*folder.glob(f"*/*[0-9a-f]/{store.MANIFEST}")])


def text_folder(data):
  return epath.Path(data.data_dir) / "prepared" / "text"


MOMENTS = ("while it is read", "after its shard")
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt")
# Each change with both moments, and all kinds of files with each moment.
TRIALS = [
  (*one, SUFFIXES[(number + 2 * at) % 4], moment)
  for number, one in enumerate(CHANGES)
  for at, moment in enumerate(MOMENTS)
]


@pytest.mark.parametrize(
  ("change", "said", "suffix", "moment"), TRIALS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_change_is_refused_and_nothing_of_the_file_is_stored(
  change, said, suffix, moment, tmp_path
):
  folder = tmp_path / "files"
  path = write(folder / f"a{suffix}", content(suffix, TEXTS))
  if moment == "after its shard":
    write(folder / "b.jsonl", content(".jsonl", TEXTS))
  time.sleep(0.01)  # the clock of a file system may tick every 4 ms
  data, done = section(folder, tmp_path / "data"), []

  def tick(*_):
    written = [*text_folder(data).glob(f"*/*[0-9a-f]/{store.MANIFEST}")]
    if not done and (moment == "while it is read" or len(written) > 1):  # beside the one under way
      done.append(change(path))

  with pytest.raises(files.ChangedError, match=said) as error:
    preparation.prepare(data, data.files, tick=tick)
  assert str(error.value).startswith("the files were changed while they were being read: ")
  states = re.findall(STATE, str(error.value))
  assert len({*states}) == len(states), "what it was and what it is differ"
  assert f"{folder}/" in str(error.value)
  assert "; run again when they are complete" in str(error.value)
  kept = (moment == "after its shard") + (change is add)
  assert stored(data) <= kept
  if change is add:
    assert stored(data) == kept


def test_a_change_is_refused_by_worker_processes(tmp_path):
  folder = tmp_path / "files"
  for name in "abc":
    write_lines(folder / f"{name}.jsonl", texts(1500, longest=20))
  data, done = section(folder, tmp_path / "data", prepare_processes=2), []
  time.sleep(0.01)

  def tick(*_):
    if not done:  # all three are worked on, or wait for it
      done.extend(rewrite_and_set_back(folder / f"{name}.jsonl") for name in "abc")

  with pytest.raises(files.ChangedError, match=r"/[abc]\.jsonl had [\d,]+ bytes of"):
    preparation.prepare(data, data.files, tick=tick)
  assert stored(data) == 0


@pytest.mark.parametrize(
  "read",
  [documents.read_records, lambda unit: documents.read(unit, "text")],
  ids=["conversations", "texts"],
)
def test_a_bad_record_of_a_file_that_changes_is_said_to_be_a_change(read, tmp_path):
  path = write(tmp_path / "a.jsonl", content(".jsonl", ["x" * 2**16] * 40))
  [unit] = documents.units(files.find(str(tmp_path)))
  found = read(unit)
  next(found)
  path.write_bytes(b"x" * 40)
  with pytest.raises(files.ChangedError, match=r"now has 40 bytes"):
    list(found)


@pytest.mark.parametrize("change", [rewrite, remove, add])
def test_a_change_in_a_bucket_is_refused(change, tmp_path, monkeypatch):
  folder = tmp_path / "files"
  path = write(folder / "a.jsonl", content(".jsonl", TEXTS))
  system = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
  monkeypatch.setattr(files, "_file_system", lambda *_: system)
  data, done = section(folder, tmp_path / "data"), []
  time.sleep(0.01)

  def tick(*_):
    if not done:
      done.append(change(path))

  said = dict(CHANGES)[change]
  with pytest.raises(files.ChangedError, match=rf"gs://files/\S+ .*{said}|{said}"):
    preparation.prepare(data, "gs://files/", tick=tick)
  assert stored(data) == (change is add)


def test_a_data_set_of_the_hub_is_read_at_its_commit(monkeypatch):
  found = [files.InputFile("hf://o/n@c0ffee/a.parquet", 3, "blob")]
  monkeypatch.setattr(files, "_listed", lambda *_: pytest.fail("it has no need to be listed"))
  files.check_same("hf://o/n", found)
  files.check_unchanged(found[0])


def test_a_change_in_a_source_of_a_mixture_is_refused(tmp_path):
  path = write_lines(tmp_path / "web.jsonl", TEXTS)
  sources = ({"name": "web", "files": str(path), "weight": 1.0},)
  data, done = section("", tmp_path / "data", sources=sources, stages=()), []

  def tick(*_):
    if not done:
      done.append(append(path))

  with pytest.raises(ValueError, match=r"^source 'web' of data.sources: the files were changed"):
    mixture.open_mixture(data, "train", 0, tick=tick)
  assert stored(data) == 0


# ------------------------------ between two readings ------------------------------


@pytest.fixture
def changing(tmp_path, monkeypatch):
  """Rewrites the file of a run between the opening of its two splits."""
  path = write_lines(tmp_path / "files" / "a.jsonl", TEXTS)
  data = section(path.parent, tmp_path / "data")

  def training_batches(*_):
    source = rows.open_source(data, "train", 0)
    write_lines(path, texts(600, seed=1, longest=20))
    return types.SimpleNamespace(source=source, abstract=None)

  def evaluation_batches(*_):
    return types.SimpleNamespace(source=rows.open_source(data, "test", 0))

  for function in (training_batches, evaluation_batches):
    monkeypatch.setattr(splits, function.__name__, function)
  monkeypatch.setattr(splits, "sharing", lambda seconds: None)


def test_the_splits_of_a_run_are_of_the_same_files(changing):
  processes = types.SimpleNamespace(start_timeout_seconds=1.0)
  data = types.SimpleNamespace(name="text")
  job = types.SimpleNamespace(
    config=types.SimpleNamespace(processes=processes, data=data), batch=None
  )
  with pytest.raises(files.ChangedError, match=r"a\.jsonl had [\d,]+ bytes of"):
    splits.open_data(job)


def test_the_splits_that_prepare_writes_are_of_the_same_files(changing, monkeypatch):
  for name in ("TRAIN_TOKENIZER", "CONFIG"):
    monkeypatch.setattr(verb.flags, name, types.SimpleNamespace(value=None))
  for owner, name in ((splits, "train_missing_tokenizer"), (verb, "_checked")):
    monkeypatch.setattr(owner, name, lambda *_: None)
  with pytest.raises(files.ChangedError, match=r"a\.jsonl had [\d,]+ bytes of"):
    verb.run()


def test_a_tokenizer_of_other_files_than_those_prepared_is_refused(tmp_path):
  path = write_lines(tmp_path / "files" / "a.jsonl", TEXTS)
  data = section(path.parent, tmp_path / "data", tokenizer="")

  def tick(*_):
    append(path)

  with pytest.raises(files.ChangedError, match=r"a\.jsonl had"):
    train_tokenizer.train_on(data, 300, tick)
  assert tokenizer.resolve(data) == "bytes", "a tokenizer of files that changed is not taken"
  with files.listed_once():
    data.tokenizer = train_tokenizer.train_on(data, 300)
    append(path)
    with pytest.raises(files.ChangedError, match=r"a\.jsonl had"):
      rows.open_source(data, "train", 0)
  assert stored(data) == 0
