"""Records that cannot be read: which they are, how many may be, what batches and training do."""

import concurrent.futures
import itertools
import json
import os
import re
import shutil
import threading

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from input_pipeline import batches, store
from input_pipeline import tfds as datasets
from input_pipeline.catalog import Reference
from input_pipeline.source import Sharing, UnreadableError
from tests.helpers.cli import TINY_LM, lines_of
from tests.input_pipeline.damage import (
  BAD,
  BAD_IMAGES,
  IMAGES,
  LENGTH,
  ROWS,
  damage,
  damage_data_set,
  damage_more,
  is_without,
  opened,
  shard_of,
)


def _refusal(data, sharing=None):
  with pytest.raises(ValueError) as error:  # noqa: PT011 (the caller reads the message)
    opened(data, sharing)
  return str(error.value)


def kept_list(data):
  """Returns the file that has the list of unreadable records."""
  [path] = shard_of(data).parent.glob("bad_records*")
  return path


def _together(count, work):
  """Returns what each of several processes makes of it, given how they share; here as threads."""
  barrier, told = threading.Barrier(count, timeout=20), [[] for _ in range(count)]

  def one(index):
    def gather(value):
      told[index].append(json.loads(json.dumps(value)))
      barrier.wait()
      values = [values[-1] for values in told]
      barrier.wait()
      return values

    return work(index, Sharing(index, count, gather))

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    return list(pool.map(one, range(count)))


# ------------------------------ which they are ------------------------------


def test_bad_rows_of_a_text_get_weight_0_and_all_others_stay(text):
  data = text(5)
  whole = damage(data, BAD)
  source = opened(data)
  is_without(source, BAD, whole)
  assert "unreadable: 5 rows of weight 0: 0, 7, 8, 30, 66 (the first: " in str(source.bad)
  assert "hash mismatch" in source.bad.why
  assert source.fingerprint == opened(text(0)).fingerprint, "the list is no part of the data"


def test_every_process_knows_the_same_ones(text, monkeypatch):
  data = text(5)
  whole = damage(data, BAD)
  looked_at, look = [], store.Documents.unreadable

  def looking(self, numbers):
    looked_at.append(numbers.tolist())
    return look(self, numbers)

  monkeypatch.setattr(store.Documents, "unreadable", looking)
  all_opened = _together(3, lambda index, sharing: opened(data, sharing))
  for source in all_opened:
    is_without(source, BAD, whole)
    assert source.bad == all_opened[0].bad
  assert sorted(itertools.chain(*looked_at)) == list(range(ROWS)), "each row is looked at once"


def test_all_rows_are_read_once_and_not_again(text, monkeypatch):
  damage(text(5), BAD)
  first = opened(text(5)).bad
  monkeypatch.setattr(store.Documents, "unreadable", None)
  assert opened(text(6)).bad == first
  assert _together(2, lambda index, sharing: opened(text(5), sharing).bad) == [first] * 2
  assert "5 of 67 rows cannot be read, more than data.max_bad_records=4" in _refusal(text(4))
  monkeypatch.undo()
  damage_more(text(9), 40)
  assert opened(text(9)).bad.rows == tuple(sorted((*BAD, 40)))


def test_a_list_that_a_kill_has_torn_is_made_again(text):
  damage(text(5), BAD)
  first = opened(text(5)).bad
  kept = kept_list(text(5))
  content = kept.read_text()
  known = json.loads(content)
  malformed = ({"records": "abc"}, {"records": [-1]}, {"records": [67]}, {"records": [1.5]})
  for torn in (
    *("", content[:30], "[]", '{"stamp": 0}', "\0" * 99, "[" * 100_000),
    *(json.dumps({**known, **values}) for values in (*malformed, {"why": 1})),
  ):
    kept.write_text(torn)
    assert opened(text(5)).bad == first
    assert kept.read_text() == content


def test_without_the_right_to_write_every_start_reads_all_rows(text, monkeypatch):
  damage(text(5), BAD)

  def refuse(path, target):
    raise PermissionError(13, "Permission denied")

  with monkeypatch.context() as patched:
    patched.setattr(os, "replace", refuse)
    assert opened(text(5)).bad.rows == BAD
  assert not [*shard_of(text(5)).parent.glob("bad_records*")]


def test_a_row_that_goes_bad_after_the_check_stops_the_run_and_is_known_to_the_next(text):
  data = text(6)
  whole = damage(data, BAD)
  source = opened(data)
  damage_more(data, 40, silently=True)
  with pytest.raises(UnreadableError) as error:
    source.read(np.array([39, 40, 41, 7]))
  assert "noise:1.2.0 train: row 40 (document " in str(error.value)
  assert "could be when all were checked; the same command checks" in str(error.value)
  bad = tuple(sorted((*BAD, 40)))
  # The first process has half of the rows, without 40, and its own copy of the data.
  for again in _together(2, lambda index, sharing: opened(data, sharing)):
    is_without(again, bad, whole)
  kept = json.loads(kept_list(data).read_text())
  assert (bool(kept["stamp"]), len(kept["records"])) == (True, len(bad))


def test_where_each_process_has_a_copy_the_bad_rows_of_both_count(text, config, tmp_path):
  shutil.copytree(text(0).data_dir, tmp_path / "copy")
  copy = config("noise", data_dir=str(tmp_path / "copy"), max_bad_records=6, packing="none")
  mine, others = text(6), copy
  source = opened(text(0))
  documents = [int(source.origins(row)[0].split()[1]) for row in range(ROWS)]
  rows = np.argsort(documents).tolist()  # by their documents, which the processes share
  whole = damage(mine, (rows[3], rows[60]))
  damage(others, (rows[5], rows[61]))
  # Each looks at its own half of its own copy, and meets the other half in a step.
  found = tuple(sorted((rows[3], rows[61])))
  all_opened = _together(2, lambda index, sharing: opened((mine, others)[index], sharing))
  assert [source.bad.rows for source in all_opened] == [found] * 2
  for source, row in zip(all_opened, (rows[60], rows[5]), strict=True):
    with pytest.raises(UnreadableError, match=rf"train: row {row} \(document"):
      source.read(np.arange(ROWS))
  every = tuple(sorted(rows[number] for number in (3, 5, 60, 61)))
  for source in _together(2, lambda index, sharing: opened((mine, others)[index], sharing)):
    is_without(source, every, whole)


# ------------------------------ how many may be ------------------------------


def test_a_split_without_a_row_that_can_be_read_is_refusal(text):
  damage(text(ROWS), range(ROWS))
  assert "none of its 67 rows can be read" in _refusal(text(ROWS))


def test_without_the_key_the_read_refuses_by_name(text):
  damage(text(0), BAD)
  source = opened(text(0))
  assert not source.bad
  with pytest.raises(UnreadableError) as error:
    source.read(np.array([3, 8, 0, 9]))
  message = str(error.value)
  assert re.match(
    r"noise:1.2.0 train: row 0 \(document \d+ of .*/noise-\w+/tokens.array_rec", message
  )
  assert ") cannot be read (Corrupted Riegeli/records file: " in message
  assert ", and 1 more; delete " in message
  assert message.endswith(
    " and run again to prepare it from scratch, or set data.max_bad_records to continue without its"
    " rows"
  )


# ------------------------------ batches ------------------------------


def test_a_batch_of_bad_rows_alone_is_refusal(text):
  data = text(8)
  bad = (5, 6, 7, 8, 9, 10)
  damage(data, bad)
  device = SingleDeviceSharding(jax.devices()[0])
  training = batches.TrainingBatches(opened(data), global_batch_size=4, seed=0, shuffle=False)
  shardings = dict.fromkeys(training.abstract, device)
  assert np.asarray(training.batch(1, shardings)["weights"]).sum() == LENGTH  # row 4
  wrapped = batches.TrainingBatches(opened(data), global_batch_size=3, seed=0, shuffle=False)
  message = r"the batch of step 3 has no row that can be read: 6, 7, 8 \(.*data.global_batch_size=3"
  with pytest.raises(UnreadableError, match=message):
    wrapped.batch(2, shardings)


def test_an_evaluation_of_bad_rows_alone_is_refusal(text):
  data = text(4)
  drawn = batches.EvaluationBatches(opened(data), global_batch_size=2)
  bad = np.concatenate([drawn.row_ids(i) for i in range(2)])
  damage(data, bad.tolist())
  source = opened(data)
  message = r"none of the 4 rows that an evaluation of 2 batches draws can be read"
  with pytest.raises(ValueError, match=message):
    batches.EvaluationBatches(source, global_batch_size=2, steps=2)
  # A batch of bad rows is like one of padding.
  evaluation = batches.EvaluationBatches(source, global_batch_size=2, steps=3)
  shardings = dict.fromkeys(evaluation.abstract, SingleDeviceSharding(jax.devices()[0]))
  sums = [np.asarray(evaluation.batch(i, shardings)["weights"]).sum() for i in range(3)]
  assert sums == [0, 0, 2 * LENGTH]


# ------------------------------ records of the data set ------------------------------


def test_bad_images_of_the_data_set_are_left_out(images, folder):
  sound = opened(images(0))
  whole = sound.read(np.arange(IMAGES))
  pixels = np.rint(whole["inputs"] * 255).astype(np.uint8)
  damage_data_set(folder, "snow", [pixels[row].tobytes() for row in BAD_IMAGES])
  message = _refusal(images(0))
  assert "data set snow:1.2.0, split train: 1 bad record, more than data.max_bad_recor" in message
  assert "record 2: RuntimeError: Corrupted Riegeli/records file" in message
  message = _refusal(images(2))
  assert "split train: 3 bad records, more than data.max_bad_records=2; repair the data" in message
  source = opened(images(3))
  good = np.delete(np.arange(IMAGES), BAD_IMAGES)
  for field, array in source.read(np.arange(len(source))).items():
    np.testing.assert_array_equal(array, whole[field][good])
  assert source.bad.left_out == tuple(f"record {number}" for number in BAD_IMAGES)
  assert source.fingerprint != sound.fingerprint
  # Prepared once, it is refused to whoever does not allow for as many.
  assert "snow:1.2.0 train: 3 bad records, more than data.max_bad_records=2" in _refusal(images(2))
  # What goes bad later comes on top.
  damage_more(images(3), 20)
  assert "1 of 38 rows cannot be read, and 3 bad records are left out, more" in _refusal(images(3))
  assert opened(images(4)).bad.rows == (20,)


def test_a_bad_document_is_left_out(text, folder):
  builder = datasets.load_builder(Reference("noise", "", ""), folder)
  documents = [item.value["body"] for item in datasets.examples(builder, "train")]
  damage_data_set(folder, "noise", [documents[1]])
  assert "record 1: RuntimeError: " in _refusal(text(0))
  source = opened(text(1))
  rows = source.read(np.arange(len(source)))["targets"].astype(np.uint8)
  assert sorted(row.tobytes() for row in rows) == sorted(
    document + b"\0" for number, document in enumerate(documents) if number != 1
  )
  assert (source.bad.rows, source.bad.left_out, len(source.bad)) == ((), ("record 1",), 1)
  assert str(source.bad).startswith("left out: 1 record: record 1 (the first: record 1: RuntimeEr")


def test_an_image_of_another_shape_is_a_bad_record(config, tmp_path, write_tfds):
  import tensorflow_datasets as tfds

  features = {
    "image": tfds.features.Tensor(shape=(None, 2), dtype=np.uint8),
    "label": tfds.features.ClassLabel(num_classes=2),
  }
  examples = [{"image": np.full((2, 2), 10 + i, np.uint8), "label": i % 2} for i in range(9)]
  examples[4]["image"] = examples[4]["image"][:1]
  write_tfds(tmp_path, "ragged", features, {"train": examples})
  sizes = {"input_size": 4, "target_size": 2, "data_dir": str(tmp_path), "max_bad_records": 3}
  source = opened(config("ragged", "image", **sizes))
  assert (len(source), len(source.bad.left_out)) == (8, 1)
  assert "it has shape (1, 2), but the first image has (2, 2)" in source.bad.why


@pytest.mark.parametrize("torn", ["cut", "missing", "its end flipped"])
def test_a_truncated_file_is_refused_at_any_limit(images, folder, torn):
  (path,) = (folder / "snow" / "1.2.0").glob("*train.array_record*")
  content = bytearray(path.read_bytes())
  shutil.rmtree(folder / "prepared")
  if torn == "its end flipped":
    content[-65536 + 8] ^= 1  # of the block that holds the list of the records
  path.write_bytes(bytes(content[:40000] if torn == "cut" else content))
  if torn == "missing":
    path.unlink()
  message = _refusal(images(10**6))
  assert (
    f"snow:1.2.0, split train: the file {path} of 41 records cannot be read as a whole" in message
  )


# ------------------------------ a run ------------------------------


@pytest.mark.long
def test_the_application_refuses_by_name_or_continues(main, text, folder, tmp_path):
  run = [
    "--config=configs/dp4_tp2.py:model=lm,data=noise",
    *TINY_LM,
    f"--config.data.data_dir={folder}",
    "--config.data.packing=none",
    "--config.data.sequence_length=16",
    "--config.data.evaluation_split=test",
    "--config.data.global_batch_size=8",
    "--config.training.steps=6",
    "--config.checkpoint.every_steps=2",
    "--config.metrics.every_steps=1",
    "--config.metrics.tensorboard=false",
    f"--workdir={tmp_path / 'run'}",
  ]
  data = text(0)
  order = batches.TrainingBatches(opened(data), global_batch_size=8, seed=0)
  row = int(order.row_ids(4)[0])  # of the fifth step
  damage(data, [row])
  code, out, err = main(*run)
  assert (code, err.count("\n")) == (1, 1), err
  assert err.startswith(f"error: noise:1.2.0 train: row {row} (document ")
  assert "or set data.max_bad_records to continue without its rows" in err
  assert [line["step"] for line in lines_of(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4]
  code, out, err = main(*run, "--config.data.max_bad_records=1")
  assert code == 0, err
  assert "resumes from the checkpoint of step 4" in out
  assert f"noise:1.2.0 train: unreadable: 1 row of weight 0: {row} (" in out
  listed = json.loads((tmp_path / "run" / "bad_records.json").read_text())
  assert listed["train"]["rows"] == [row]
  assert listed["held out"]["rows"] == []
