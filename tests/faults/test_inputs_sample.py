"""A sample of row 29, and that its judgement notices what it is there for."""

import json

import pytest

from tests.faults import inputs, rows_inputs

MESSAGE = "refused: no config\n"


class Fake:
  """A server with one answer, which may write to the workdir."""

  def __init__(self, code, out="", err="", writes=False):
    """Takes the answer."""
    self.answer, self.writes = {"code": code, "out": out, "err": err}, writes

  def run(self, arguments, environment):
    """Returns the answer."""
    del environment
    if self.writes:
      workdir = arguments[-1].removeprefix("--workdir=")
      with open(f"{workdir}-new", "w") as file:
        file.write("x")
    return self.answer


@pytest.mark.parametrize(
  ("server", "noticed"),
  [
    (Fake(2, err=MESSAGE), ""),
    (Fake(0, out="a table\n"), ""),
    (Fake(0, writes=True), ""),
    (Fake(1, err="error: x\n"), "exit code 1, not one of (0, 2)"),
    (Fake(-9), "exit code -9"),
    (Fake(2, err=MESSAGE + MESSAGE), "2 messages"),
    (Fake(2), "0 messages"),
    (Fake(2, err=f"Traceback (most recent call last)\n{MESSAGE}"), "a traceback"),
    (Fake(2, err="refused: \x1b[31m\n"), "control characters ['\\x1b']"),
    (Fake(2, err=MESSAGE, writes=True), "refused, and the workdir has changed"),
  ],
)
def test_what_must_not_be_is_noticed(tmp_path, server, noticed):
  case = inputs.Case("override", ("layout",), (0, 2))
  (tmp_path / "whole").mkdir()
  found = rows_inputs.ended(server, case, tmp_path / "whole", tmp_path / "own")
  assert found.startswith("WRONG") == bool(noticed), found
  assert noticed in found


def test_a_seed_is_always_the_same_case():
  assert [str(inputs.case(seed)) for seed in range(40)] == [str(inputs.case(s)) for s in range(40)]
  assert len({str(inputs.case(seed)) for seed in range(40)}) >= 35
  assert {inputs.case(seed).kind for seed in range(4)} == {*inputs.KINDS}


def test_every_harm_changes_a_file(tmp_path):
  for number, (harm, does) in enumerate(inputs.HARMS):
    path = tmp_path / str(number)
    path.write_text(json.dumps({"a": 1, "b": [2]}))
    before = rows_inputs.digest(tmp_path)
    harm(path, inputs.random.Random(0))
    assert rows_inputs.digest(tmp_path) != before, does


@pytest.mark.faults
def test_a_sample_of_the_row(tmp_path):
  trials = list(rows_inputs.row_29(20, tmp_path, seed=1000))
  assert all(trial.passed for trial in trials), [t for t in trials if not t.passed]
