"""Tasks: one entry decides a batch's arrays, how rows are read and what is measured."""

import math

import jax
import numpy as np
import pytest

from configs import base
from configs.schema.recipes import RECIPES
from input_pipeline.row_source import SOURCES, array_source, open_source
from tests.helpers.jobs import make_job
from training.splits import read_as
from training.tasks import TASKS, Task, mean_loss

SUMS = {
  "causal_lm": {"loss": 6.0, "weight": 4.0},
  "classification": {"loss": 6.0, "weight": 4.0, "correct": 3.0},
  "regression": {"loss": 6.0, "weight": 4.0},
  "dpo": {"loss": 6.0, "weight": 4.0, "reward_margin": 2.0},
  "grpo": {"loss": -3.0, "weight": 4.0, "reward": 3.0},
}
METRICS = {
  "causal_lm": {"eval_loss": 1.5, "eval_bits_per_byte": 1.5 / math.log(2)},
  "classification": {"eval_loss": 1.5, "eval_accuracy": 0.75},
  "regression": {"eval_loss": 1.5},
  "dpo": {"eval_loss": 1.5, "eval_reward_margin": 0.5},
  "grpo": {"eval_loss": -0.75, "eval_reward": 0.75},
}


@pytest.mark.parametrize("name", TASKS)
def test_metrics_of_an_evaluation(name):
  assert TASKS[name].evaluated(SUMS[name]) == pytest.approx(METRICS[name])


def test_bits_per_byte_count_the_bytes_of_a_token():
  found = TASKS["causal_lm"].evaluated(SUMS["causal_lm"], bytes_per_token=4.0)
  assert found == pytest.approx({"eval_loss": 1.5, "eval_bits_per_byte": 1.5 / math.log(2) / 4})


def test_a_models_own_sums_are_metrics_of_their_names():
  found = TASKS["causal_lm"].evaluated({**SUMS["causal_lm"], "balance": 10.0})
  assert found == pytest.approx({**METRICS["causal_lm"], "eval_balance": 2.5})


def test_a_task_without_what_every_run_needs_is_refused():
  weights = {"weights": ("B", "float32")}
  with pytest.raises(ValueError, match="a task: batch lacks `weights`"):
    Task(batch={"inputs": ("BI", "float32")}, metrics={"eval_loss": mean_loss})
  with pytest.raises(ValueError, match="a task: metrics lacks `eval_loss`"):
    Task(batch=weights, metrics={"eval_accuracy": mean_loss})


def test_rows_of_a_task_of_ones_own_are_a_registered_data_source_s(monkeypatch):
  own = Task(batch={"weights": ("B", "float32")}, metrics={"eval_loss": mean_loss})
  monkeypatch.setitem(TASKS, "own", own)
  config = base.get_config("mlp")
  config.task = "own"
  with pytest.raises(ValueError, match=r"data\.name='digits': .* only a registered data source"):
    open_source(read_as(config.data, config.task), "train", 0)
  rows = array_source("rows", {"weights": np.ones(3, np.float32)})
  monkeypatch.setitem(SOURCES, "digits", lambda data, split, seed: rows)
  assert open_source(read_as(config.data, config.task), "train", 0) is rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_task_whose_sums_and_arrays_its_model_knows(recipe):
  job = make_job("single", recipe)
  task = TASKS[job.config.task]
  assert {name: str(array.dtype) for name, array in job.batch.items()} == {
    name: dtype for name, (_, dtype) in task.batch.items()
  }
  legend = job.legend
  assert {*"".join(letters for letters, _ in task.batch.values())} <= {*legend}
  with job.tracing():
    sums = jax.eval_shape(job.program.sums, job.state.params, job.batch)
  assert {*sums} == {*task.sums}
