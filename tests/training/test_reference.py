"""The reference of DPO: stored once, the same on resume, and never that of other parameters."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers.cli import TINY_LM, lines_of

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
  }
  config = "--config=configs/dp4_tp2.py:model=lm,data=preferences"
  return [config, *TINY_LM, *(f"--config.{key}={value}" for key, value in keys.items())]


def losses(workdir):
  return [line["loss"] for line in lines_of(workdir) if "loss" in line]


def test_a_run_is_resumed_to_the_bit_and_its_reference_is_that_of_its_start(
  main, arguments, tmp_path
):
  def run(workdir, steps, *more):
    steps = f"--config.training.steps={steps}"
    return main(
      *arguments, f"--workdir={workdir}", steps, "--config.optimizer.schedule=constant", *more
    )

  one, two = tmp_path / "one", tmp_path / "two"
  code, out, err = run(one, 4)
  assert code == 0, (out, err)
  assert losses(one)[0] == pytest.approx(np.log(2), abs=1e-6), "model and reference are the same"
  last = [line for line in lines_of(one) if "eval_loss" in line][-1]
  assert last["eval_reward_margin"] == pytest.approx(
    last["eval_reward_chosen"] - last["eval_reward_rejected"], rel=1e-5
  )
  assert 0 <= last["eval_reward_accuracy"] <= 1
  stored = {path.name: path.read_bytes() for path in (one / "reference").iterdir()}
  assert len(stored) == 3  # both splits, and the digest

  code, out, err = run(two, 2)
  assert code == 0, (out, err)
  shutil.rmtree(two / "reference")  # it is computed again, from the parameters of the start
  code, out, err = run(two, 4)
  assert code == 0, (out, err)
  assert "resumes from the checkpoint of step 2" in out
  assert losses(two) == losses(one)
  assert {path.name: path.read_bytes() for path in (two / "reference").iterdir()} == stored

  code, out, err = main("evaluate", *arguments, f"--checkpoint={one}")
  assert code == 0, (out, err)
  assert f"eval_loss {last['eval_loss']:.4f}" in out
  # Other parameters than those of the start are no reference of it.
  for path in (one / "reference").glob("*.npy"):
    path.unlink()
  code, _, err = main("evaluate", *arguments, f"--checkpoint={one}", "--config.seed=7")
  assert code == 2
  assert "has other parameters (digest" in err


def test_with_adapters_nothing_is_stored(main, arguments, tmp_path):
  lora = ["--config.lora.rank=2", "--config.training.steps=2", f"--workdir={tmp_path}/run"]
  code, out, err = main(*arguments, *lora)
  assert code == 0, (out, err)
  found = losses(tmp_path / "run")
  assert found[0] == pytest.approx(np.log(2), abs=1e-6)
  assert found[1] != found[0]
  assert not (tmp_path / "run" / "reference").exists()
