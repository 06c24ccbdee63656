"""The command line as a person uses it: runs, refusals and their messages, exit codes, files."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from tests.cli import TINY_LM, lines_of

ROOT = pathlib.Path(__file__).parent.parent


# ------------------------------ refusals ------------------------------

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
    ["unknown data set python_sauce", "nearest known name is python_source"],
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


# ------------------------------ runs ------------------------------


def test_trains_and_leaves_its_files(main, tmp_path):
  command = ["--config=configs/dp4_tp2.py", f"--workdir={tmp_path}", "--config.training.steps=7"]
  code, out, err = main(*command, *TINY_LM)
  assert code == 0, (out, err)
  for text in (
    "devices: 8 x simulated CPU devices, made for this run; mesh: data=4 x tensor=2",
    "layers/mlp/up/kernel",
    "parameters; with optimizer state",
    "compiled the train step in",
    "all-reduce  tensor",
    "first step finished",
    "step 7/7",
    "tokens/s",
    "left 0:00",
    "waiting for data",
  ):
    assert text in out, out
  assert json.loads((tmp_path / "config.json").read_text())["training"]["steps"] == 7
  assert "optimizer/0/mu/layers/mlp/up/kernel" in (tmp_path / "layout.txt").read_text()
  assert list(tmp_path.glob("events.out.tfevents.*"))
  lines = lines_of(tmp_path)
  steps = [line for line in lines if "loss" in line]
  assert [line["step"] for line in steps] == [1, 2, 4, 6, 7]
  keys = {"step", "loss", "grad_norm", "learning_rate", "step_seconds", "data_wait_seconds"}
  assert steps[-1].keys() == keys | {"tokens_per_second"}
  evaluations = [line for line in lines if "eval_loss" in line]
  assert [line["step"] for line in evaluations] == [3, 6, 7]
  last = evaluations[-1]
  assert last["eval_bits_per_byte"] == last["eval_loss"] / math.log(2)


def test_the_same_command_goes_on(main, tmp_path):
  # One run of 9 steps; another asked for 5, and then for 9 on another number of log lines.
  short = ["--config=configs/dp4_tp2.py", *TINY_LM, "--config.checkpoint.every_steps=2"]
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  constant = ["--config.optimizer.schedule=constant", "--config.optimizer.warmup_steps=0"]
  code, out, err = main(*short, *constant, f"--workdir={whole}", "--config.training.steps=9")
  assert code == 0, (out, err)
  for steps in (5, 9):
    code, out, err = main(
      *short, *constant, f"--workdir={parts}", f"--config.training.steps={steps}"
    )
    assert code == 0, (out, err)
  assert "goes on from the checkpoint of step 5" in out
  assert losses(parts)[9] == losses(whole)[9]
  assert set(losses(whole)) <= set(losses(parts))
  code, out, err = main(*short, *constant, f"--workdir={parts}", "--config.training.steps=9")
  assert code == 0
  assert "training.steps=9 are done" in out

  # The same number on every mesh, from the same checkpoint.
  last = [line["eval_loss"] for line in lines_of(whole) if "eval_loss" in line][-1]
  for strategy in ("single", "fsdp8"):
    code, out, err = main(
      "evaluate", f"--config=configs/{strategy}.py", *TINY_LM, f"--checkpoint={whole}/9"
    )
    assert code == 0, (out, err)
    assert "held out after step 9 (all of it)" in out
    found = float(out.split("eval_loss ")[1].split()[0])
    assert found == pytest.approx(last, abs=1e-4)


def losses(workdir: pathlib.Path) -> dict[int, tuple[float, float]]:
  """Returns step -> (loss, grad_norm), to the bit."""
  return {
    line["step"]: (line["loss"], line["grad_norm"]) for line in lines_of(workdir) if "loss" in line
  }


def test_changes_of_a_run_that_goes_on(main, tmp_path):
  command = ["--config=configs/dp8.py", *TINY_LM, f"--workdir={tmp_path}/run"]
  command += ["--config.training.steps=2", "--config.evaluation.steps=1"]
  code, out, err = main(*command)
  assert code == 0, (out, err)
  before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
  refusals = {
    "--config.model.layers=2": ["model.layers: 1 in the checkpoint, now 2", "run_2"],
    "--config.optimizer.name=sgd": ['optimizer.name: "adamw" in the checkpoint, now "sgd"'],
    "--config.seed=1": ["seed: 0 in the checkpoint, now 1"],
    "--config.data.sequence_length=24": ["data.sequence_length: 16 in the checkpoint, now 24"],
    "--config.optimizer.weight_decay=0": [
      "optimizer.weight_decay: 0.1 in the checkpoint, now 0.0",
      "--accept-changes=optimizer.weight_decay",
    ],
  }
  for change, messages in refusals.items():
    code, out, err = main(*command, change)
    assert code == 2, (change, out, err)
    for message in messages:
      assert message in err, (change, err)
  assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
  code, out, err = main(
    *command,
    "--config.training.steps=4",
    "--config.optimizer.weight_decay=0",
    "--accept-changes=optimizer.weight_decay",
  )
  assert code == 0, (out, err)
  [record] = (tmp_path / "run").glob("checkpoints/4/record/metadata")
  [change] = json.loads(record.read_text())["accepted_changes"]
  assert change == {"step": 2, "key": "optimizer.weight_decay", "old": 0.1, "new": 0.0}


def test_mlp_learns_the_digits(main, tmp_path):
  code, out, err = main("--config=configs/dp8.py:mlp", f"--workdir={tmp_path}")
  assert code == 0, (out, err)
  last = lines_of(tmp_path)[-1]
  assert last["eval_accuracy"] >= 0.97
  assert "examples/s" in out


def test_tutorial_gives_the_same_losses_under_both_strategies(main, tmp_path):
  losses = []
  for strategy in ("dp8", "dp4_tp2"):
    workdir = tmp_path / strategy
    code, out, err = main(
      f"--config=configs/{strategy}.py:mlp_tutorial",
      f"--workdir={workdir}",
      "--config.model.model_size=128",
      "--config.metrics.every_steps=1",
    )
    assert code == 0, (out, err)
    losses.append([line["loss"] for line in lines_of(workdir) if "loss" in line])
  assert len(losses[0]) == 30
  assert losses[0][-1] < losses[0][0]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run(main, tmp_path):
  code, out, err = main(
    "--config=configs/dp8.py:mlp_tutorial",
    f"--workdir={tmp_path}",
    "--config.model.model_size=64",
    "--config.optimizer.learning_rate=1e9",
  )
  assert code == 1, (out, err)
  assert err.startswith("error: step ")
  assert "loss is" in err
  assert "training stops" in err
  step = int(err.split()[2].rstrip(":"))
  assert all(line["step"] < step for line in lines_of(tmp_path))


def test_layout_prints_the_table_and_two_side_by_side(main):
  code, out, _ = main("layout", "--config=configs/tp8.py")
  assert code == 0
  assert "K  kv_heads              4  (may replicate" in out
  assert "note: layers/attention/key/kernel: kv_heads=4 stays whole: tensor=8" in out
  code, out, _ = main("layout", "--config=configs/dp8.py", "--against=configs/fsdp8.py")
  assert code == 0
  rows = [line for line in out.splitlines() if " embed/table" in line]
  assert rows[0].split()[0] == "*"
  assert "(-, fsdp)" in rows[0]


COMPARE = ["compare", "--config=configs/dp4_tp2.py:mlp", "--against=configs/single.py:mlp"]


def test_compare_finds_two_strategies_equal(main):
  code, out, err = main(*COMPARE, "--set", "optimizer.clip_norm=0.5")
  assert code == 0, err
  assert "dp4_tp2_mlp: data=4 x tensor=2" in out
  assert "3 steps of sgd at 0.05, float64 at highest precision; bound 1e-12" in out
  assert "equal: 22 tensors, the largest difference is" in out
  assert out.count("gradient") >= 8


def test_compare_says_what_differs(main):
  code, out, err = main(*COMPARE, "--against.optimizer.clip_norm=0.01")
  assert code == 3, err
  assert "the first is loss step 2, off by" in out  # the first update is another one
  assert "gradient  layer_1/kernel" in out
  assert "parameter layer_1/kernel" in out
  assert out.count("> bound") >= 8


def test_compare_keeps_what_is_set(main):
  code, out, err = main(
    *COMPARE, "--set=training.parameter_dtype=float32", "--set=optimizer.name=adamw"
  )
  assert code == 0, err
  assert "3 steps of adamw at 0.002, float32 at highest precision; bound 1e-05" in out


def test_simulate_and_more_devices_than_eight(main):
  code, out, err = main(
    "layout",
    "--config=configs/dp8.py",
    "--simulate",
    "--config.mesh.data=16",
  )
  assert code == 0, err
  assert "(data, -)" in out


def test_layout_writes_a_page(main, tmp_path):
  page = tmp_path / "layout.html"
  command = ["layout", "--config=configs/dp8.py:mlp", f"--html={page}"]
  code, out, err = main(*command, "--against=configs/fsdp8.py:mlp")
  assert code == 0, err
  assert f"wrote {page}" in out
  assert "layer_2/kernel" in page.read_text()
  code, _, err = main(*command[:2], f"--html={tmp_path}")
  assert code == 2
  assert "give a file in a folder that exists" in err
  code, _, err = main(*command[:2], "--html=/proc/layout.html")  # found out when it is written
  assert code == 1
  assert err.startswith("error: --html=/proc/layout.html: ")
  assert "Traceback" not in err


def test_the_tour_takes_no_config(main):
  code, _, err = main("tour", "--config=configs/dp8.py")
  assert code == 2
  assert "--config belongs to the verb" in err
  code, _, err = main("tour", "--chapter=array")
  assert code == 2
  assert "did you mean 'arrays'?" in err
