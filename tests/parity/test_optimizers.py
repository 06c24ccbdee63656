"""Optimizers whose state is not of the parameters' shapes, on meshes beside one device, resumed."""

import functools

import jax
import numpy as np
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.updates import assert_equal, on_host
from tests.training.checkpointing.states import moved

STEPS = 3
KEYS = {
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "optimizer.weight_decay": 0.0,
}
ADAFACTOR = {
  "optimizer.name": "adafactor",
  "optimizer.arguments": "min_dim_size_to_factor=4,momentum=0.9,dtype_momentum=float64",
}


@functools.cache
def prepared(strategy):
  """Returns the job."""
  with jax.enable_x64(True):
    return make_job(strategy, "lm", **KEYS, **ADAFACTOR)


@functools.cache
def job_of(strategy):
  """Returns the job and its compiled step."""
  with jax.enable_x64(True):
    return prepared(strategy), prepared(strategy).compile_train_step().function


def take(strategy, state, count):
  """Takes steps; returns the state."""
  job, step = job_of(strategy)
  for _ in range(count):
    state, _ = step(state, place(job, host_batch(job, seed=int(state.step))))
  return state


@functools.cache
def trained(strategy):
  """Returns the parameters and the optimizer's state after three steps, on the host."""
  with jax.enable_x64(True):
    return on_host(take(strategy, first_state(job_of(strategy)[0]), STEPS))


@pytest.mark.parametrize("strategy", ["dp8", "fsdp8", "dp4_tp2"])
def test_factored_state_is_sharded_as_what_is_left_of_its_parameter(strategy):
  job = prepared(strategy)
  rows = job.placements["optimizer"]["optimizer/0/v_row/layers/mlp/up/kernel"]
  columns = job.placements["optimizer"]["optimizer/0/v_col/layers/mlp/up/kernel"]
  axes = {"dp8": (None, None), "fsdp8": ("fsdp", None), "dp4_tp2": (None, "tensor")}[strategy]
  assert (rows.letters, tuple(rows.spec)) == ("LD", (None, axes[0]))  # F, the largest, is gone
  assert (columns.letters, tuple(columns.spec)) == ("LF", (None, axes[1]))


# dp8 is not among them: under dp4_tp2 batches are split over `data` too.
@pytest.mark.parametrize("strategy", ["fsdp8", pytest.param("dp4_tp2", marks=pytest.mark.long)])
def test_adafactor_trains_as_on_one_device(strategy):
  assert_equal(trained(strategy), trained("single"))
  with jax.enable_x64(True):
    begun = named_leaves(jax.device_get(first_state(prepared("single")).params), "params/")
  assert any(not np.array_equal(trained("single")[name], x) for name, x in begun.items())


def test_adafactor_is_saved_and_resumes_on_another_mesh(tmp_path):
  with jax.enable_x64(True):
    state = take("fsdp8", first_state(job_of("fsdp8")[0]), STEPS - 1)
    state = moved(tmp_path, STEPS - 1, state, job_of("dp4_tp2")[0])
    resumed = on_host(take("dp4_tp2", state, 1))
  assert_equal(resumed, trained("single"))
