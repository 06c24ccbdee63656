"""The benchmark of checkpoints reads what runs print and log, and counts each save once."""

import shutil

import pytest

from benchmarks import checkpoint
from tests.helpers.cli import TINY_LM, lines_of


def logged(plain, saving):
  """Returns the lines of a run whose laps take `saving` seconds per step after a save."""
  seconds = {
    step: saving if step % checkpoint.EVERY == checkpoint.LAP and step > checkpoint.EVERY else plain
    for step in range(checkpoint.LAP, checkpoint.LAST + 1, checkpoint.LAP)
  }
  laps = [{"step": step, "step_seconds": value} for step, value in seconds.items()]
  return [{"step": 1, "loss": 1.0}, *laps, {"step": checkpoint.LAST, "eval_loss": 1.0}]


def test_the_saves_of_a_hundred_steps_are_counted():
  slow, plain = (checkpoint.lap_seconds(logged(1.0, saving)) for saving in (1.2, 1.0))
  assert [step for step, seconds in slow.items() if seconds == 1.2] == [30, 50, 70, 90, 110]
  assert list(plain) == list(range(20, 121, 10))
  assert checkpoint.mean_seconds(slow) == pytest.approx(1.1)
  assert checkpoint.mean_seconds(plain) == 1
  assert checkpoint.slowdown_within([slow]) == pytest.approx(1.1)
  assert checkpoint.slowdown_within([plain]) == 1


def test_a_machine_that_grows_slower_does_not_count_as_saving():
  slow = checkpoint.lap_seconds(logged(1.0, 1.2))
  growing = {step: seconds * (1 + step / 100) for step, seconds in slow.items()}
  assert checkpoint.slowdown_within([growing]) == pytest.approx(1.1)


@pytest.mark.long
def test_the_seconds_to_the_first_step_are_read_from_a_run(main, tmp_path):
  command = ["--config=configs/dp8.py", *TINY_LM, "--config.training.steps=2"]
  command += ["--config.checkpoint.every_steps=1", f"--workdir={tmp_path}"]
  code, fresh, err = main(*command)
  assert code == 0, err
  assert checkpoint.first_step(fresh, restored=False) > 0
  assert "step_seconds" in lines_of(tmp_path)[1]
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  code, restored, err = main(*command)
  assert code == 0, err
  assert checkpoint.first_step(restored, restored=True) > 0
  with pytest.raises(RuntimeError, match="this run was to restore"):
    checkpoint.first_step(fresh, restored=True)
