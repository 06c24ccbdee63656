"""docs/checkpoints.md says what is so: its snippet runs, its table is the one in the code."""

import fnmatch
import pathlib
import re
import subprocess

import numpy as np

from configs.keys import table
from configs.keys.row import ACCEPT, MAY_CHANGE, REFUSED
from tests.training.checkpointing.states import counting_tree, save_counting
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.resume_policy import classify

TEXT = (pathlib.Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()


def test_the_snippet_reads_parameters_in_five_lines(tmp_path, monkeypatch):
  [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  assert len(code.splitlines()) == 5
  [path] = re.findall(r'"(runs/[^"]*)/200/state"', code)
  with Checkpointer(tmp_path / path) as checkpointer:
    save_counting(checkpointer, 200)
  monkeypatch.chdir(tmp_path)
  found = {}
  exec(code, found)
  wanted = counting_tree(200)["params"]
  assert sorted(found["params"]) == ["params.bias", "params.up.kernel"]
  np.testing.assert_array_equal(found["params"]["params.bias"], wanted["bias"])
  np.testing.assert_array_equal(found["params"]["params.up.kernel"], wanted["up"]["kernel"])


def test_plain_tools_check_a_step_as_the_docs_say(tmp_path):
  with Checkpointer(tmp_path) as checkpointer:
    save_counting(checkpointer, 200)
  [command] = re.findall(r"^sed .*$", TEXT, re.MULTILINE)

  def check():
    step = tmp_path / "200"
    return subprocess.run(command, shell=True, cwd=step, capture_output=True, text=True)

  assert (check().returncode, check().stdout) == (0, "")
  (tmp_path / "200" / "record" / "metadata").write_text("{}")
  assert check().returncode == 1
  assert check().stdout == "record/metadata: FAILED\n"


def test_the_table_in_the_docs_says_what_the_rows_of_the_keys_say():
  found = {}  # pattern -> class
  for line in TEXT.splitlines():
    for kind in (MAY_CHANGE, ACCEPT, REFUSED):
      if f"| {kind} |" in line:
        found.update(dict.fromkeys(re.findall(r"`([\w.*]+)`", line), kind))
  for part, rows in {**table.SECTIONS, **{"model": table.MODELS["transformer"]}}.items():
    for name in rows:
      key = f"{part}.{name}" if part else name
      patterns = [one for one in found if fnmatch.fnmatchcase(key, one)]
      assert patterns, key
      assert found[max(patterns, key=len)] == classify(key), key
