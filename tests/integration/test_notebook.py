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
