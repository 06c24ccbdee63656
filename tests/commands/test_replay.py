"""The verb replay: a clean step, a bad row, what it refuses; the workdir stays as it was."""

import hashlib
import types

import pytest

from commands import replay
from tests.helpers.cli import TINY_LM, lines_of

COMMAND = ["--config=configs/single.py", *TINY_LM, "--config.model.layers=2"]
COMMAND += ["--config.metrics.every_steps=1", "--config.metrics.tensorboard=False"]
COMMAND += ["--config.evaluation.every_steps=0", "--config.evaluation.final_steps=1"]
COMMAND += ["--config.checkpoint.every_steps=3", "--config.training.steps=5"]
COMMAND += ["--config.metrics.report=True"]  # its history says on which machine it ran

# Rows of one token each, of which number 11 has a weight that is not finite.
POISONED = """
import numpy as np

from configs import base
from input_pipeline.row_source import SOURCES, array_source


def poisoned(data, split, seed):
  del seed
  rows, T = 32, data.sequence_length
  tokens = np.repeat(np.arange(65, 65 + rows, dtype=np.int32)[:, None], T, axis=1)
  weights = np.ones((rows, T), np.float32)
  if split == data.train_split:
    weights[11, 3] = np.nan
  arrays = {"tokens": tokens, "targets": tokens, "weights": weights}
  return array_source("poisoned " + split, arrays)


SOURCES.register("poisoned", poisoned)


def get_config(recipe="lm"):
  config = base.get_config(recipe)
  config.data.name = "poisoned"
  return config
"""


def content(folder):
  """Returns path -> digest and time of every file."""
  files = (path for path in sorted(folder.rglob("*")) if path.is_file())
  return {
    str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    for path in files
  }


@pytest.fixture(scope="module")
def trained(main, tmp_path_factory):
  """Returns the workdir of a run of five steps, with checkpoints of 3 and 5."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  code, out, err = main(*COMMAND, f"--workdir={workdir}")
  assert code == 0, (out, err)
  return workdir


def test_a_clean_step_has_the_logged_loss_and_the_workdir_stays_as_it_was(main, trained):
  workdir, before = trained, content(trained)
  code, out, err = main("replay", *COMMAND, f"--workdir={workdir}", "--step=5")
  assert code == 0, (out, err)
  assert f"restored {workdir.resolve()}/checkpoints/3; steps before step 5 to train: 1" in out
  assert "the loss is the one in metrics.jsonl, to the bit\n" in out
  assert "all activations, losses, gradients and updated parameters are finite" in out
  loss = {line["step"]: line["loss"] for line in lines_of(workdir) if "loss" in line}[5]
  assert f"step 5: loss {loss:.6g}, grad_norm " in out
  assert "  layer 2: residual " in out
  assert "  gradient of layer 1: attention/query/kernel " in out
  assert content(workdir) == before


def test_a_loss_of_an_unknown_machine_is_equal_to_rounding(monkeypatch):
  monkeypatch.setattr(replay.flags, "ACCEPT", types.SimpleNamespace(value=[]))

  def compared(loss, **more):
    run = {"rollbacks": [], "steps": [{"step": 5, "loss": loss}], "starts": [], "folder": "a"}
    logged = types.SimpleNamespace(**{**run, **more})
    return replay._compared(logged, 5, 2.0, 0, "1 device of cpu", "float32")

  same, said = compared(2.0 * (1 + 1e-6))
  assert same
  assert "equal to rounding; it was computed on an unknown machine, and now on 1 device of" in said
  same, said = compared(2.1)
  assert not same
  assert "more than rounding (1e-05)" in said
  start = {"step": 0, "device_kind": "cpu", "mesh": {}, "host": "a"}
  now = replay._machine({}, "cpu", "a")
  logged = types.SimpleNamespace(
    rollbacks=[], steps=[{"step": 5, "loss": 2.0 * (1 + 1e-6)}], starts=[start], folder="a"
  )
  same, said = replay._compared(logged, 5, 2.0, 0, now, "float32")
  assert not same
  assert "on the same mesh and kind of machine it should be the same to the bit" in said
  same, said = compared(2.1, rollbacks=[1])
  assert same
  assert "the run was rolled back since that checkpoint" in said


def test_a_row_with_a_bad_weight_is_found(main, tmp_path):
  (tmp_path / "poisoned.py").write_text(POISONED)
  workdir = tmp_path / "run"
  command = [f"--config={tmp_path}/poisoned.py", *COMMAND[1:], f"--workdir={workdir}"]
  command += ["--config.data.global_batch_size=4", "--config.data.evaluation_split=test"]
  command += ["--config.checkpoint.every_steps=9", "--config.training.steps=8"]
  code, out, err = main(*command)
  assert code == 1, (out, err)
  step = int(err.split("error: step ")[1].split(":")[0])
  assert f"`replay --step={step}` looks for its cause" in err
  code, out, err = main("replay", *command, f"--step={step}", "--accept_changes=seed")
  assert (code, "run has no checkpoints to compare with" in err) == (2, True), (out, err)
  code, out, err = main("replay", *command, f"--step={step}")
  assert code == 3, (out, err)
  assert f"starts from the first step; steps before step {step} to train: {step - 1}\n" in out
  assert f"metrics.jsonl has no loss of step {step} to compare with" in out
  assert "\n  loss of 1 of 4 rows, the first at [" in out
  assert "rows that cause it, 1 of 4:\n  row " in out
  assert "of the batch: row 11 of poisoned train, loss nan\n    'LLLLLLLLLLLLLLLL'\n" in out
  assert "updated parameter embed/table: " in out.split("gradient of unembed/kernel: ")[1]


@pytest.mark.parametrize(
  ("more", "said"),
  [
    ([], "replay needs --step=N"),
    (["--step=0"], "--step=0: the steps of the run are 1 to training.steps=5"),
    (["--step=2", "--config.seed=3"], "another run has computed:\n  seed: 0 in the checkpoint"),
    (["--step=5", "--config.mesh.stage=2"], "mesh.stage=2: a replay looks at the activations"),
  ],
)
def test_what_is_refused(main, trained, more, said):
  before = content(trained)
  code, out, err = main("replay", *COMMAND, f"--workdir={trained}", *more)
  assert (code, said in err) == (2, True), (out, err)
  assert content(trained) == before
