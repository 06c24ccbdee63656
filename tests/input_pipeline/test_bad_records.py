"""Records that cannot be read: which they are, the same on all processes, and how many may be."""

import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest

from input_pipeline import bad_records, prepare, row_store
from tests.input_pipeline.damage import (
  BAD,
  BAD_IMAGES,
  ROWS,
  damage,
  damage_more,
  is_without,
  opened,
)


def _refusal(data, sharing=None):
  with pytest.raises(ValueError) as error:  # noqa: PT011 (the caller reads the message)
    opened(data, sharing)
  return str(error.value)


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

    return work(index, bad_records.Sharing(index, count, gather))

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


def test_bad_rows_of_images_get_weight_0_and_all_others_stay(images):
  data = images(50)
  whole = damage(data, BAD_IMAGES)
  is_without(opened(data), BAD_IMAGES, whole)


@pytest.mark.parametrize("count", [2, 3, 70])
def test_every_process_knows_the_same_ones(text, monkeypatch, count):
  data = text(5)
  whole = damage(data, BAD)
  looked_at, look = [], row_store.Records.unreadable

  def looking(self, numbers):
    looked_at.append(list(numbers))
    return look(self, numbers)

  monkeypatch.setattr(row_store.Records, "unreadable", looking)
  all_opened = _together(count, lambda index, sharing: opened(data, sharing))
  for source in all_opened:
    is_without(source, BAD, whole)
    assert source.bad == all_opened[0].bad
  assert sorted(itertools.chain(*looked_at)) == list(range(ROWS)), "each row is looked at once"


def test_all_rows_are_read_once_and_not_again(text, monkeypatch):
  damage(text(5), BAD)
  first = opened(text(5)).bad
  monkeypatch.setattr(row_store.Records, "unreadable", None)
  assert opened(text(6)).bad == first
  assert _together(2, lambda index, sharing: opened(text(5), sharing).bad) == [first] * 2
  assert "5 of 67 rows cannot be read, more than data.max_bad_records=4" in _refusal(text(4))
  monkeypatch.undo()
  damage_more(text(9), 40)
  assert opened(text(9)).bad.rows == tuple(sorted((*BAD, 40)))


def test_a_list_that_a_kill_has_torn_is_made_again(text):
  damage(text(5), BAD)
  first = opened(text(5)).bad
  kept = pathlib.Path(prepare.prepare(text(5), "train").folder) / bad_records.FILE
  content = kept.read_text()
  known = json.loads(content)
  malformed = ({"rows": "abc"}, {"rows": [-1]}, {"rows": [67]}, {"suspects": [1.5]}, {"why": 1})
  for torn in (
    *("", content[:30], "[]", '{"stamp": 0}', "\0" * 99, "[" * 100_000),
    *(json.dumps({**known, **values}) for values in malformed),
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
  folder = pathlib.Path(prepare.prepare(text(5), "train").folder)
  assert sorted(path.name for path in folder.iterdir()) == ["rows.array_record", "store.json"]


def test_a_row_that_goes_bad_after_the_check_stops_the_run_and_is_known_to_the_next(text):
  data = text(6)
  whole = damage(data, BAD)
  source = opened(data)
  damage_more(data, 40, silently=True)
  with pytest.raises(row_store.UnreadableError) as error:
    source.read(np.array([39, 40, 41, 7]))
  assert "noise:1.2.0 train: row 40 of " in str(error.value)
  assert "could be when all rows were checked; the same command checks" in str(error.value)
  bad = tuple(sorted((*BAD, 40)))
  # The first process has half of the rows, without 40, and its own copy of the data.
  for again in _together(2, lambda index, sharing: opened(data, sharing)):
    is_without(again, bad, whole)
  kept = json.loads((prepare.prepare(data, "train").folder / bad_records.FILE).read_text())
  assert (kept["suspects"], kept["rows"]) == ([], list(bad))


def test_where_each_process_has_a_copy_the_bad_rows_of_both_count(text, config, tmp_path):
  shutil.copytree(text(0).data_dir, tmp_path / "copy")
  copy = config("noise", data_dir=str(tmp_path / "copy"), max_bad_records=6)
  mine, others = text(6), copy
  whole = damage(mine, (3, 60))
  damage(others, (5, 61))
  # Each looks at its own half of its own copy, and meets the other half in a step.
  all_opened = _together(2, lambda index, sharing: opened((mine, others)[index], sharing))
  assert [source.bad.rows for source in all_opened] == [(3, 61)] * 2
  with pytest.raises(row_store.UnreadableError, match=r"row 60 of "):
    all_opened[0].read(np.arange(ROWS))
  with pytest.raises(row_store.UnreadableError, match=r"row 5 of "):
    all_opened[1].read(np.arange(ROWS))
  for source in _together(2, lambda index, sharing: opened((mine, others)[index], sharing)):
    is_without(source, (3, 5, 60, 61), whole)


# ------------------------------ how many may be ------------------------------


def test_more_than_the_limit_are_refused_with_their_number(text):
  damage(text(4), BAD)
  message = _refusal(text(4))
  assert (
    "noise:1.2.0 train: 5 of 67 rows cannot be read, more than data.max_bad_records=4" in message
  )
  assert "set data.max_bad_records=5 to continue without them" in message
  assert _together(3, lambda index, sharing: _refusal(text(4), sharing)) == [message] * 3
  assert len(opened(text(5)).bad) == 5


def test_a_split_without_a_row_that_can_be_read_is_refused(text):
  damage(text(ROWS), range(ROWS))
  assert "none of the 67 rows of" in _refusal(text(ROWS))


def test_without_the_key_the_read_refuses_by_name(text):
  damage(text(0), BAD)
  source = opened(text(0))
  assert not source.bad
  with pytest.raises(row_store.UnreadableError) as error:
    source.read(np.array([3, 8, 0, 9]))
  message = str(error.value)
  assert "noise:1.2.0 train: row 0 of " in message
  assert "rows.array_record cannot be read (Corrupted Riegeli/records file: " in message
  assert ", and 1 more of this batch; delete " in message
  assert message.endswith(
    " and run again to prepare it from scratch, or set data.max_bad_records to continue without it"
  )


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_row_of_another_length_is_bad(text, images, monkeypatch, kind):
  data = {"text": text, "images": images}[kind](1)
  write, rows = prepare._RowWriter.write, []

  def longer(self, row):
    rows.append(row)
    write(self, row + b"x" if len(rows) == 5 else row)

  monkeypatch.setattr(prepare._RowWriter, "write", longer)
  shutil.rmtree(pathlib.Path(data.data_dir) / "prepared")
  assert opened(data).bad.rows == (4,)
  assert "bytes, which no row here has" in opened(data).bad.why
