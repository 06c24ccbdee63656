"""Entries of the compilation cache that a kill has cut short are replaced, and said once."""

import json
import os
import pathlib
import subprocess
import sys
import zlib

import pytest

from runtime import compilation_cache

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "runtime" / "damaging_the_cache.py"


def start(folder, *flags):
  """Starts the script, in a process that knows nothing of this one's cache."""
  return subprocess.Popen(
    [sys.executable, SCRIPT, str(folder), *flags],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def ended(process):
  """Returns what the script has printed: its report, and its standard error."""
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  return json.loads(out), err


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  found, _ = ended(start(tmp_path_factory.mktemp("cache") / "compilation"))
  return found


@pytest.mark.parametrize(
  "damage", ["cut in half", "a byte short", "empty", "garbage", "a bit flipped"]
)
def test_a_damaged_entry_is_replaced_and_one_line_says_so(report, damage):
  found = report[damage]
  assert found["replaced"] == [True, True]
  [line] = found["said"].splitlines()
  assert line.startswith("WARNING: removed 2 entries of the compilation cache /")
  assert line.endswith("cut short: jit_function, jit_other; compiling again")
  assert found["again"] == ""


def test_whole_entries_are_used_and_stay(report):
  assert report["none"] == {"said": "", "replaced": [False, False], "again": ""}


def test_several_processes_repair_one_cache_at_once(tmp_path):
  ended(start(tmp_path, "--once"))
  entries = sorted(tmp_path.glob("jit_*-cache"))
  assert len(entries) >= 2
  for entry in entries:
    entry.write_bytes(entry.read_bytes()[:-40])
  errors = [ended(process)[1] for process in [start(tmp_path, "--once") for _ in range(3)]]
  assert sum(err.count("jit_function") for err in errors) >= 1
  assert "Error reading" not in "".join(errors)
  for entry in entries:
    zlib.decompress(entry.read_bytes())
  _, err = ended(start(tmp_path, "--once"))
  assert err == ""


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
  (tmp_path / "cache").write_text("not a folder\n")
  with pytest.raises(ValueError, match=r"compilation_cache_dir=.*/cache: it is no folder; name"):
    compilation_cache.use(str(tmp_path / "cache"))
