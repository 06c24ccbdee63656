"""Shards of documents: complete or absent, compared with what was written, damage by name."""

import itertools
import json
import threading

import numpy as np
import pytest
from etils import epath

from input_pipeline import shard_writer, store
from input_pipeline.shard_writer import locked
from tests.helpers.syncs import Syncs
from tests.training.checkpointing.test_full_disk import full_disk

# ------------------------------ the lock ------------------------------


def test_a_second_one_waits_for_the_first(tmp_path):
  order = []
  path = epath.Path(tmp_path / "sets" / "digits")

  def second():
    with locked(path):
      order.append("second")

  with locked(path):
    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    order.append("first")
  thread.join(30)
  assert order == ["first", "second"]


def test_a_bucket_is_locked_on_this_machine(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  with locked(epath.Path("gs://bucket/sets/digits")):
    [lock] = tmp_path.iterdir()
  assert lock.name.startswith("meshwright-")


# ------------------------------ shards ------------------------------

SIZES = (3, 1, 8192, 20_000, 8193)


def token_lists(ids, sizes=SIZES, seed=0):
  draw = np.random.default_rng(seed)
  return [draw.integers(0, ids, size).astype(np.uint32) for size in sizes]


def write(folder, ids, tokens, masks=None):
  def fill(shard):
    for i, document in enumerate(tokens):
      shard.add(document, 2 * len(document), i + 10**18, masks[i] if masks else None)
    shard.add_empty()
    shard.add_bad(shard_writer.Item("a.jsonl:{}".format, 7, None), "no key")

  folder = epath.Path(folder)
  shard_writer.write_shard(folder, ids, {"files": "here"}, fill)
  return folder


def read(folders, records=None):
  found = store.Documents([store.Shard.open(folder) for folder in folders])
  records = np.arange(found.records) if records is None else records
  return found, *found.read(records)


@pytest.mark.parametrize(("ids", "width"), [(256, 1), (2**16, 2), (2**16 + 1, 4)])
def test_tokens_are_read_as_written_in_the_smallest_type(tmp_path, ids, width):
  tokens = token_lists(ids)
  tokens[0][0] = ids - 1
  folder = write(tmp_path / "a", ids, tokens)
  found, stream, trained = read([folder])
  np.testing.assert_array_equal(stream, np.concatenate(tokens))
  assert trained is None
  assert (stream.dtype.itemsize, found.shards[0].manifest["largest_id"]) == (width, ids - 1)
  np.testing.assert_array_equal(found.index["tokens"], SIZES)
  np.testing.assert_array_equal(found.index["bytes"], np.multiply(SIZES, 2))
  np.testing.assert_array_equal(found.index["hash"], 10**18 + np.arange(5))
  np.testing.assert_array_equal(found.first_record, [0, 1, 2, 3, 6, 8])
  manifest = found.shards[0].manifest
  assert (manifest["empty"], manifest["bad"]) == (1, 1)
  assert manifest["bad_records"] == [["a.jsonl:7", "no key"]]
  assert manifest["tokens"] == manifest["trained"] == sum(SIZES)


def test_records_of_several_shards_in_any_order(tmp_path):
  parts = [token_lists(300, seed=0), token_lists(300, seed=1)]
  folders = [write(tmp_path / str(i), 300, part) for i, part in enumerate(parts)]
  order = np.array([15, 0, 8, 4, 4, 9])
  found, stream, _ = read(folders, order)
  pieces = [
    tokens[i : i + 8192] for tokens in parts[0] + parts[1] for i in range(0, len(tokens), 8192)
  ]
  np.testing.assert_array_equal(stream, np.concatenate([pieces[i] for i in order]))
  assert found.records == 16
  assert found.place(12).startswith(f"document 3 of {folders[1]}/")


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(store, "_MOST_READERS", 2)
  parts = [token_lists(300, sizes=(5, 9), seed=i) for i in range(4)]
  found, stream, _ = read([write(tmp_path / str(i), 300, part) for i, part in enumerate(parts)])
  np.testing.assert_array_equal(stream, np.concatenate([*itertools.chain(*parts)]))
  assert found._reader.cache_info().currsize == 2
  np.testing.assert_array_equal(found.read(np.array([1, 6]))[0], [*parts[0][1], *parts[3][0]])


def test_which_tokens_are_learned_is_kept_with_them(tmp_path):
  tokens = token_lists(300)
  masks = [np.random.default_rng(1).integers(0, 2, len(t)).astype(bool) for t in tokens]
  found, stream, trained = read([write(tmp_path / "a", 300, tokens, masks)])
  np.testing.assert_array_equal(stream, np.concatenate(tokens))
  np.testing.assert_array_equal(trained, np.concatenate(masks))
  np.testing.assert_array_equal(found.index["trained"], [mask.sum() for mask in masks])


def test_what_fails_leaves_nothing(tmp_path):
  def fill(shard):
    shard.add(np.arange(5), 5, 0)
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    shard_writer.write_shard(epath.Path(tmp_path / "a"), 256, {}, fill)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 20_000])
def test_a_full_disk_leaves_nothing(tmp_path, size):
  with full_disk(size), pytest.raises(OSError, match=r"File too large|cannot be written"):
    write(tmp_path / "a", 2**17, token_lists(2**17))
  assert list(tmp_path.iterdir()) == []


def test_the_shard_of_another_process_is_left_and_what_is_none_is_replaced(tmp_path):
  folder = write(tmp_path / "a", 256, token_lists(256))
  written = (folder / store.MANIFEST).read_text()
  write(tmp_path / "a", 256, token_lists(256, seed=5))
  assert (folder / store.MANIFEST).read_text() == written
  (folder / store.MANIFEST).unlink()
  write(tmp_path / "a", 256, token_lists(256, seed=5))
  assert store.Shard.open(folder).manifest["digest"] not in written
  assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_torn_shard_is_named(tmp_path):
  folder = write(tmp_path / "a", 256, token_lists(256))
  for name in (store.TOKENS, store.INDEX):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"shard .*/a is torn: {name} has {len(content) - 1} by"):
      store.Shard.open(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"shard .*/a is torn: {name} has 0 bytes, and .* delete"):
      store.Shard.open(folder)
    (folder / name).write_bytes(content)
  store.Shard.open(folder)


@pytest.mark.parametrize(
  "change",
  [
    {"format": 9},
    {"records": -1},
    {"width": 3},
    {"sizes": []},
    {"digest": None},
  ],
  ids=str,
)
def test_a_malformed_manifest_is_named(tmp_path, change):
  folder = write(tmp_path / "a", 256, token_lists(256))
  manifest = json.loads((folder / store.MANIFEST).read_text()) | change
  manifest = {key: value for key, value in manifest.items() if value is not None}
  (folder / store.MANIFEST).write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match=r"a/shard.json cannot be read .* delete .*/a and run again"):
    store.Shard.open(folder)


def test_a_changed_index_is_named(tmp_path):
  folder = write(tmp_path / "a", 256, token_lists(256))
  content = bytearray((folder / store.INDEX).read_bytes())
  content[-3] ^= 1
  (folder / store.INDEX).write_bytes(bytes(content))
  with pytest.raises(ValueError, match=r"a/documents.npy cannot be read \(its digest"):
    read([folder])


def test_a_manifest_of_other_records_is_named(tmp_path):
  folder = write(tmp_path / "a", 256, token_lists(256))
  manifest = json.loads((folder / store.MANIFEST).read_text())
  (folder / store.MANIFEST).write_text(json.dumps(manifest | {"records": 7}))
  with pytest.raises(ValueError, match=r"documents.npy .* do not have 7 records\); delete"):
    read([folder])


def test_a_record_of_another_length_is_bad(tmp_path):
  folder = write(tmp_path / "a", 256, token_lists(256, sizes=(3, 1, 9)))
  other = write(tmp_path / "b", 256, token_lists(256, sizes=(1, 3, 9)))
  (folder / store.TOKENS).write_bytes((other / store.TOKENS).read_bytes())
  with pytest.raises(store.RecordError) as error:
    read([folder])
  assert error.value.records == {0: "it has 1 bytes, not 3", 1: "it has 3 bytes, not 1"}


def test_a_flipped_bit_costs_its_record_alone(tmp_path):
  tokens = token_lists(256)
  folder = write(tmp_path / "a", 256, tokens)
  content = bytearray((folder / store.TOKENS).read_bytes())
  content[content.index(tokens[3][8192:8292].astype("u1").tobytes()) + 7] ^= 4
  (folder / store.TOKENS).write_bytes(bytes(content))
  found = store.Documents([store.Shard.open(folder)])
  with pytest.raises(store.RecordError) as error:
    found.read(np.array([2, 4, 0]))
  assert [*error.value.records] == [4]
  assert found.unreadable(np.arange(found.records)).keys() == {4}
  assert found.place(4) == f"document 3 of {folder}/{store.TOKENS}"
  others = np.array([0, 1, 2, 3, 5, 6, 7])
  assert len(found.read(others)[0]) == sum(SIZES) - 8192


def test_a_shard_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
  syncs = Syncs(monkeypatch)
  folder = write(tmp_path / "a", 256, token_lists(256))
  assert syncs.unsynced_at(folder) == []
  assert syncs.events[-1] == ("sync", tmp_path)
