"""Workdirs that cannot be: each is named, the exit code is 2, and nothing is changed.

Permissions do not bind root, so that a read-only workdir is a read-only disk where the tests run
as root and may mount one, and a folder without the permission where they do not.
"""

import contextlib
import os
import subprocess

import pytest

from runtime import exit_codes
from tests.helpers.cli import TINY_MLP
from tests.training.checkpointing.states import contents

SHORT = ["--config=configs/dp8.py:mlp", *TINY_MLP, "--config.training.steps=2"]


def below_a_file(folder):
  """Returns a workdir whose parent is a file."""
  (folder / "file").write_text("not a folder\n")
  return folder / "file" / "run"


def a_file_for_the_checkpoints(folder):
  """Returns a workdir whose `checkpoints` is a file."""
  (folder / "run").mkdir()
  (folder / "run" / "checkpoints").write_text("not a folder\n")
  return folder / "run"


@pytest.mark.parametrize("place", [below_a_file, a_file_for_the_checkpoints])
def test_a_workdir_that_cannot_be_made_is_refused(main, tmp_path, place):
  assert_refused(main, place(tmp_path), tmp_path)


def test_a_run_does_not_resume_in_a_read_only_workdir(main, tmp_path):
  disk = tmp_path / "disk"
  disk.mkdir()
  with read_only(disk, main, *SHORT, f"--workdir={disk}/there"):
    assert_refused(main, disk / "there", tmp_path, "--config.training.steps=4")


def test_a_disk_without_space_for_a_checkpoint_is_refused(main, tmp_path):
  with mounted(tmp_path, "-o", "size=16k"):
    text = assert_refused(main, tmp_path / "new", tmp_path)
    assert f"the disk of {tmp_path} has 16.0 KiB in all, and a checkpoint needs" in text


def test_a_run_does_not_resume_on_a_full_disk(main, tmp_path):
  with mounted(tmp_path, "-o", "size=4m"):
    code, out, err = main(*SHORT, f"--workdir={tmp_path}/there")
    assert code == 0, (out, err)
    fill(tmp_path / "other")
    # What fills the disk may be removed: the same command may succeed later.
    resumed = (tmp_path / "there", tmp_path, "--config.training.steps=4")
    text = assert_refused(main, *resumed, wanted=exit_codes.FAILED)
    assert "there/checkpoints has 0 Bytes free, and a checkpoint needs" in text


def test_a_run_whose_last_steps_cannot_be_saved_fails(main, tmp_path):
  # Each step is saved; the second has no room beside the first, which the third one learns.
  with mounted(tmp_path, "-o", "size=220k"):
    arguments = ["--config.checkpoint.every_steps=1", "--config.training.steps=3"]
    code, out, err = main(*SHORT, *arguments, f"--workdir={tmp_path}/run")
    assert code == 1, (out, err)
    assert "WARNING: saving step 2 to" in out
    assert "error: saving step 3 to" in err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]


def fill(path):
  """Writes a file until its disk is full."""
  with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
    while file.write(bytes(4096)):
      pass


def assert_refused(main, workdir, folder, *arguments, wanted=exit_codes.REFUSED):
  """Runs the main job and looks at what it says, and that nothing in `folder` has changed.

  Returns the message.
  """
  before = contents(folder)
  code, out, err = main(*SHORT, *arguments, f"--workdir={workdir}")
  assert code == wanted, (out, err)
  assert err.startswith("refused: " if wanted == exit_codes.REFUSED else "error: "), err
  assert str(workdir) in err or str(workdir.parent) in err
  assert "Traceback" not in err
  assert contents(folder) == before
  return err


@contextlib.contextmanager
def read_only(folder, main, *arguments):
  """Makes a folder read-only after a run in it."""

  def fill():
    code, out, err = main(*arguments)
    assert code == 0, (out, err)

  if os.geteuid() == 0:
    with mounted(folder):
      fill()
      subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
      yield
    return
  fill()
  everything = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
  for path in everything:
    path.chmod(0o555)
  try:
    yield
  finally:
    for path in everything:
      path.chmod(0o755)


@contextlib.contextmanager
def mounted(folder, *options):
  """Mounts an empty disk in memory there; skips the test where that is not allowed."""
  command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f"no disk may be mounted here: {done.stderr.strip()}")
  try:
    yield
  finally:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
