"""The biases by which routers balance their experts: moved once per step, by exact loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import COUNTS
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training.checkpointing.states import moved
from training import step as training_step
from training.base_parameters import ParameterReader
from training.restore import trained_part
from training.state import ROUTER_BIASES

ROUTER_BIAS = ROUTER_BIASES[0]
KEYS = {
  "model.experts": 4,
  "model.router_correction": True,
  "model.router_scores": "sigmoid",
  "training.router_bias_rate": 0.125,
}


def test_it_has_no_optimizer_state_and_no_gradient():
  job = make_job("single", "lm", **KEYS)
  assert ROUTER_BIAS in job.placements["parameters"]
  assert ROUTER_BIAS not in job.program.trained
  leaves = named_leaves(job.program.abstract_state().optimizer)
  assert not [name for name in leaves if name.endswith("router/correction")]
  assert [name for name in leaves if name.endswith("router/kernel")]


def biases(job, batches, steps=1, before=lambda state, number: state):
  """Returns how far the biases have moved, and the metrics of the last step.

  Args:
    job: a small one.
    batches: step -> the batch.
    steps: how many.
    before: state, step -> the state as it is before that step.
  """
  state, step = first_state(job), job.compile_train_step().function
  first = np.asarray(jax.device_get(named_leaves(state.params)[ROUTER_BIAS]))
  for number in range(steps):
    state, metrics = step(before(state, number), place(job, batches(number)))
  found = named_leaves(jax.device_get(state.params))[ROUTER_BIAS]
  return np.asarray(found) - first, jax.device_get(metrics)


def test_it_moves_by_the_counts_of_the_global_batch_also_after_a_restore(tmp_path, monkeypatch):
  count(monkeypatch)
  plain, kept = make_job("single", "lm", **KEYS), []
  batches = lambda number: host_batch(plain, seed=number)  # noqa: E731

  def keep(state, number):
    kept.append(jax.tree.map(jnp.copy, state))
    return state

  expected, metrics = biases(plain, batches, 3, keep)
  in_steps = expected / 0.125
  np.testing.assert_allclose(in_steps, np.round(in_steps), atol=1e-5)
  assert np.abs(expected).max() > 0
  shares = [float(metrics[f"expert_share/{number}"]) for number in range(4)]
  assert sum(shares) == pytest.approx(1)
  more = {"training.rematerialization": "full", "mesh.expert": 2}
  job = make_job("single", "lm", **KEYS, **more)

  def restored(state, number):
    ours, wanted = (named_leaves(one.params)[ROUTER_BIAS] for one in (state, kept[number]))
    np.testing.assert_array_equal(ours, wanted)
    return moved(tmp_path, number, kept[number], job) if number == 2 else state

  found, ours = biases(job, batches, 3, restored)
  np.testing.assert_array_equal(found, expected)
  for one in (metrics, ours):
    assert_all_counted_once(one, batches(2))


def test_it_moves_by_the_counts_of_all_microbatches(monkeypatch):
  count(monkeypatch)
  accumulated = {"training.gradient_accumulation_steps": 4, "model.layers": 1}
  job = make_job("single", "lm", **KEYS, **accumulated)
  found, metrics = biases(job, lambda number: host_batch(job, seed=number))
  assert_all_counted_once(metrics, host_batch(job, seed=0))
  counts = metrics[COUNTS].astype(np.float64)
  wanted = 0.125 * np.sign(counts.mean(axis=-1, keepdims=True) - counts)
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  assert np.abs(wanted).max() > 0


def count(monkeypatch):
  """Has the metrics of steps include the counts of experts."""
  without = training_step.as_metrics
  monkeypatch.setattr(
    training_step, "as_metrics", lambda means: {**without(means), COUNTS: means[COUNTS]}
  )


def assert_all_counted_once(metrics, batch):
  # The signs by which biases move would be the same for multiples.
  tokens = np.count_nonzero(batch["weights"])
  assert metrics[COUNTS].sum(axis=-1).tolist() == [2 * tokens] * len(metrics[COUNTS])


def test_a_step_without_a_rate_leaves_it():
  job = make_job("single", "lm", **{**KEYS, "training.router_bias_rate": 0.0})
  with job.tracing():
    step = jax.make_jaxpr(job.program.train_step)(job.state, job.batch).jaxpr
  bias = named_leaves(job.state.params)[ROUTER_BIAS]
  place = [leaf is bias for leaf in jax.tree.leaves(job.state)].index(True)
  assert step.outvars[place] is step.invars[place]


def test_counts_become_metrics():
  means = {"loss": jnp.float32(1), COUNTS: jnp.asarray([[1, 3]], jnp.int32)}
  found = training_step.as_metrics(means)
  assert {*found} == {"loss", "expert_share/0", "expert_share/1"}
  assert training_step.as_metrics({"loss": 1}) == {"loss": 1}


def test_in_bfloat16_runs_it_is_float32_and_small_steps_are_not_lost():
  keys = {"training.parameter_dtype": "bfloat16", "training.frozen_dtype": "bfloat16"}
  job = make_job("single", "lm", **KEYS, **keys, **{"optimizer.ema_decays": (0.9,)})
  leaves = named_leaves(job.state.params)
  assert leaves[ROUTER_BIAS].dtype == jnp.float32
  assert leaves["layers/experts/router/kernel"].dtype == jnp.bfloat16
  params = {"layers": {"experts": {"router": {"correction": jnp.full((1, 4), 2.0)}}}}
  counts = {COUNTS: jnp.asarray([[1, 3, 2, 2]], jnp.int32)}
  found = named_leaves(training_step.moved_router_bias(params, counts, 0.001))[ROUTER_BIAS]
  np.testing.assert_allclose(found, [[2.001, 1.999, 2.0, 2.0]], rtol=0, atol=1e-6)


def test_checkpoints_have_it_also_where_other_parameters_are_frozen():
  job = make_job("single", "lm", **KEYS)
  saved = named_leaves(trained_part(job.program, job.state)["params"])
  assert saved.keys() == named_leaves(job.state.params).keys()
  assert ParameterReader(job).found_at_start("folder", 1, job.state) is None
  part = make_job("single", "lm", **KEYS, **{"training.trainable": ("layers/experts/*",)})
  saved = named_leaves(trained_part(part.program, part.state)["params"])
  assert ROUTER_BIAS in saved
  assert "embed/table" not in saved


def test_to_train_it_alone_is_refused():
  with pytest.raises(ValueError, match=r"selects only layers/experts/router/correction, which no"):
    make_job("single", "lm", **KEYS, **{"training.trainable": ("*/correction",)})
