"""The biases by which routers balance their experts: moved once per step, by exact loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.experts import COUNTS
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from training import router_bias

KEYS = {
  "model.experts": 4,
  "model.router_correction": True,
  "model.router_scores": "sigmoid",
  "training.router_bias_rate": 0.125,
}


def test_it_has_no_optimizer_state_and_no_gradient():
  job = make_job("single", "lm", **KEYS)
  assert router_bias.PARAMETER in job.placements["parameters"]
  assert router_bias.PARAMETER not in job.program.trained
  leaves = named_leaves(job.program.abstract_state().optimizer)
  assert not [name for name in leaves if name.endswith("router/correction")]
  assert [name for name in leaves if name.endswith("router/kernel")]


def biases(job, batches, steps=1):
  """Returns how far the biases have moved, and the metrics of the last step."""
  state, step = first_state(job), job.compile_train_step().function
  first = np.asarray(jax.device_get(named_leaves(state.params)[router_bias.PARAMETER]))
  for number in range(steps):
    state, metrics = step(state, place(job, batches(number)))
  found = named_leaves(jax.device_get(state.params))[router_bias.PARAMETER]
  return np.asarray(found) - first, jax.device_get(metrics)


@pytest.mark.parametrize(
  "more",
  [
    {"training.gradient_accumulation_steps": 4, "mesh.data": 2},
    {"training.rematerialization": "full", "mesh.expert": 2},
  ],
)
def test_it_moves_by_the_counts_of_the_global_batch(more):
  plain = make_job("single", "lm", **KEYS)
  batches = lambda number: host_batch(plain, seed=number)  # noqa: E731
  expected, metrics = biases(plain, batches, 3)
  in_steps = expected / 0.125
  np.testing.assert_allclose(in_steps, np.round(in_steps), atol=1e-5)
  assert np.abs(expected).max() > 0
  shares = [float(metrics[f"expert_share/{number}"]) for number in range(4)]
  assert sum(shares) == pytest.approx(1)
  found, _ = biases(make_job("single", "lm", **KEYS, **more), batches, 3)
  np.testing.assert_array_equal(found, expected)


def test_a_step_without_a_rate_leaves_it():
  job = make_job("single", "lm", **{**KEYS, "training.router_bias_rate": 0.0})
  found, _ = biases(job, lambda number: host_batch(job, seed=number))
  assert not found.any()


def test_counts_become_metrics():
  means = {"loss": jnp.float32(1), COUNTS: jnp.asarray([[1, 3]], jnp.int32)}
  found = router_bias.as_metrics(means)
  assert {*found} == {"loss", "expert_share/0", "expert_share/1"}
  assert router_bias.as_metrics({"loss": 1}) == {"loss": 1}
