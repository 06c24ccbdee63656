"""A run that resumes with other code of the user's: a config file that changes a class of ours."""

import shutil

import pytest

from tests.helpers.cli import TINY_MLP

COMMAND = [*TINY_MLP, "--config.metrics.tensorboard=False", "--config.metrics.every_steps=1"]
COMMAND += ["--config.evaluation.every_steps=0", "--config.checkpoint.every_steps=1"]
PATCHED = """
from configs import base
from models import mlp
import factors

ours = mlp.MLP.ours = getattr(mlp.MLP, "ours", mlp.MLP.loss_sums)  # the file may run twice


def loss_sums(self, batch, key=None):
  sums = ours(self, batch, key)
  return {**sums, "loss": factors.FACTOR * sums["loss"]}


mlp.MLP.loss_sums = loss_sums


def get_config(recipe="mlp"):
  return base.get_config(recipe, mesh={"data": 2})
"""
PLAIN = """
from configs import base


def get_config(recipe="mlp"):
  config = base.get_config(recipe, mesh={"data": 2})
  config.metrics.every_steps = 5
  return config
"""


@pytest.fixture(scope="module")
def mine(main, tmp_path_factory):
  """Returns a folder with config files, and the workdir of a run with the change."""
  folder = tmp_path_factory.mktemp("mine")
  (folder / "patched.py").write_text(PATCHED)
  (folder / "factors.py").write_text("FACTOR = 2.0\n")
  (folder / "plain.py").write_text(PLAIN)
  code, said = resume(main, folder, "patched", folder / "patched", 1)
  assert code == 0, said
  return folder


def resume(main, folder, config, workdir, steps, *more):
  """Trains to a step; returns the exit code and what was printed."""
  config = config if config.startswith("configs/") else folder / f"{config}.py"
  more = [*more, f"--config.training.steps={steps}", f"--workdir={workdir}"]
  code, out, err = main(f"--config={config}", *COMMAND, *more)
  return code, out + err


def test_a_config_that_changes_a_class_of_ours_is_part_of_the_code(main, mine, tmp_path):
  code, said = resume(main, mine, "plain", mine / "patched", 2)
  assert code == 2, said
  how = "is no longer part of the run's code"
  assert f"    factors.py {how}\n    patched.py {how}\n" in said
  assert "or accept this with --accept-changes=versions.code\n" in said
  factors = mine / "factors.py"
  factors.write_text("FACTOR = 3.0\n")
  code, said = resume(main, mine, "patched", mine / "patched", 2)
  assert code == 2, said
  assert "\n    factors.py has changed\n  set them back, or accept" in said
  factors.write_text("# Of the loss.\nFACTOR = 2.0\n")
  shutil.copytree(mine / "patched", tmp_path / "run")
  code, said = resume(main, mine, "patched", tmp_path / "run", 2)
  assert code == 0, said


@pytest.mark.long
def test_a_config_that_sets_keys_may_be_another_one(main, mine, tmp_path):
  code, said = resume(main, mine, "plain", tmp_path / "run", 1)
  assert code == 0, said
  (mine / "plain.py").write_text(PLAIN.replace("= 5", "= 1"))
  strategies = ("configs/dp8.py:mlp", "configs/dp4_tp2.py:mlp", "plain")
  for steps, config in enumerate(strategies, 2):
    code, said = resume(main, mine, config, tmp_path / "run", steps)
    assert code == 0, said
  code, said = resume(main, mine, "patched", tmp_path / "run", 5)
  assert code == 2, said
  assert "    factors.py is new to the code of the run\n" in said
  code, said = resume(main, mine, "patched", tmp_path / "run", 5, "--accept-changes=versions.code")
  assert code == 0, said
