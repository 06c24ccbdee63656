"""docs/quickstart.ipynb and commands/interactive.py, in a process of their own."""

import json
import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.helpers.compiling import FAST

TINY = f"""
config.update_from_flattened_dict({{
  "model.layers": 1, "model.model_size": 32, "model.feedforward_size": 48,
  "data.sequence_length": 64, "data.evaluation_split": "test[:1]", "evaluation.final_steps": 1,
  "metrics.tensorboard": False, "compiler_options": "{FAST}",
}})
"""
AFTER = """
import jax
from configs import dp8, single

assert jax.device_count() == 8
assert [line["step"] for line in result.metrics if "loss" in line] == [1, 10, 20]
assert int(result.state.step) == 20 and not result.stopped

again = interactive.train(job, FOLDER)  # all steps are done
assert int(again.state.step) == 20
[one] = interactive.sample(job, again.state, ["def "], max_new_tokens=4, temperature=0.0)
assert one == interactive.sample(job, result.state, ["def "], max_new_tokens=4, temperature=0.0)[0]

assert interactive.build(single.get_config("lm")).mesh.size == 1  # of the eight
config = dp8.get_config("lm")
config.mesh.data = 16
try:
  interactive.build(config)
except RuntimeError as error:
  assert "asks for 16 devices, and JAX has started with 8" in str(error), error
  assert "restart the kernel" in str(error), error
  print("refused")
"""


def cells():
  """Returns the code of the notebook's code cells."""
  found = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
  return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.long
def test_every_cell_runs_in_one_kernel(tmp_path):
  code = cells()
  assert len([line for cell in code for line in cell.splitlines() if line]) <= 18
  [building] = [i for i, cell in enumerate(code) if "interactive.build" in cell]
  code[building] = code[building].replace("job = ", TINY + "job = ")
  source = "\n".join([*code, f"FOLDER = {'../runs/quickstart'!r}", AFTER])
  source = source.replace("../runs/quickstart", str(tmp_path / "run"))
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  done = subprocess.run(
    [sys.executable, "-c", source],
    cwd=ROOT / "docs",
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, (done.stdout, done.stderr)
  assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("callback")] == [
    *("5", "10", "15", "20"),
  ]
  assert "embed/table" in done.stdout
  assert "refused" in done.stdout


BPE = {
  "model.layers": 1,
  "model.model_size": 32,
  "model.feedforward_size": 48,
  "data.sequence_length": 64,
  "data.evaluation_split": "test[:1]",
  "data.train_tokenizer": 300,
  "model.vocabulary_size": 300,
  "training.steps": 2,
  "metrics.every_steps": 1,
  "evaluation.final_steps": 1,
  "metrics.tensorboard": False,
}
BPE_NOTEBOOK = """
import sys
from commands import interactive
from configs import dp4_tp2

config = dp4_tp2.get_config("lm_bpe")
config.update_from_flattened_dict(KEYS)
job = interactive.build(config)
assert job.config.data.tokenizer, "no tokenizer was trained"
assert not config.data.tokenizer
interactive.train(job, sys.argv[1])
"""


def losses(folder):
  lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.long
def test_a_notebook_trains_the_tokenizer_and_has_the_losses_of_the_command(tmp_path):
  source = BPE_NOTEBOOK.replace("KEYS", repr(BPE))
  given = [f"--config.{key}={value}" for key, value in BPE.items()]
  commands = {
    "notebook": [sys.executable, "-c", source, str(tmp_path / "notebook")],
    "command": [
      *(sys.executable, "main.py", "--config=configs/dp4_tp2.py:lm_bpe"),
      *(f"--workdir={tmp_path / 'command'}", *given),
    ],
  }
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  for command in commands.values():
    done = subprocess.run(
      command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
  found = {name: losses(tmp_path / name) for name in commands}
  assert len(found["command"]) == 2
  assert found["notebook"] == found["command"]
