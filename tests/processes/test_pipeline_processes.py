"""Stages in different processes, over gloo: the losses of one process."""

import pytest

from tests.helpers.cli import TINY_LM
from tests.processes.command_lines import losses

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
