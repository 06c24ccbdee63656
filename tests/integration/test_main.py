"""The command line as a person uses it: runs, what they print, exit codes, files."""

import json
import math
import pathlib
import re
import shutil

import pytest

from tests.helpers.cli import QUICKLY, TINY_LM, lines_of
from tests.helpers.compiling import FAST

ROOT = pathlib.Path(__file__).parents[2]


COMMAND = [  # nothing of a step depends on the number of steps
  "--config=configs/dp4_tp2.py",
  *TINY_LM,
  "--config.checkpoint.every_steps=2",
  "--config.optimizer.schedule=constant",
  "--config.optimizer.warmup_steps=0",
]


QUICK_END = "--config.evaluation.final_steps=1"


@pytest.fixture(scope="module")
def uninterrupted(main, tmp_path_factory):
  """Returns the workdir of a run of seven steps, and what it has printed."""
  workdir = tmp_path_factory.mktemp("uninterrupted")
  code, out, err = main(*COMMAND, f"--workdir={workdir}", "--config.training.steps=7")
  assert code == 0, (out, err)
  return workdir, out


def test_trains_and_leaves_its_files(uninterrupted):
  workdir, out = uninterrupted
  for text in (
    "devices: 8 x simulated CPU devices, made for this run; mesh: data=4 x tensor=2",
    "parameters; with optimizer state",
    "compiled the train step in",
    " over tensor, ",
    "first step finished",
    "step 7/7",
    "tokens/s",
    "left 0:00",
    "waiting for data",
    "on the evaluation split",
    "step 7\n",
    f"next:\n  evaluate it:      python main.py evaluate {workdir}\n",
    f"  train for longer: python main.py train {workdir} training.steps=14\n",
    f"  see its layout:   python main.py layout {workdir}\n",
  ):
    assert text in out, out
  assert json.loads((workdir / "config.json").read_text())["training"]["steps"] == 7
  begins = out.partition("first step finished")[0].splitlines()
  assert len([line for line in begins if "prepar" not in line]) <= 10  # tables are in layout.txt
  layout = (workdir / "layout.txt").read_text()
  assert "optimizer/0/mu/layers/mlp/up/kernel" in layout
  assert "\nall-reduce  tensor" in layout
  assert list(workdir.glob("events.out.tfevents.*"))
  lines = lines_of(workdir)
  steps = [line for line in lines if "loss" in line]
  assert [line["step"] for line in steps] == [1, 2, 4, 6, 7]
  keys = {"step", "loss", "grad_norm", "learning_rate", "step_seconds", "data_wait_seconds"}
  assert steps[-1].keys() == keys | {"tokens_per_second"}
  evaluations = [line for line in lines if "eval_loss" in line]
  assert [line["step"] for line in evaluations] == [3, 6, 7]
  last = evaluations[-1]
  assert last["eval_bits_per_byte"] == last["eval_loss"] / math.log(2)


# That a run resumes to the bit: test_kill.py.
def test_the_same_command_has_nothing_to_do(main, uninterrupted, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(uninterrupted[0], run)
  code, out, err = main(*COMMAND, f"--workdir={run}", "--config.training.steps=7")
  assert code == 0, (out, err)
  assert "nothing to do: all 7 steps are done" in out


def test_changes_when_a_run_resumes(main, uninterrupted, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(uninterrupted[0], run)
  command = [*COMMAND, f"--workdir={run}", QUICK_END]
  before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
  decay = "--config.optimizer.weight_decay=0"
  refusals = {
    (
      "--config.model.layers=2",
      "--config.optimizer.name=sgd",
      "--config.seed=1",
      "--config.data.sequence_length=24",
    ): [
      "model.layers: 1 in the checkpoint, now 2",
      "run_2",
      'optimizer.name: "adamw" in the checkpoint, now "sgd"',
      "seed: 0 in the checkpoint, now 1",
      "data.sequence_length: 16 in the checkpoint, now 24",
    ],
    (decay,): [
      "optimizer.weight_decay: 0.1 in the checkpoint, now 0.0",
      "--accept-changes=optimizer.weight_decay",
    ],
  }
  for changes, messages in refusals.items():
    code, out, err = main(*command, "--config.training.steps=7", *changes)
    assert code == 2, (changes, out, err)
    for message in messages:
      assert message in err, (changes, err)
  assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
  accepted = [decay, "--accept-changes=optimizer.weight_decay"]
  code, out, err = main(*command, "--config.training.steps=8", *accepted)
  assert code == 0, (out, err)
  assert "resumes from the checkpoint of step 7" in out
  [record] = run.glob("checkpoints/8/record/metadata")
  [change] = json.loads(record.read_text())["accepted_changes"]
  assert change == {"step": 7, "key": "optimizer.weight_decay", "old": 0.1, "new": 0.0}


def test_mlp_learns_the_digits(main, tmp_path):
  code, out, err = main("--config=configs/single.py:mlp", QUICKLY, f"--workdir={tmp_path}")
  assert code == 0, (out, err)
  last = lines_of(tmp_path)[-1]
  assert last["eval_accuracy"] >= 0.97
  page = (tmp_path / "run.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
  assert f"{100 * last['eval_accuracy']:.1f} % accuracy" in page
  assert "examples/s" in out


@pytest.mark.long  # of one of them: tests/configs/experiments/test_short_runs.py
def test_tutorial_gives_the_same_losses_under_both_strategies(main, tmp_path):
  losses = []
  for strategy in ("dp8", "dp4_tp2"):
    workdir = tmp_path / strategy
    code, out, err = main(
      f"--config=configs/{strategy}.py:mlp_tutorial",
      f"--workdir={workdir}",
      QUICKLY,
      "--config.model.model_size=128",
      "--config.metrics.every_steps=1",
      "--config.metrics.report=False",
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
    QUICKLY,
    "--config.model.model_size=64",
    "--config.optimizer.learning_rate=1e9",
  )
  assert code == 1, (out, err)
  assert err.startswith("error: step ")
  assert "loss is" in err
  assert "training stops" in err
  step = int(err.split()[2].rstrip(":"))
  assert all(line["step"] < step for line in lines_of(tmp_path))
  page = (tmp_path / "run.html").read_text()
  assert "<b>Failed after step " in page
  assert f"<title>bad step {step}: " in page


FULL = """
import jax

from configs.dp8 import get_config
from training import loop


def full(*_, **__):
  raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")


loop.train = full
"""


def test_a_full_device_names_the_command_that_shows_what_fills_it(main, tmp_path):
  (tmp_path / "full.py").write_text(FULL)
  code, _, err = main(f"--config={tmp_path}/full.py", *TINY_LM, f"--workdir={tmp_path}/run")
  assert code == 1, err
  assert "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes." in err
  assert "`plan` with this config and --memory prints the arrays at the peak" in err
  assert "Traceback" not in err


def test_layout_prints_the_table_and_two_side_by_side(main):
  code, out, _ = main("layout", "--config=configs/tp8.py")
  assert code == 0
  assert "K  kv_heads              4  (may replicate" in out
  assert "note: layers/attention/key/kernel: kv_heads=4 is replicated: tensor=8" in out
  code, out, _ = main("layout", "--config=configs/dp8.py", "--against=configs/fsdp8.py")
  assert code == 0
  rows = [line for line in out.splitlines() if " embed/table" in line]
  assert rows[0].split()[0] == "*"
  assert "(-, fsdp)" in rows[0]


COMPARE = ["compare", "--config=configs/dp4_tp2.py:mlp", "--against=configs/single.py:mlp"]
COMPARE += [f"--set=compiler_options={FAST}", "--set=model.model_size=16"]


def test_compare_finds_two_strategies_equal(main):
  code, out, err = main(*COMPARE, "--set", "optimizer.clip_norm=0.5")
  assert code == 0, err
  assert out.count("dp4_tp2_mlp: data=4 x tensor=2") == 1
  assert "3 steps of sgd at 0.05, float64 at highest precision; bound 1e-12" in out
  assert re.search(r"equal: 22 tensors, \d+ of them to the bit; the largest difference is", out)
  assert out.count("gradient") >= 8


def test_compare_says_what_differs(main):
  code, out, err = main(*COMPARE, "--against.optimizer.clip_norm=0.01")
  assert code == 3, err
  assert "the first is loss step 2, off by" in out  # the first update is another one
  assert re.search(r"gradient +layer_1/kernel", out)
  assert re.search(r"parameter +layer_1/kernel", out)
  assert out.count("> bound") >= 8


def test_simulate_and_more_devices_than_eight(main):
  code, out, err = main(
    "layout",
    "--config=configs/dp8.py",
    "--simulate",
    "--config.mesh.data=16",
  )
  assert code == 0, err
  # The batch of 32 rows over 16 devices; parameters are on all of them.
  [tokens] = [" ".join(x.split()) for x in out.splitlines() if x.startswith("   batch/tokens")]
  assert tokens == "batch/tokens [32, 128] int32 BT activations (data, -) [2, 128] 1.0 KiB 1"
  [table] = [line.split() for line in out.splitlines() if line.startswith("   embed/table")]
  assert table[-1] == "16"


def test_layout_writes_a_page(main, tmp_path):
  page = tmp_path / "layout.html"
  command = ["layout", "--config=configs/dp8.py:mlp", QUICKLY]
  both = ["--against=configs/fsdp8.py:mlp", f"--against.compiler_options={FAST}"]
  code, out, err = main(*command, *both, f"--html={page}")
  assert code == 0, err
  assert f"wrote {page}" in out
  assert "layer_2/kernel" in page.read_text()
  code, _, err = main(*command, "--html=/proc/layout.html")  # found out when it is written
  assert code == 1
  assert err.startswith("error: --html=/proc/layout.html: ")
  assert "Traceback" not in err


def test_the_tour_takes_no_config(main):
  code, _, err = main("tour", "--config=configs/dp8.py")
  assert code == 2
  assert "--config belongs to the verbs" in err
  code, _, err = main("tour", "--chapter=array")
  assert code == 2
  assert "did you mean 'arrays'?" in err
