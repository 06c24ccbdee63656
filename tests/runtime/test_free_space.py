"""Whether a folder can be written and has space, asked before anything is created."""

import shutil

import pytest

from runtime import exit_codes, files


def test_a_folder_that_is_not_there_is_looked_at_through_the_one_above(tmp_path):
  files.require_space(tmp_path / "a" / "b", 1, "a thing", "fix it")
  assert list(tmp_path.iterdir()) == []


def test_too_little_space_a_file_and_no_rights(tmp_path, monkeypatch):
  disk = shutil.disk_usage(tmp_path)
  with pytest.raises(OSError, match=r" has \S+ \S+ free, and a thing needs .*; free some") as full:
    files.require_space(tmp_path / "a", disk.total, "a thing", "fix it")
  assert exit_codes.retryable(full.value)
  with pytest.raises(ValueError, match=r"the disk of .* has .* in all, .* needs 1\.0 EiB; fix"):
    files.require_space(tmp_path / "a", 2**60, "a thing", "fix it")
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError, match=r"file is a file, not a folder; fix it"):
    files.require_space(tmp_path / "file" / "a", 1, "a thing", "fix it")
  monkeypatch.setattr(files.os, "access", lambda path, mode: False)
  with pytest.raises(PermissionError, match=r"cannot be written; fix it"):
    files.require_space(tmp_path / "a", 1, "a thing", "fix it")


def test_a_bucket_has_neither_rights_nor_a_size():
  files.require_space("gs://bucket/a", 2**60, "a thing", "fix it")
