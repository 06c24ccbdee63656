"""A process that differs is named before the first collective, with the key and both values."""

import pathlib

import pytest

from tests.processes import differences
from tests.processes.command_lines import MLP, everything
from tests.processes.starting import ROOT


def test_is_refused_by_all(start, tmp_path):
  """Of one kind; `python -m tests.faults --row=8` tries all."""
  ended = differences.tried(start, differences.KINDS["batch shape"], tmp_path)
  # Once, and by process 0: the others would say the same.
  assert ended[0].err.startswith("refused: the processes differ"), ended
  assert ended[1].err == "", ended


@pytest.mark.long
def test_other_rows_under_the_same_name(start, well, tmp_path):
  well(2, *MLP, f"--workdir={tmp_path / 'well'}")  # the same command, and the rows to change
  differences.tried(start, differences.KINDS["rows of the data"], tmp_path)


@pytest.mark.long
def test_a_process_that_sees_another_workdir(start, tmp_path):
  # One name and two folders: each process has a root of its own for what lies below it.
  ended = start(
    2,
    *MLP,
    "--workdir=run",
    environments={index: {"TEST_FOLDER": _made(tmp_path / str(index))} for index in range(2)},
    script=ROOT / "tests" / "processes" / "elsewhere.py",
  )
  messages = ["process 1 of 2 cannot read what process 0 writes to the workdir run; name a folder"]
  differences.check(ended, messages, tmp_path / "0" / "run")
  assert everything(tmp_path) == ["0", "1"]


HELPED = """
import helper
from configs import base
from training.callbacks import CALLBACKS, Callback

CALLBACKS.register("mine", Callback(helper.EVERY_STEPS, print))


def get_config(recipe="mlp"):
  config = base.get_config(recipe, mesh={"data": 4})
  config.training.callbacks = ("mine",)
  return config
"""


def test_a_file_that_a_users_config_imports_is_named(start, tmp_path):
  folders = [tmp_path / str(index) for index in range(2)]
  for number, folder in enumerate(folders):
    folder.mkdir()
    (folder / "mine.py").write_text(HELPED)
    (folder / "helper.py").write_text(f"EVERY_STEPS = {2 + number}\n")
  keys = [*MLP[1:], f"--workdir={(workdir := tmp_path / 'run')}"]
  more = {index: [f"--config={one / 'mine.py'}", *keys] for index, one in enumerate(folders)}
  ended = start(2, more=more)
  differences.check(ended, ["refused: the processes differ", "code of helper.py: "], workdir)
  assert "code of mine.py" not in ended[0].err
  assert " code: " not in ended[0].err


def _made(folder: pathlib.Path) -> str:
  folder.mkdir()
  return str(folder)


@pytest.mark.faults
def test_a_process_that_sees_no_checkpoints(start, well, tmp_path):
  here, there = tmp_path / "1", tmp_path / "0"
  here.mkdir()
  well(2, *MLP, f"--workdir={here / 'run'}")
  there.mkdir()
  before = everything(tmp_path)
  ended = start(
    2,
    *MLP,
    "--workdir=run",
    environments={index: {"TEST_FOLDER": str(tmp_path / str(index))} for index in range(2)},
    script=ROOT / "tests" / "processes" / "elsewhere.py",
  )
  assert [process.code for process in ended] == [2, 2], ended
  assert "checkpoints: [] on process 0; [3] on process 1" in ended[0].err, ended
  assert everything(tmp_path) == before
