"""Small files: whatever stands in their place neither hangs, nor is followed, nor fills memory."""

import json
import math
import os
import pathlib
import re
import shutil
import socket
import struct
import threading

import pytest
from etils import epath

from runtime import exit_codes, files

SECONDS = 20.0  # what takes longer hangs


def in_time(function):
  """Returns what a function returns or raises; fails where it hangs."""
  found = []

  def call():
    try:
      found.append(function())
    except Exception as error:
      found.append(error)

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(SECONDS)
  assert found, "it hangs"
  return found[0]


def a_directory(path):
  """Makes a directory."""
  path.mkdir()
  return "a directory"


def a_fifo(path):
  """Makes a FIFO that nobody writes to."""
  os.mkfifo(path)
  return "a FIFO"


def a_socket(path):
  """Makes a socket."""
  with socket.socket(socket.AF_UNIX) as one:
    one.bind(str(path))
  return "a socket"


def a_device(path):
  """Makes a device that never ends, or a link to it where that is not allowed."""
  try:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
  except PermissionError:
    pytest.skip("no devices may be made here")
  return "a device"


def a_link(path):
  """Makes a link to a file elsewhere."""
  (path.parent / "elsewhere").write_text("kept")
  path.symlink_to(path.parent / "elsewhere")
  return "a symbolic link"


def a_dangling_link(path):
  """Makes a link to a file that a write would make."""
  path.symlink_to(path.parent / "made by a write")
  return "a symbolic link"


KINDS = (a_directory, a_fifo, a_socket, a_device, a_link, a_dangling_link)


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_plain_file_is_neither_read_nor_appended_to(make, tmp_path):
  path = tmp_path / "file"
  what = make(path)
  before = sorted(os.listdir(tmp_path))
  for function in (lambda: files.read_bytes(path), lambda: files.append(path, b"more\n")):
    error = in_time(function)
    assert isinstance(error, files.NotPlainError), error
    assert str(error) == f"{path}: it is {what}, not a plain file"
  assert files.kind(path) == what
  assert sorted(os.listdir(tmp_path)) == before
  if make is a_link:
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_a_link_is_read_through_where_that_is_asked_for(tmp_path):
  a_link(tmp_path / "file")
  assert files.read_text(tmp_path / "file", follow=True) == "kept"
  assert files.kind(tmp_path / "file", follow=True) == ""
  (tmp_path / "fifo").symlink_to(tmp_path / "pipe")
  a_fifo(tmp_path / "pipe")
  assert str(in_time(lambda: files.read_bytes(tmp_path / "fifo", follow=True))).endswith(
    "a FIFO, not a plain file"
  )


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path):
  path = tmp_path / "file"
  path.touch()
  os.truncate(path, 2**40)
  error = in_time(lambda: files.read_bytes(path))
  assert str(error) == f"{path}: it has {2**40:,} bytes, and at most {2**26:,} are read"
  path.write_bytes(b"12345")
  assert files.read_bytes(path, most_bytes=5) == b"12345"
  with pytest.raises(files.NotPlainError):
    files.read_bytes(path, most_bytes=4)


def test_a_missing_file_is_distinguished_from_the_others(tmp_path):
  with pytest.raises(FileNotFoundError):
    files.read_bytes(tmp_path / "file")
  assert files.kind(tmp_path / "file") == ""


@pytest.mark.parametrize("make", [a_link, a_dangling_link, a_fifo])
def test_replacing_takes_the_place_and_follows_no_link(make, tmp_path):
  make(tmp_path / "file")
  # The name that it is written under first may be taken, too.
  (tmp_path / "file.tmp").symlink_to(tmp_path / "elsewhere too")
  files.replace(tmp_path / "file", "new")
  assert (tmp_path / "file").read_text() == "new"
  assert not (tmp_path / "file").is_symlink()
  assert sorted(os.listdir(tmp_path)) == ["elsewhere", "file"][make is not a_link :]
  if make is a_link:
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_a_directory_is_not_replaced_and_nothing_is_left_over(tmp_path):
  (tmp_path / "file" / "inside").mkdir(parents=True)
  (tmp_path / "file.tmp").mkdir()
  with pytest.raises(IsADirectoryError, match=rf"'{tmp_path / 'file'}'"):
    files.replace(tmp_path / "file", "new")
  assert sorted(os.listdir(tmp_path)) == ["file", "file.tmp"]
  files.replace(tmp_path / "other", "new", shared=True)
  assert sorted(os.listdir(tmp_path)) == ["file", "file.tmp", "other"]


def test_epath_and_pathlib_are_taken_alike(tmp_path):
  for path in (epath.Path(tmp_path / "file"), pathlib.Path(tmp_path / "file"), f"{tmp_path}/file"):
    files.replace(path, "one\n")
    files.append(path, b"two\n")
    assert files.read_text(path) == "one\ntwo\n"
  assert files.is_local(tmp_path)
  assert not files.is_local("gs://bucket/file")


@pytest.mark.parametrize(
  ("scheme", "library", "fix"),
  [
    ("gs", "gcsfs", "make buckets (or pip install -r requirements/buckets.txt)"),
    ("s3", "s3fs", "pip install s3fs"),
  ],
)
def test_a_bucket_without_its_library_is_refused_with_the_command_that_installs_it(
  monkeypatch, scheme, library, fix
):
  there = []
  monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
  said = f"{scheme}://bucket/run: a bucket needs the package {library}: {fix}"
  with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
    files.require_library(f"{scheme}://bucket/run")
  there.append(library)
  files.require_library(f"{scheme}://bucket/run")
  files.require_library("runs/gs")


# ------------------------------ JSON ------------------------------


@pytest.mark.parametrize("depth", [64, 65, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_limit(depth, opens, closes):
  text = opens * depth + ("1" if opens != "[" else "") + closes * depth
  if depth > files.MOST_DEPTH:
    with pytest.raises(ValueError, match="nested deeper than 64"):
      files.parse_json(text)
  else:
    assert files.parse_json(text) == json.loads(text)


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\xff\xfe", b'{"a": ', b"1 2", b"9" * 10_000])
def test_what_is_not_json_is_one_kind_of_error(content, tmp_path):
  (tmp_path / "file").write_bytes(content)
  with pytest.raises(ValueError, match=r"Expecting|Extra data|codec|digits") as error:
    files.read_json(tmp_path / "file")
  assert not isinstance(error.value, OSError)


def test_floats_read_back_to_the_same_bits():
  values = [0.1, 1e-320, -0.0, 1.7976931348623157e308, 2 / 3, math.nan, math.inf, -math.inf]
  text = files.json_text({"values": (*values, 7, True, None, "nan")})
  found = files.parse_json(text)["values"]
  json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
  assert found[-4:] == [7, True, None, "nan"]
  pack = struct.Struct("<d").pack
  assert [pack(float(x)) for x in found[: len(values)]] == [pack(x) for x in values]


# ------------------------------ free space ------------------------------


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


def test_a_cache_keeps_its_newest_files(tmp_path):
  for number in range(9):
    path = tmp_path / f"{number}.program"
    path.touch()
    os.utime(path, (number, number))
  (tmp_path / "0.json").touch()
  files.keep_newest(tmp_path, (".program",), 9)
  assert len([*tmp_path.glob("*.program")]) == 9
  files.keep_newest(tmp_path, (".program",), 8)
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "0.json",
    *(f"{number}.program" for number in range(5, 9)),
  ]
