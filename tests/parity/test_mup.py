"""muP with AdamW: on meshes as on one device in float64, resumed, and nothing more is sent."""

import functools

import jax
import pytest

from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.budgets import Step, budget
from tests.parity.updates import assert_equal, on_host
from tests.training.checkpointing.states import moved

STEPS = 3
KEYS = {
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "model.base_width": 10,
  "optimizer.epsilon": 1e-2,  # so that a gradient of rounding errors alone does not count
  "optimizer.groups": ({"parameters": "*/up/*", "learning_rate": 0.01},),
}


@functools.cache
def job_of(strategy):
  """Returns the job and its compiled step."""
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **KEYS)
    return job, job.compile_train_step().function


def take(strategy, state, count):
  """Takes steps; returns the state."""
  job, step = job_of(strategy)
  for _ in range(count):
    state, _ = step(state, place(job, host_batch(job, seed=int(state.step))))
  return state


@functools.cache
def trained(strategy):
  """Returns parameters and optimizer state after three steps, on the host."""
  with jax.enable_x64(True):
    return on_host(take(strategy, first_state(job_of(strategy)[0]), STEPS))


@pytest.mark.long
def test_a_mesh_trains_as_one_device_and_a_run_resumes_on_it(tmp_path):
  assert_equal(trained("dp2_fsdp2_tp2"), trained("single"))
  with jax.enable_x64(True):
    state = take("single", first_state(job_of("single")[0]), STEPS - 1)
    state = moved(tmp_path, STEPS - 1, state, job_of("dp2_fsdp2_tp2")[0])
    resumed = on_host(take("dp2_fsdp2_tp2", state, 1))
  assert_equal(resumed, trained("single"))


@pytest.mark.long
def test_nothing_more_is_sent():
  job, step = job_of("dp2_fsdp2_tp2")
  sent = Step(job, step.as_text(), "").sent()
  assert sent == budget(job, 8)


def test_moments_are_placed_as_their_parameters():
  job = make_job("dp2_fsdp2_tp2", "lm", **{"model.base_width": 10})
  placed = job.placements["optimizer"]
  moments = {name.partition("/mu/")[2]: p for name, p in placed.items() if "/mu/" in name}
  wanted = {name: p.spec for name, p in job.placements["parameters"].items()}
  assert {name: p.spec for name, p in moments.items()} == wanted
