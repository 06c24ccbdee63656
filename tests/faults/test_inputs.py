"""The judgement of row 29 notices what it is there for."""

import json
import random

import pytest

from tests.faults import rows_inputs
from tests.faults.damages import HARMS
from tests.faults.frame import Attempt
from tests.faults.harness import Answer

MESSAGE = "refused: no config\n"


class Fake:
  """A command with one answer, which may write beside the workdir."""

  def __init__(self, code, out="", err="", writes=False):
    self.answer, self.writes = Answer(code, out, err), writes

  def run(self, *arguments):
    if self.writes:
      workdir = arguments[-1].removeprefix("--workdir=")
      with open(f"{workdir}-new", "w") as file:
        file.write("x")
    return self.answer


@pytest.mark.parametrize(
  ("commands", "noticed"),
  [
    (Fake(2, err=MESSAGE), None),
    (Fake(0, out="a table\n"), None),
    (Fake(0, writes=True), None),
    (Fake(1, err="error: x\n"), "exit code 1, not one of"),
    (Fake(-9), "exit code -9"),
    (Fake(2, err=MESSAGE + MESSAGE), "2 messages"),
    (Fake(2), "0 messages"),
    (Fake(2, err=f"Traceback (most recent call last)\n{MESSAGE}"), "a traceback"),
    (Fake(2, err="refused: \x1b[31m\n"), r"control characters \['\\x1b'\]"),
    (Fake(2, err=MESSAGE, writes=True), "refused, and the workdir has changed"),
  ],
)
def test_what_must_not_be_is_noticed(tmp_path, commands, noticed):
  chosen = rows_inputs.Case("override", ("layout",), (0, 2))
  attempt = Attempt(29, 0, tmp_path / "own")
  if noticed is None:
    rows_inputs.judge(attempt, commands, chosen, tmp_path)
  else:
    with pytest.raises(AssertionError, match=noticed):
      rows_inputs.judge(attempt, commands, chosen, tmp_path)


def test_a_seed_is_always_the_same_case():
  cases = [rows_inputs.case(seed) for seed in range(40)]
  assert [*map(str, cases)] == [str(rows_inputs.case(seed)) for seed in range(40)]
  assert len({*map(str, cases)}) >= 35
  assert {case.kind for case in cases[:4]} == {*rows_inputs.KINDS}


@pytest.mark.parametrize("harm", HARMS)
def test_every_harm_changes_a_file(tmp_path, harm):
  path = tmp_path / "file"
  path.write_text(json.dumps({"a": 1, "b": [2]}))
  before = rows_inputs.digest(tmp_path)
  HARMS[harm](path, random.Random(0))
  assert rows_inputs.digest(tmp_path) != before
