"""Torn checkpoints and processes killed while they save."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.rows_saves import STAGES
from tests.training.checkpointing import damage
from tests.training.checkpointing.states import (
  assert_bit_equal,
  contents,
  counting_target,
  counting_tree,
  save_counting,
)
from training.checkpointing.checkpointer import Checkpointer

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Returns a folder with the steps 10, 20 and 30."""
  folder = tmp_path_factory.mktemp("whole") / "checkpoints"
  with Checkpointer(folder, keep=3) as checkpointer:
    save_counting(checkpointer, 10, 20, 30)
  return folder


@pytest.fixture
def copy(whole, tmp_path):
  """Returns a copy of that folder, to be broken."""
  return shutil.copytree(whole, tmp_path / "checkpoints")


def test_the_classes_of_files_are_all_there_are(whole):
  files = {path for path in (whole / "30").rglob("*") if path.is_file()}
  known = {path for name in damage.CLASSES for path in damage.files(whole / "30", name)}
  assert files == known


# Of all files: test_integrity.py.
@pytest.mark.parametrize(
  ("name", "how"),
  [("config/metadata", damage.delete), ("digests", damage.cut), ("state/d/*", damage.flip)],
)
def test_a_damaged_file_is_noticed_and_the_older_step_is_used(name, how, copy, capfd):
  done = damage.harm(copy / "30", name, how, random.Random())
  with Checkpointer(copy, keep=2) as checkpointer:
    step, tree = checkpointer.restore(counting_target())
    assert step == 20, done
    assert_bit_equal(tree, counting_tree(step))
    warning = f"WARNING: the checkpoint {copy / '30'} cannot be read ({done.partition(':')[0]}: "
    assert warning in capfd.readouterr().err, done
    assert checkpointer.steps() == [10, 20]
    assert (copy / "30.broken").is_dir()
    save_counting(checkpointer, 25)  # older than the broken one
    assert_bit_equal(checkpointer.restore(counting_target())[1], counting_tree(25))


def test_several_broken_steps_are_all_named_and_passed_over(copy):
  (copy / "30" / "state" / "_METADATA").unlink()
  shutil.rmtree(copy / "20")
  for item in ("config", "record", "state"):  # what a copy that broke off may leave
    (copy / "20" / item).mkdir(parents=True)
  said = []
  with Checkpointer(copy, warn=said.append) as checkpointer:
    step, tree = checkpointer.restore(counting_target())
    assert step == 10
    assert_bit_equal(tree, counting_tree(10))
    save_counting(checkpointer, 11)
  assert len(said) == 2
  assert "/30 cannot be read (state/_METADATA: missing)" in said[0]
  assert "/20 cannot be read (digests: missing, so the other files cannot be verified" in said[1]
  assert all("it is renamed to end with .broken, and step 10 is used instead" in s for s in said)


def test_a_folder_renamed_to_another_step_is_broken(copy):
  (copy / "30").rename(copy / "31")
  said = []
  with Checkpointer(copy, warn=said.append) as checkpointer:
    assert checkpointer.restore(counting_target())[0] == 20
  assert "/31 cannot be read (it contains step 30)" in said[0]


def test_where_all_are_broken_each_is_named_and_nothing_is_changed(copy):
  for step in (10, 20, 30):
    (copy / str(step) / "config" / "metadata").write_text("{")
  before = contents(copy)
  with (
    Checkpointer(copy) as checkpointer,
    pytest.raises(ValueError, match="nothing to restore from") as refusal,
  ):
    checkpointer.restore(counting_target())
  lines = str(refusal.value).splitlines()
  assert [line.partition("metadata: ")[0] for line in lines[1:4]] == [
    f"  step {s} cannot be read: config/" for s in (30, 20, 10)
  ]
  assert lines[4].startswith("restore the files from a copy, or start a new run")
  assert contents(copy) == before


def test_a_broken_step_that_is_asked_for_by_name_is_refused(copy):
  (copy / "20" / "commit_success.txt").unlink()
  with (
    Checkpointer(copy) as checkpointer,
    pytest.raises(ValueError, match=r"step 20 cannot be read: [^$]* also the steps 10, 30"),
  ):
    checkpointer.restore(counting_target(), step=20)
  assert checkpointer.steps() == [10, 20, 30]


# ------------------------------ killed while saving ------------------------------


@pytest.fixture(scope="module")
def server():
  """Returns a process that starts forks which save without end."""
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(pathlib.Path(__file__).with_name("saving_server.py"))]
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
  ) as process:
    yield process
    process.stdin.close()


def start(server, folder, saves):
  """Lets a fork save in a folder; returns its process id after some saves have begun."""
  print(folder, file=server.stdin, flush=True)
  # What the fork before wrote until it died is still in the pipe.
  while (line := server.stdout.readline()) == "saving\n":
    pass
  for _ in range(saves):
    assert server.stdout.readline() == "saving\n"
  return int(line)


# The others by `make test-faults`, of whole runs.
@pytest.mark.parametrize("stage", ["data", "digest file", "garbage collection"])
def test_a_kill_at_a_stage_of_a_save_leaves_the_step_before_or_this_one(stage, server, tmp_path):
  for _ in range(20):
    pid = start(server, tmp_path, saves=3)
    step = max(int(name) for name in os.listdir(tmp_path) if name.isdecimal()) + 1
    until = time.monotonic() + 60
    # Of a short stage the next save is as good: the fork saves without end, and removes old steps.
    while not STAGES[stage](tmp_path, step) and time.monotonic() < until:
      newest = max(int(name) for name in os.listdir(tmp_path) if name.isdecimal())
      step = max(step, newest + 1)
    os.kill(pid, signal.SIGKILL)
    left = os.listdir(tmp_path)
    said = []
    with Checkpointer(tmp_path, keep=2, warn=said.append) as checkpointer:
      found, tree = checkpointer.restore(counting_target())
      assert_bit_equal(tree, counting_tree(found))
    assert not said, said
    assert found >= step - 1
    assert all(name.isdecimal() for name in os.listdir(tmp_path))
    if AFTERWARDS[stage](left):
      return
  raise AssertionError(f"20 kills came after the stage: {left}")


# What a kill at a stage leaves, if it comes in time.
AFTERWARDS = {
  "data": lambda left: any(name.endswith("-tmp") for name in left),
  "digest file": lambda left: any(".saving" in name for name in left),
  "garbage collection": lambda left: any(name.endswith(".removing") for name in left),
}
