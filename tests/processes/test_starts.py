"""Starts by other means: mpirun, and processes that need a data set at once that is not there."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.processes.command_lines import MLP, losses

ROOT = pathlib.Path(__file__).parent.parent.parent
INSTALL = "apt-get install openmpi-bin"
REQUIRED = "MESHWRIGHT_REQUIRE_MPI"


def mpirun() -> str:
  """Returns the path of mpirun; where it is not installed, that is a skip or a failure."""
  if found := shutil.which("mpirun"):
    return found
  if os.environ.get(REQUIRED) == "1":
    pytest.fail(f"mpirun is not installed, and {REQUIRED}=1 asks for it: {INSTALL}")
  return pytest.skip(f"mpirun is not installed: {INSTALL}")


def under_mpirun(arguments, **variables: str) -> subprocess.CompletedProcess:
  """Runs main.py as two processes under mpirun."""
  root = ["--allow-run-as-root"] if os.getuid() == 0 else []
  environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
  return subprocess.run(
    [mpirun(), *root, "--oversubscribe", "-n", "2", sys.executable, "main.py", *arguments],
    cwd=ROOT,
    env={**environment, **variables},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


@pytest.mark.long
def test_mpirun(tmp_path):
  done = under_mpirun([*MLP, f"--workdir={tmp_path}"])
  assert done.returncode == 0, done.stdout + done.stderr
  assert "4 x simulated CPU devices, made for this run, of 2 processes" in done.stdout
  assert list(losses(tmp_path)) == [1, 2, 3]


@pytest.mark.faults
def test_mpirun_ends_with_the_code_of_a_refusal(tmp_path):
  done = under_mpirun([*MLP, "--config.mesh.data=3", f"--workdir={tmp_path / 'run'}"])
  assert done.returncode == 2, done.stdout + done.stderr
  assert "cannot be divided evenly among 2 processes" in done.stderr
  assert not (tmp_path / "run").exists()


def test_one_builds_a_data_set_and_the_other_waits(well, tmp_path):
  data = tmp_path / "data"
  well(2, *MLP, f"--workdir={tmp_path / 'run'}", f"--config.data.data_dir={data}")
  assert list(losses(tmp_path / "run")) == [1, 2, 3]
  assert len(list(data.glob("prepared/text/*/digits-*/shard.json"))) == 2
  assert not list(data.rglob("*incomplete*"))
