"""The layouts of the shipped recipes are the golden ones, line by line."""

import difflib

import pytest

from tests.golden import layouts
from tests.golden.layouts import CASES, COMMAND, FOLDER, text


def differences(case: str) -> str:
  """Returns the lines that differ from the golden file, none where none does."""
  golden = (FOLDER / f"{case}.txt").read_text().splitlines()
  lines = difflib.unified_diff(golden, text(case).splitlines(), "golden", "now", lineterm="", n=0)
  return "\n".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_the_golden_one(case):
  found = differences(case)
  assert not found, f"{case}: if this is meant, run {COMMAND}\n{found}"


def test_there_is_a_file_for_each_case_and_no_other():
  assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


def test_another_table_would_show(monkeypatch):
  table = {"partitioning.parameters.feedforward": ()}
  monkeypatch.setitem(layouts.CASES, "lm-dp4_tp2", ("lm", "dp4_tp2", table))
  found = differences("lm-dp4_tp2")
  assert "layers/mlp/down/kernel" in found
  assert "layers/attention/out/kernel" not in found
