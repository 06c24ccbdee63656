"""Entries of the compilation cache that a kill has cut short are replaced, and said once."""

import json
import os
import pathlib
import time
import warnings
import zlib

import jax
import pytest

from runtime import compilation_cache, files
from runtime.compilation_cache import zstd

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "runtime" / "damaging_the_cache.py"


@pytest.fixture(scope="module")
def start(forks, tmp_path_factory):
  """Returns a function that starts the script, in a process that has no cache yet."""

  def run(folder, *flags):
    said = tmp_path_factory.mktemp("said")
    out, err = said / "out", said / "err"
    return forks.start([SCRIPT, folder, *flags], out=out, err=err), out, err

  return run


def ended(started):
  """Returns what the script has printed: its report, and its standard error."""
  process, out, err = started
  assert process.wait(120) == 0, err.read_text()
  return json.loads(out.read_text()), err.read_text()


def test_damaged_entries_are_replaced_and_one_line_says_so(start, tmp_path):
  report, _ = ended(start(tmp_path / "compilation"))
  found = report["cut in half"]
  assert found["replaced"] == [True, True]
  [line] = found["said"].splitlines()
  assert line.startswith("WARNING: removed 2 entries of the compilation cache /")
  assert line.endswith("cut short: jit_function, jit_other; compiling again")
  assert found["again"] == ""
  assert report["none"] == {"said": "", "replaced": [False, False], "again": ""}


@pytest.mark.parametrize("compress", [zlib.compress, *([zstd.compress] if zstd else [])])
def test_any_damage_of_an_entry_is_found(compress, tmp_path):
  whole, path = compress(bytes(range(256)) * 9), tmp_path / "entry"
  flipped = whole[:99] + bytes([whole[99] ^ 16]) + whole[100:]
  for content in (whole[:-1], whole[:50], b"", bytes(i * 31 % 256 for i in range(99)), flipped):
    path.write_bytes(content)
    assert compilation_cache._torn(path) == content
  path.write_bytes(whole)
  assert compilation_cache._torn(path) is None


def test_several_processes_repair_one_cache_at_once(start, tmp_path):
  ended(start(tmp_path, "--once"))
  entries = sorted(tmp_path.glob("jit_*-cache"))
  assert len(entries) >= 2
  for entry in entries:
    entry.write_bytes(entry.read_bytes()[:-40])
  errors = [ended(process)[1] for process in [start(tmp_path, "--once") for _ in range(2)]]
  assert sum(err.count("jit_function") for err in errors) >= 1
  assert "Error reading" not in "".join(errors)
  for entry in entries:
    zlib.decompress(entry.read_bytes())
  _, err = ended(start(tmp_path, "--once"))
  assert err == ""


def test_only_entries_written_since_the_last_start_are_read(tmp_path, monkeypatch, capsys):
  def read():
    """Returns the entries that a start reads."""
    found, read_bytes = [], files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda p, **_: found.append(p.name) or p.read_bytes())
    hook = warnings.showwarning
    compilation_cache.use(str(tmp_path))
    assert warnings.showwarning is hook
    monkeypatch.setattr(files, "read_bytes", read_bytes)
    return sorted(found)

  for name in ("a-1-cache", "b-2-cache"):
    (tmp_path / name).write_bytes(zlib.compress(b"program"))
  monkeypatch.setattr(jax.config, "update", lambda *_: None)
  monkeypatch.setattr(compilation_cache, "_SETTLED_SECONDS", 0)
  assert read() == ["a-1-cache", "b-2-cache"]
  hour_ago = time.time() - 3600
  os.utime(tmp_path / "a-1-cache", (hour_ago, hour_ago))
  (tmp_path / "c-3-cache").write_bytes(zlib.compress(b"program")[:-1])
  assert {*read()} == {"b-2-cache", "c-3-cache"}
  assert sorted(path.name for path in tmp_path.iterdir()) == [".checked", "a-1-cache", "b-2-cache"]
  assert capsys.readouterr().err.startswith("WARNING: removed 1 entry of the compilation cache")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
  (tmp_path / "cache").write_text("not a folder\n")
  with pytest.raises(ValueError, match=r"compilation_cache_dir=.*/cache: it is not a folder; name"):
    compilation_cache.use(str(tmp_path / "cache"))
