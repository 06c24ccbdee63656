"""Runs that resume with other training.steps: the learning rates of their steps, to NumPy's."""

import shutil

import numpy as np
import pytest

from tests.helpers.cli import TINY_MLP, lines_of

COMMAND = ["--config=configs/single.py:mlp", *TINY_MLP, "--config.metrics.tensorboard=False"]
COMMAND += ["--config.checkpoint.every_steps=10", "--config.checkpoint.keep=9"]
COMMAND += ["--config.metrics.every_steps=1", "--config.evaluation.every_steps=0"]
PEAK = 2e-3  # of mlp


@pytest.fixture(scope="module")
def forty(main, tmp_path_factory):
  """Returns the workdir of 40 steps, of which a twentieth is warm-up, and what was printed."""
  folder = tmp_path_factory.mktemp("forty")
  code, out, err = main(*COMMAND, "--config.training.steps=40", f"--workdir={folder}")
  assert code == 0, (out, err)
  return folder, out


@pytest.fixture
def resumed(main, forty, tmp_path):
  """Returns a function: resumes after `done` of the 40 steps; returns exit code, output, rates."""

  def resume(done, *more):
    folder = tmp_path / f"{done}{'_'.join(more)}"
    if not folder.exists():
      shutil.copytree(forty[0], folder)
      for step in range(done + 10, 41, 10):
        shutil.rmtree(folder / "checkpoints" / str(step))
    code, out, err = main("train", str(folder), *more)
    rates = [line["learning_rate"] for line in lines_of(folder) if "learning_rate" in line]
    return code, out + err, np.array(rates)

  return resume


def cosine(share):
  return 0.1 + 0.9 * (1 + np.cos(np.pi * np.minimum(share, 1))) / 2


STEPS = np.arange(60)
FORTY = np.where(STEPS < 2, (STEPS + 1) / 2, cosine((STEPS - 2) / 38)) * PEAK
SIXTY = "--config.training.steps=60"


def test_raised_in_the_middle_it_does_not_jump_nor_after_an_interruption(resumed, tmp_path):
  code, said, rates = resumed(20, SIXTY)
  assert code == 0, said
  left = cosine(18 / 38 + 20 / 38 * (STEPS - 20) / 40) * PEAK
  np.testing.assert_allclose(rates, np.where(STEPS < 20, FORTY, left), rtol=1e-5)
  assert (
    "training.steps was 40 and is 60; learning rate of step 21: 0.00117; the rest of its schedule "
    "(cosine) is stretched over the rest of the steps\n"
  ) in said
  [folder] = tmp_path.iterdir()
  for step in (50, 60):
    shutil.rmtree(folder / "checkpoints" / str(step))
  code, said, again = resumed(20, SIXTY)  # which the run has kept, so
  assert code == 0, said
  assert "resumes from the checkpoint of step 40\n" in said
  assert "training.steps was" not in said
  assert [*again] == [*rates]


@pytest.mark.long
def test_raised_after_the_end_it_stays_or_warms_up_again(resumed, forty):
  how = "optimizer.schedule_on_resume="
  assert f"(the learning rate stays at 0.0002; with {how}restart it warms up again" in forty[1]
  code, said, rates = resumed(40, SIXTY)
  assert code == 0, said
  np.testing.assert_allclose(rates, np.where(STEPS < 40, FORTY, 0.1 * PEAK), rtol=1e-5)
  assert "learning rate of step 41: 0.0002; it stays where it has ended;" in said
  again = f"{how}restart"
  rising, left = 0.1 + 0.9 * (STEPS - 39) / 2, cosine((STEPS - 42) / 18)
  wanted = np.where(STEPS < 40, FORTY, np.where(STEPS < 42, rising, left) * PEAK)
  peak = f"it warms up again from 0.0002 to {PEAK:.3g}, and decays over the further steps"
  for expected in (
    peak,
    "nothing to do: all 60 steps are done",
  ):  # the same command again changes nothing
    code, said, rates = resumed(40, again, SIXTY)
    assert code == 0, said
    assert expected in said
    np.testing.assert_allclose(rates, wanted, rtol=1e-5)


def test_another_schedule_is_asked_for(resumed):
  code, said, _ = resumed(20, SIXTY, "--config.optimizer.schedule=linear")
  assert (code, "--accept-changes=optimizer.schedule\n" in said) == (2, True), said


@pytest.mark.long
def test_another_schedule_is_recomputed_for_all_steps(resumed):
  warmup = "--config.optimizer.warmup_steps=3"
  code, said, rates = resumed(20, SIXTY, warmup, "--accept-changes=optimizer.warmup_steps")
  assert code == 0, said
  np.testing.assert_allclose(rates[20:], cosine((STEPS[20:] - 3) / 57) * PEAK, rtol=1e-5)
  assert "learning rate of step 21: 0.00163 instead of 0.00117; the schedule is that of" in said
  code, said, rates = resumed(20, SIXTY, "--config.optimizer.schedule_on_resume=recompute")
  assert code == 0, said
  np.testing.assert_allclose(rates[20:], cosine((STEPS[20:] - 2) / 58) * PEAK, rtol=1e-5)
