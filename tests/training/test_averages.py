"""Averages of the parameters: their values, what is evaluated, saved and refused."""

import json

import numpy as np
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from training import averages

DECAYS = (0.5, 0.9)


def test_averages_are_numpys_and_sharded_as_the_parameters_are():
  job = make_job("fsdp8", "mlp", **{"optimizer.ema_decays": DECAYS})
  step = job.compile_train_step().function
  state = first_state(job)
  wanted = {decay: dict(named_leaves(state.params)) for decay in DECAYS}
  wanted = {d: {name: np.asarray(x) for name, x in tree.items()} for d, tree in wanted.items()}
  for number in range(1, 5):
    state, _ = step(state, host_batch(job, seed=number))
    for decay, tree in wanted.items():
      used = min(decay, number / (number + 9))
      for name, x in named_leaves(state.params).items():
        tree[name] = used * tree[name] + (1 - used) * np.asarray(x, np.float64)
  for decay, tree in wanted.items():
    for name, x in named_leaves(state.optimizer.averages[averages.key(decay)]).items():
      np.testing.assert_allclose(x, tree[name], rtol=1e-4, atol=1e-6, err_msg=name)
      placed = job.placements["optimizer"][f"optimizer/averages/{averages.key(decay)}/{name}"]
      assert placed.spec == job.placements["parameters"][name].spec, name
  key = averages.key(0.9)
  ahead = named_leaves(state.params)["layer_1/kernel"] - wanted[0.9]["layer_1/kernel"]
  assert np.abs(ahead).max() > 1e-4, key


def test_averages_of_bfloat16_parameters_are_float32():
  # In bfloat16 they would not move by a thousandth of the distance.
  keys = {"optimizer.ema_decays": (0.999,), "training.parameter_dtype": "bfloat16"}
  state = make_job("single", "mlp", **keys).state
  assert {x.dtype.name for x in named_leaves(state.params).values()} == {"bfloat16"}
  (tree,) = state.optimizer.averages.values()
  assert {x.dtype.name for x in named_leaves(tree).values()} == {"float32"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_is_evaluated_in_training_and_afterwards(main, tmp_path, dtype):
  command = [
    *("--config=configs/dp8.py:mlp", f"--workdir={tmp_path}", "--config.training.steps=6"),
    f"--config.training.parameter_dtype={dtype}",
    *("--config.model.model_size=16", "--config.data.global_batch_size=16"),
    *("--config.evaluation.final_steps=2", "--config.optimizer.ema_decays=(0.9,)"),
    "--config.metrics.report=False",
  ]
  code, out, err = main(*command)
  assert code == 0, err
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  [found] = [line for line in lines if "eval_loss" in line]
  assert found["eval_loss/ema_0.9"] != found["eval_loss"]
  # On another mesh, whose axis table splits the parameters.
  command[0] = "--config=configs/fsdp8.py:mlp"
  code, out, err = main("evaluate", *command, "--config.evaluation.ema_decay=0.9")
  assert code == 0, err
  assert f"eval_loss {found['eval_loss/ema_0.9']:.4f}" in out
  code, out, err = main("evaluate", *command, "--config.evaluation.ema_decay=0.5")
  assert code == 2
  assert "evaluation.ema_decay=0.5: " in err
  assert "has no such average; it has 0.9" in err


@pytest.mark.parametrize(
  ("decays", "said"),
  [((1.0,), "1.0 is not between 0 and 1"), ((0.9, 0.9), "each may be there once")],
)
def test_decays_that_make_no_average_are_refused(decays, said):
  with pytest.raises(ValueError, match=said):
    make_job("single", "mlp", **{"optimizer.ema_decays": decays})
