"""Stages in different processes, over gloo: the losses of one process; one of them is killed."""

import signal

import pytest

from tests.faults.harness import Run, story
from tests.helpers.cli import TINY_LM
from tests.processes.command_lines import losses

STEPS = 12
STAGES = (
  "--config=configs/single.py",
  *TINY_LM,
  *("--config.mesh.stage=2", "--config.mesh.tensor=2", "--config.model.layers=2"),
  *("--config.training.microbatches=2", "--config.data.global_batch_size=8"),
  *("--config.evaluation.every_steps=0", "--config.metrics.every_steps=1"),
  *("--config.metrics.tensorboard=False", "--config.checkpoint.every_steps=2"),
)


@pytest.mark.long
def test_losses_are_those_of_one_process(well, tmp_path):
  arguments = [*STAGES, "--config.training.steps=3"]
  well(1, *arguments, f"--workdir={tmp_path}/one")
  well(2, *arguments, f"--workdir={tmp_path}/two")
  expected, found = losses(tmp_path / "one"), losses(tmp_path / "two")
  assert list(found) == list(expected) == [1, 2, 3]
  assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.faults
def test_a_run_whose_last_stage_is_killed_goes_on_to_the_bit(tmp_path):
  settings = {"count": 2, "launcher": True, "steps": STEPS, "common": STAGES}
  whole = ("--config.mesh.data=1", "--config.mesh.tensor=2")  # in place of the harness's
  with Run(tmp_path / "clean", flags=whole, **settings) as run:
    assert run.end() == [0], run.text()
  with Run(tmp_path / "killed", restarts=2, flags=whole, **settings) as run:
    run.wait_for("step 4/")
    run.signal(1, signal.SIGKILL)
    assert run.end() == [0], run.text()
    assert run.said("launch: restart 1 of")
  assert story(tmp_path / "killed") == story(tmp_path / "clean")
  assert len(story(tmp_path / "clean")) >= STEPS
