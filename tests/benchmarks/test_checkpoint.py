"""The benchmark of checkpoints reads what runs print."""

import shutil

import pytest

from benchmarks import checkpoint
from tests.helpers.cli import TINY_LM


@pytest.mark.long
def test_the_seconds_to_the_first_step_are_read_from_a_run(main, tmp_path):
  command = ["--config=configs/dp8.py", *TINY_LM, "--config.training.steps=2"]
  command += ["--config.checkpoint.every_steps=1", f"--workdir={tmp_path}"]
  code, fresh, err = main(*command)
  assert code == 0, err
  assert checkpoint.first_step(fresh, restored=False) > 0
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  code, restored, err = main(*command)
  assert code == 0, err
  assert checkpoint.first_step(restored, restored=True) > 0
  with pytest.raises(RuntimeError, match="this run was to restore"):
    checkpoint.first_step(fresh, restored=True)
