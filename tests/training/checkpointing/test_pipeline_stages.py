"""A run with pipeline stages goes on with other stages, other chunks, and without any."""

import functools

import jax
import numpy as np
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.pipeline_cases import INTERLEAVED, LAYERS, mesh
from tests.training.checkpointing.states import moved

ADAMW = {"optimizer.name": "adamw", "training.matmul_precision": "highest"}
JOBS = {
  "interleaved": {**mesh(4, stage=2, data=2), **INTERLEAVED},
  "four stages": mesh(2, stage=4, tensor=2),
  "one device": {},
}
SAVED, LAST = 2, 4


@functools.cache
def prepared(name):
  with jax.enable_x64(True):
    keys = {**LAYERS, **ADAMW, **JOBS[name], "training.parameter_dtype": "float64"}
    job = make_job("single", "lm", **keys)
    return job, job.compile_train_step().function


def go_on(name, state, last):
  """Takes steps up to the last; returns the state, and each loss."""
  job, train_step = prepared(name)
  losses = []
  for step in range(int(state.step), last):
    state, metrics = train_step(state, place(job, host_batch(job, seed=step)))
    losses.append(float(metrics["loss"]))
  return state, losses


@pytest.fixture(scope="module")
def saved():
  """Returns the state after step 2 of the interleaved run, and the losses of the next steps."""
  with jax.enable_x64(True):
    job, _ = prepared("interleaved")
    state = jax.device_get(go_on("interleaved", first_state(job), SAVED)[0])
    _, losses = go_on("interleaved", jax.device_put(state, job.state_shardings), LAST)
  return state, losses


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_the_next_steps_are_those_of_the_run_that_saved(name, saved, tmp_path):
  state, wanted = saved
  with jax.enable_x64(True):
    placed = jax.device_put(state, prepared("interleaved")[0].state_shardings)
    restored = moved(tmp_path, SAVED, placed, prepared(name)[0])
    for key, value in named_leaves(jax.device_get(restored.params)).items():
      np.testing.assert_array_equal(value, named_leaves(state.params)[key])
    _, found = go_on(name, restored, LAST)
  if name == "interleaved":
    assert found == wanted  # to the last bit
  np.testing.assert_allclose(found, wanted, rtol=1e-12)
