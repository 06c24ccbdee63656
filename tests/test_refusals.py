"""What the command line refuses: by name, with the way out, code 2, before anything changes."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

DP8 = "--config=configs/dp8.py"
REFUSALS = {
  "unknown key": (
    [DP8, "--config.training.stepz=3"],
    ["unknown config key 'training.stepz'", "did you mean 'training.steps'?"],
  ),
  "wrong type": (
    [DP8, "--config.training.steps=many"],
    ["training.steps is a whole number, not 'many'"],
  ),
  "a section is no key": ([DP8, "--config.mesh=3"], ["mesh is a section"]),
  "missing config file": (
    ["--config=configs/dp9.py"],
    ["there is no config file 'configs/dp9.py'", "did you mean 'configs/dp8.py'?", "fsdp8.py"],
  ),
  "no config": ([], ["no config; for example: python main.py --config="]),
  "unknown flag": ([DP8, "--workdri=x"], ["unknown flag --workdri", "did you mean 'workdir'?"]),
  "unknown verb": (
    ["trian", DP8],
    ["unknown verb 'trian'; there are train, evaluate, sample, layout", "did you mean 'train'?"],
  ),
  "two verbs": (["train", "layout", DP8], ["unexpected 'layout' after the verb"]),
  "against without layout": (
    [DP8, "--against=configs/tp8.py"],
    ["belongs to the verb layout or compare, not to train"],
  ),
  "compare without a second config": (
    ["compare", DP8],
    ["compare needs a second config: --against=configs/single.py"],
  ),
  "set without a value": (
    ["compare", DP8, "--against=configs/tp8.py", "--set=seed"],
    ["--set seed: give key=value"],
  ),
  "set of an unknown key": (
    ["compare", DP8, "--against=configs/tp8.py", "--set", "model.layer=3"],
    ["unknown config key 'model.layer'", "did you mean 'model.layers'?"],
  ),
  "set with another verb": (
    [DP8, "--set=seed=1"],
    ["--set belongs to the verb compare, not to train"],
  ),
  "compare what is not comparable": (
    [
      "compare",
      DP8 + ":mlp",
      "--against=configs/tp8.py:mlp",
      "--against.seed=1",
      "--against.model.model_size=64",
    ],
    ["seed: 0 and 1", "layer_1/kernel: float64[64, 128] and float64[64, 64]", "--set key=value"],
  ),
  "unknown recipe": (
    [DP8 + ":mpl"],
    ["unknown recipe 'mpl'; there are lm, mlp, mlp_tutorial", "did you mean 'mlp'?"],
  ),
  "unknown preset": (
    [DP8 + ":model=llama,data=python_source"],
    ["unknown model 'llama'; there are lm, mlp, mlp_tutorial"],
  ),
  "malformed recipe": ([DP8 + ":modl=lm"], ["'modl=lm' is neither model=NAME nor data=NAME"]),
  "unknown data set": (
    [DP8, "--config.data.name=python_sauce"],
    ["unknown data set python_sauce", "did you mean 'python_source'?"],
  ),
  "mesh does not divide": (
    [DP8, "--config.mesh.data=-1", "--config.mesh.tensor=3"],
    ["mesh.data=-1: 8 devices cannot be divided by tensor=3 = 3"],
  ),
  "two open axes": (
    [DP8, "--config.mesh.data=-1", "--config.mesh.fsdp=-1"],
    ["mesh.data and mesh.fsdp are both -1"],
  ),
  "axis that nothing uses": (
    [DP8, "--config.mesh.expert=2"],
    ["mesh.expert=2: no parameter, activation or schedule of this model uses it"],
  ),
  "batch that the axes do not divide": (
    [DP8, "--config.data.global_batch_size=30"],
    ["data.global_batch_size=30 is not divisible by", "data=8", "make it 24 or 32"],
  ),
  "heads that tensor does not divide": (
    ["--config=configs/tp8.py", "--config.model.heads=12", "--config.model.head_size=16"],
    [
      "layers/attention/query/kernel: dim N (heads) = 12 is not divisible by mesh axis tensor=8",
      "make heads 8 or 16, or set mesh.tensor=4",
    ],
  ),
  "width that tensor does not divide": (
    ["--config=configs/tp8.py", "--config.model.feedforward_size=100"],
    ["layers/mlp/up/kernel: dim F (feedforward) = 100", "make feedforward 96 or 104"],
  ),
  "override of a name that is not there": (
    [DP8, "--config.partitioning.overrides=(('layers/mlp/upp/kernel',(None,)),)"],
    ["'layers/mlp/upp/kernel' is no parameter and no optimizer leaf"],
  ),
  "more than the memory": (
    [DP8, "--config.model.model_size=65536", "--config.model.layers=100"],
    [
      "parameters and optimizer state need",
      "TiB on all simulated devices together",
      "this machine has",
      "GiB",
    ],
  ),
  "a limit on what is replicated": (
    [DP8, "--config.partitioning.max_replicated_bytes=1000"],
    ["partitioning.max_replicated_bytes=1000", "layers/mlp/"],
  ),
  "two things at once": (
    [DP8, "--config.optimizer.schedule=cosin", "--config.training.steps=0"],
    ["training.steps=0: at least 1", "optimizer.schedule='cosin'", "did you mean 'cosine'?"],
  ),
  "a batch larger than the data set": (
    [DP8, "--config.data.global_batch_size=8000000"],
    ["python_source", "rows", "data.global_batch_size=8000000"],
  ),
  "an unknown split": (
    [DP8, "--config.data.evaluation_split=dev"],
    ["dev", "train", "test"],
  ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused_before_anything_changes(main, case, tmp_path):
  arguments, messages = REFUSALS[case]
  workdir = tmp_path / "run"
  code, out, err = main(*arguments, f"--workdir={workdir}")
  assert code == 2, (out, err)
  assert err.startswith("refused: "), err
  assert "Traceback" not in err
  for message in messages:
    assert message in err
  assert not workdir.exists()


def test_debug_shows_the_traceback(main):
  code, _, err = main("--config=configs/dp8.py", "--config.mesh.expert=2", "--debug")
  assert code != 0
  assert "Traceback" in err


def test_a_parameter_without_a_rule_is_refused(main, tmp_path, monkeypatch):
  # The tables are code, so a wrong one is made by a wrapper around main.py.
  script = tmp_path / "wrong_table.py"
  script.write_text(
    "import sys; sys.argv = ['main.py', 'layout', '--config=configs/dp8.py']\n"
    "import main\nfrom models import transformer as t\n"
    "t.PARAMETERS['layers/mlp/up.*'] = 'LDF'; del t.PARAMETERS['final_norm/scale']\n"
    "t.PARAMETERS['layers/moe/router'] = 'LD'\n"
    "main.app.run(main.main, flags_parser=main.parse_flags)\n"
  )
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, str(script)],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert "final_norm/scale: no rule matches this parameter of shape (128,)" in done.stderr
  assert "layers/mlp/up/kernel: 2 rules match" in done.stderr
  assert "rule 'layers/moe/router': matches no parameter" in done.stderr
