"""The hand-written reference computes what the application computes, and stands on its own."""

import ast
import importlib
import pathlib

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import step_overhead
from configs.schema import finalize
from runtime.devices import Devices
from tests.helpers.compiling import FAST
from tests.helpers.jobs import first_state
from training import setup

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3

# Sizes are distinct, so that a swapped dim cannot pass.
SMALL = {
  "lm": {
    "model.layers": 3,
    "model.model_size": 32,
    "model.feedforward_size": 40,
    "model.heads": 8,
    "model.kv_heads": 2,
    "model.vocabulary_size": 48,
    "model.vocabulary_multiple": 8,
    "data.global_batch_size": 8,
    "data.sequence_length": 12,
    "optimizer.warmup_steps": 2,
  },
  "mlp_tutorial": {
    "model.model_size": 24,
    "model.feedforward_size": 40,
    "data.global_batch_size": 16,
  },
}


def prepare(strategy: str, recipe: str) -> setup.Job:
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  config.update_from_flattened_dict(
    {**SMALL[recipe], "training.steps": STEPS, "compiler_options": FAST}
  )
  config = finalize.finalize(config, "cpu")
  return setup.prepare(config, Devices("cpu", True, config.mesh.to_dict()))


def draw_batch(ready: setup.Job, step: int) -> dict:
  """Returns random rows with uneven weights."""
  generator = np.random.default_rng(step)

  def draw(name, array):
    if array.dtype == np.int32:
      return generator.integers(
        ready.config.model.vocabulary_size, size=array.shape, dtype=np.int32
      )
    if name == "weights":
      return generator.integers(1, 4, size=array.shape).astype(np.float32)
    return generator.normal(size=array.shape).astype(np.float32)

  batch = {name: draw(name, array) for name, array in ready.batch.items()}
  return jax.device_put(batch, ready.batch_shardings)


CASES = [
  ("dp4_tp2", "lm"),
  pytest.param("dp2_fsdp2_tp2", "lm", marks=pytest.mark.long),
  pytest.param("tp8", "lm", marks=pytest.mark.long),
  ("dp4_tp2", "mlp_tutorial"),
]


@pytest.mark.parametrize(("strategy", "recipe"), CASES)
def test_agrees_with_the_application(strategy, recipe):
  ready = prepare(strategy, recipe)
  batches = [draw_batch(ready, step) for step in range(STEPS)]
  state = first_state(ready)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    start, plain_step = step_overhead.plain_step(ready, batches[0])
  plain_state = start(jax.device_get(state.params))
  step = ready.compile_train_step().function
  for batch in batches:
    state, metrics = step(state, batch)
    metrics = jax.device_get(metrics)
    *plain_state, plain = plain_step(*plain_state, batch)
    for name, value in plain.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=f"{name} at {state.step}")
  for ours, its in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain_state[0]), strict=True):
    assert its.sharding.is_equivalent_to(ours.sharding, ours.ndim)


def test_imports_nothing_of_the_project():
  tree = ast.parse((ROOT / "benchmarks" / "reference.py").read_text())
  modules = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
  modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
  assert {module.split(".")[0] for module in modules} == {"collections", "jax", "optax", "typing"}


def test_a_case_is_measured_from_start_to_end(capsys):
  """The whole benchmark: the loop in turns with the reference, and the saved last step."""
  flags.FLAGS.mark_as_parsed()
  few = flagsaver.flagsaver(overhead_steps=2, rounds=1)
  with few, jax.numpy_rank_promotion("allow"):
    config = step_overhead.get_config("mlp_tutorial:dp8", SMALL["mlp_tutorial"])
    config.compiler_options = FAST
    config = finalize.finalize(config, "cpu")
    ready = setup.prepare(config, Devices("cpu", True, config.mesh.to_dict()))
    assert step_overhead.measure("mlp_tutorial:dp8", ready, most=1000.0)
  assert "ratio" in capsys.readouterr().out
