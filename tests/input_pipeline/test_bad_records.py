"""Records that cannot be read: which they are, the same on all processes, and how many may be."""

import concurrent.futures
import itertools
import json
import os
import re
import shutil
import threading

import numpy as np
import pytest

from input_pipeline import bad_records, store
from input_pipeline.source import UnreadableError
from tests.input_pipeline.damage import (
  BAD,
  BAD_IMAGES,
  ROWS,
  damage,
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
  looked_at, look = [], store.Documents.unreadable

  def looking(self, numbers):
    looked_at.append(numbers.tolist())
    return look(self, numbers)

  monkeypatch.setattr(store.Documents, "unreadable", looking)
  all_opened = _together(count, lambda index, sharing: opened(data, sharing))
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
  malformed = ({"records": "abc"}, {"records": [-1]}, {"records": [67]}, {"suspects": [1.5]})
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
  assert (kept["suspects"], len(kept["records"])) == ([], len(bad))


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
