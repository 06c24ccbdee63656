"""How often a start reads what a checkpoint holds."""

import collections
import json

import pytest
from etils import epath
from ml_collections import ConfigDict

from checkpointing import checksums, integrity
from runtime import files
from tests.training import runs
from training import restore


def reads(monkeypatch, folder):
  """Returns path below a folder -> how often it is read from here on."""
  counts, read_blocks = collections.Counter(), files.read_blocks

  def counting(path, **more):
    if epath.Path(path).is_relative_to(folder):
      counts[str(epath.Path(path).relative_to(folder))] += 1
    return read_blocks(path, **more)

  monkeypatch.setattr(files, "read_blocks", counting)
  monkeypatch.setattr(checksums, "begins", lambda path: True)  # reads a few bytes of each step
  return counts


def test_a_start_reads_each_small_file_of_the_newest_step_once(tmp_path, monkeypatch):
  keys = {"training.steps": 2, "checkpoint.every_steps": 1}
  runs.train(tmp_path, rows := runs.source(), prepared=runs.job(**keys))
  prepared, folder = runs.job(**{**keys, "training.steps": 3}), epath.Path(tmp_path)
  step = folder / "checkpoints" / "2"
  sizes = checksums.sizes(step)

  counts = reads(monkeypatch, step)
  record, newest = restore.check_resume(prepared, rows, folder)
  start = restore.begin(prepared, folder, record, newest=newest)

  assert (start.step, start.known["data"]["name"]) == (2, "rows")
  small = [name for name in sizes if sizes[name] <= integrity.SMALL_BYTES]
  assert {"config/metadata", "record/metadata", "commit_success.txt"} <= {*small}
  assert counts == dict.fromkeys((*small, checksums.FILE), 1)


def test_stages_may_change_only_where_no_step_has_been():
  def check(old, new, done):
    config = ConfigDict({"data": {"stages": new}})
    restore._require_same_stages({"data": {"stages": json.loads(json.dumps(old))}}, config, done)

  first, later = (10, {"web": 1.0}), (20, {"code": 1.0})
  check((first, later), (first, later), 30)
  check((first,), (first, later), 19)
  check((first, later), (first,), 19)
  check((), (first,), 9)
  with pytest.raises(ValueError, match=r"data\.stages: up to step 20, which is done, they were"):
    check((first, later), (first,), 20)
  with pytest.raises(ValueError, match="change stages that begin after step 12"):
    check((first,), ((10, {"web": 2.0}),), 12)
