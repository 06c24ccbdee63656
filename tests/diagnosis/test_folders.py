"""Folders: used as a run would, and left as they were."""

import os
import pathlib
import re

import pytest
from etils import epath

from diagnosis import folders
from diagnosis.finding import OK, WARNING, WRONG


def check(folder, needed=1):
  return list(folders.check(epath.Path(folder), "workdir", needed))


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
  [one] = check(tmp_path / "runs" / "first")
  assert (one.status, one.what) == (
    OK,
    f"workdir {tmp_path}/runs/first: written, read, renamed, deleted",
  )
  assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_and_a_folder_that_takes_no_files(tmp_path):
  (tmp_path / "file").write_text("")
  [one] = check(tmp_path / "file" / "run")
  assert (one.status, one.what) == (
    WRONG,
    f"workdir {tmp_path}/file/run: {tmp_path}/file is a file, not a folder",
  )
  [one] = check("/proc/nothing")
  assert one.status == WRONG
  assert "workdir /proc/nothing: cannot be used (" in one.what
  assert one.fix


def test_a_disk_without_space(tmp_path):
  one, _ = check(tmp_path, needed=2**60)
  assert one.status == WRONG
  assert "1.0 EiB should be" in one.what


@pytest.mark.parametrize(("ahead", "status"), [(-20, WARNING), (3600, WRONG), (2, OK)])
def test_another_clock(tmp_path, monkeypatch, ahead, status):
  write = epath.Path(tmp_path / "file").__class__.write_bytes

  def later(path, content):
    write(path, content)
    now = pathlib.Path(path).stat().st_mtime
    os.utime(path, (now + ahead, now + ahead))

  monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", later)
  *_, last = check(tmp_path)
  assert last.status == status
  if status != OK:
    side = "ahead of" if ahead > 0 else "behind"
    found = re.search(rf"its clock is (\d+) s {side} this one", last.what)
    assert abs(int(found[1]) - abs(ahead)) <= 5  # that the check itself may take


@pytest.mark.parametrize("broken", ["content", "rename"])
def test_a_file_system_that_loses_data(tmp_path, monkeypatch, broken):
  kind = type(epath.Path(tmp_path))
  if broken == "content":
    monkeypatch.setattr(kind, "read_bytes", lambda path: b"another")
  else:
    monkeypatch.setattr(kind, "rename", lambda path, target: target.write_bytes(b""))
  [one] = check(tmp_path)
  assert one.status == WRONG
  assert ("another content" if broken == "content" else "is still there") in one.what
  assert list(tmp_path.iterdir()) == []


def test_a_bucket_without_its_library():
  [one] = check("gs://bucket/run")
  assert one.status == WRONG
  assert "gcsfs" in one.what
  assert one.fix.startswith("make buckets (or pip install -r requirements/buckets.txt)")
