"""The application on checkpoints that are damaged, and on a disk that is full."""

import shutil

import pytest

from tests.processes.command_lines import MLP

TRAIN = [*MLP, "--config.checkpoint.every_steps=2", "--config.checkpoint.keep=9"]
OLDER, NEWER = 4, 6


@pytest.fixture(scope="module")
def saved(main, tmp_path_factory):
  """Returns the workdir of a run with the steps 2, 4 and 6."""
  workdir = tmp_path_factory.mktemp("saved") / "run"
  code, _, err = main(*TRAIN, f"--config.training.steps={NEWER}", f"--workdir={workdir}")
  assert code == 0, err
  return workdir


@pytest.fixture
def damaged(saved, tmp_path):
  """Returns a copy of it in whose newest step a bit of the arrays is flipped, and the file."""
  workdir = shutil.copytree(saved, tmp_path / "run")
  step = workdir / "checkpoints" / str(NEWER)
  path = max((step / "state").glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  return workdir, str(path.relative_to(step))


def test_a_run_resumes_from_the_newest_intact_step_and_says_so(damaged, main):
  workdir, file = damaged
  code, out, err = main(*TRAIN, "--config.training.steps=8", f"--workdir={workdir}")
  assert code == 0, err
  checkpoints = workdir / "checkpoints"
  [line] = [line for line in err.splitlines() if line.startswith("WARNING")]
  assert line.startswith(
    f"WARNING: the checkpoint {checkpoints / str(NEWER)} cannot be read ({file}: its bytes have"
  )
  assert line.endswith(f"it is renamed to end with .broken, and step {OLDER} is used instead")
  assert f"resumes from the checkpoint of step {OLDER}" in out
  names = {path.name for path in checkpoints.iterdir()}
  assert names == {"2", "4", "6", "8", "6.broken"}


def test_evaluating_passes_over_it_too_and_changes_nothing(damaged, main):
  workdir, file = damaged
  evaluate = ["evaluate", *MLP, f"--workdir={workdir}"]
  code, out, err = main(*evaluate)
  assert code == 0, err
  assert f"cannot be read ({file}: its bytes" in err
  assert f"nothing is changed, and step {OLDER} is used instead" in err
  assert f"evaluation after step {OLDER}" in out
  code, _, err = main(*evaluate, f"--checkpoint={workdir / 'checkpoints' / str(NEWER)}")
  assert code == 2
  assert f"refused: {workdir / 'checkpoints'}: nothing to restore from:" in err
  assert f"step {NEWER} cannot be read: {file}: its bytes" in err


def test_a_start_that_is_refused_removes_and_renames_nothing(saved, main, tmp_path):
  # Without checksums, what is missing shows only when the arrays are read: the last check of all.
  workdir = shutil.copytree(saved, tmp_path / "run")
  for path in workdir.glob("checkpoints/*/state/_METADATA"):
    path.unlink()
  (workdir / "checkpoints" / "9.saving-1" / "state").mkdir(parents=True)  # left by a kill
  before = everything(workdir)
  train = [*TRAIN, "--config.training.steps=8", "--config.checkpoint.verify=off"]
  code, _, err = main(*train, f"--workdir={workdir}")
  assert code == 2
  assert "nothing to restore from" in err
  assert everything(workdir) == before


def everything(folder):
  """Returns the bytes of every file, by path; None for a folder."""
  return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}
