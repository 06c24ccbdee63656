"""A run that resumes with other code of the user's: a config file that changes a class of ours."""

import shutil

import pytest

from tests.helpers.cli import TINY_MLP, lines_of

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
  """Returns a folder with config files, and workdirs of runs with and without the change."""
  folder = tmp_path_factory.mktemp("mine")
  (folder / "patched.py").write_text(PATCHED)
  (folder / "factors.py").write_text("FACTOR = 2.0\n")
  (folder / "plain.py").write_text(PLAIN)
  for name in ("patched", "plain"):
    code, said = resume(main, folder, name, folder / name, 1)
    assert code == 0, said
  [[plain], [patched]] = (
    [line["loss"] for line in lines_of(folder / name) if "loss" in line]
    for name in ("plain", "patched")
  )
  assert patched == pytest.approx(2 * plain, rel=1e-5)
  return folder


def resume(main, folder, config, workdir, steps, *more):
  """Trains to a step; returns the exit code and what was printed."""
  config = config if config.startswith("configs/") else folder / f"{config}.py"
  more = [*more, f"--config.training.steps={steps}", f"--workdir={workdir}"]
  code, out, err = main(f"--config={config}", *COMMAND, *more)
  return code, out + err


def test_a_config_that_changes_a_class_of_ours_is_part_of_the_code(main, mine, tmp_path):
  refusals = [("plain", "patched", "is new to the code of the run")]
  refusals += [("patched", "plain", "is no longer part of the run's code")]
  for begun, now, how in refusals:
    code, said = resume(main, mine, now, mine / begun, 2)
    assert code == 2, said
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
  shutil.copytree(mine / "plain", tmp_path / "run")
  (mine / "plain.py").write_text(PLAIN.replace("= 5", "= 1"))
  strategies = ("configs/dp8.py:mlp", "configs/dp4_tp2.py:mlp", "plain")
  for steps, config in enumerate(strategies, 2):
    code, said = resume(main, mine, config, tmp_path / "run", steps)
    assert code == 0, said
  code, said = resume(main, mine, "patched", tmp_path / "run", 5, "--accept-changes=versions.code")
  assert code == 0, said
