"""The reference of DPO: stored once, the same on resume, and never that of other parameters."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers.cli import TINY_LM, lines_of
from tests.helpers.jobs import make_job

TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
  "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
  """Returns the arguments of a run on pairs, without its workdir."""
  folder = tmp_path_factory.mktemp("pairs")
  records = [
    {"prompt": f"{n}", "chosen": "ab" * (n % 3 + 1), "rejected": "cd" * (n % 2 + 1)}
    for n in range(100, 140)
  ]
  (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
  (folder / "t.jinja").write_text(TEMPLATE)
  keys = {
    "data.files": folder / "pairs.jsonl",
    "data.chat_template": folder / "t.jinja",
    "data.data_dir": folder / "data",
    "data.global_batch_size": 8,
    "data.evaluation_split": "test",
    "data.prepare_processes": 1,
    "optimizer.learning_rate": 1e-3,
    "metrics.every_steps": 1,
    "metrics.tensorboard": False,
    "training.steps": 4,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 0,
  }
  config = "--config=configs/single.py:model=lm,data=preferences"
  tiny = [flag for flag in TINY_LM if flag.split("=")[0][len("--config.") :] not in keys]
  return [config, *tiny, *(f"--config.{key}={value}" for key, value in keys.items())]


def losses(workdir):
  return [line["loss"] for line in lines_of(workdir) if "loss" in line]


@pytest.mark.long
def test_a_run_is_resumed_to_the_bit_and_its_reference_is_that_of_its_start(
  main, arguments, tmp_path
):
  workdir = tmp_path / "run"
  run = [*arguments, f"--workdir={workdir}"]
  code, out, err = main(*run)
  assert code == 0, (out, err)
  found = losses(workdir)
  assert found[0] == pytest.approx(np.log(2), abs=1e-6), "model and reference are the same"
  [last] = [line for line in lines_of(workdir) if "eval_loss" in line]
  assert last["eval_reward_margin"] == pytest.approx(
    last["eval_reward_chosen"] - last["eval_reward_rejected"], rel=1e-5
  )
  assert 0 <= last["eval_reward_accuracy"] <= 1
  stored = {path.name: path.read_bytes() for path in (workdir / "reference").iterdir()}
  assert len(stored) == 3  # both splits, and the digest

  shutil.rmtree(workdir / "checkpoints" / "4")
  shutil.rmtree(workdir / "reference")  # it is computed again, from the parameters of the start
  code, out, err = main(*run)
  assert code == 0, (out, err)
  assert "resumes from the checkpoint of step 2" in out
  assert losses(workdir) == found
  assert {path.name: path.read_bytes() for path in (workdir / "reference").iterdir()} == stored

  evaluate = ["evaluate", *arguments, f"--checkpoint={workdir}"]
  code, out, err = main(*evaluate)
  assert code == 0, (out, err)
  assert f"eval_loss {last['eval_loss']:.4f}" in out
  # Other parameters than those of the start are no reference of it.
  for path in (workdir / "reference").glob("*.npy"):
    path.unlink()
  code, _, err = main(*evaluate, "--config.seed=7")
  assert code == 2
  assert "has other parameters (digest" in err


def test_with_adapters_nothing_is_stored():
  sizes = {"data.files": "pairs.jsonl", "data.sequence_length": 8}
  recipe = "model=lm,data=preferences"
  assert make_job("single", recipe, **sizes).needs_reference
  assert not make_job("single", recipe, **sizes, **{"lora.rank": 2}).needs_reference
  assert not make_job("single", "lm").needs_reference
