"""Schedule-free AdamW beside optax's and NumPy, and what evaluation reads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from input_pipeline.batches import EvaluationBatches
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training import runs
from tests.training.test_optimizer import config_of, drawn
from training import base_parameters
from training.optimizers.build import decayed, make_optimizer
from training.optimizers.first_order import gradient_point, schedule_free_adamw
from training.specs import resolve

RATE, DECAY, BETA_1, BETA_2, EPSILON = 0.05, 0.3, 0.8, 0.9, 1e-4
KEYS = {
  "optimizer.name": "schedule_free_adamw",
  "optimizer.schedule": "constant",
  "optimizer.learning_rate": RATE,
  "optimizer.weight_decay": DECAY,
  "optimizer.beta_1": BETA_1,
  "optimizer.beta_2": BETA_2,
  "optimizer.epsilon": EPSILON,
}


def optax_s(job, steps):
  """Returns optax's points of gradients and its averages after so many steps of a job."""
  base = optax.chain(
    optax.scale_by_rms(BETA_2, EPSILON, eps_in_sqrt=False, bias_correction=True),
    optax.add_decayed_weights(DECAY, decayed),
    optax.scale_by_learning_rate(RATE),
  )
  theirs = optax.contrib.schedule_free(base, RATE, BETA_1)
  params = first_state(job).params
  state = theirs.init(params)

  @jax.jit
  def step(params, state, batch):
    grads, _, scale, _ = job.program.gradients(params, batch, None)
    updates, state = theirs.update(jax.tree.map(lambda g: g * scale, grads), state, params)
    return optax.apply_updates(params, updates), state

  with jax.numpy_dtype_promotion("standard"), job.tracing():
    for number in range(steps):
      params, state = step(params, state, place(job, host_batch(job, seed=number)))
    return params, optax.contrib.schedule_free_eval_params(state, params)


def test_a_step_takes_gradients_where_optax_does_and_the_state_holds_its_average():
  keys = {**KEYS, "optimizer.warmup_steps": 0, "optimizer.clip_norm": 0.0}
  job = make_job("single", "mlp", **keys)
  step, state = job.compile_train_step().function, first_state(job)
  for number in range(4):
    state, _ = step(state, place(job, host_batch(job, seed=number)))
  with job.tracing():
    ours = jax.jit(job.program.gradient_point)(state), state.params
  for tree, wanted in zip(ours, optax_s(job, 4), strict=True):
    wanted = named_leaves(jax.device_get(wanted))
    for name, x in named_leaves(jax.device_get(tree)).items():
      np.testing.assert_allclose(x, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)
  apart = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, ours), strict=True)]
  assert min(apart) > 1e-3


def by_hand(x, grads, rates, decay, epsilon=EPSILON):
  """Returns the average after these gradients, and where the next is taken: in sums, as published.

  Algorithm 1 of arXiv:2405.15682, in float64.
  """
  iterate = average = x = np.asarray(x, np.float64)
  second, weights = np.zeros_like(x), []
  for number, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
    point = (1 - BETA_1) * iterate + BETA_1 * average
    second = BETA_2 * second + (1 - BETA_2) * g**2
    iterate = iterate - rate * g / (np.sqrt(second / (1 - BETA_2**number)) + epsilon)
    iterate = iterate - rate * decay * point
    weights.append(rate**2)
    share = weights[-1] / sum(weights)
    average = (1 - share) * average + share * iterate
  return average, (1 - BETA_1) * iterate + BETA_1 * average


def test_warm_up_weighs_less_and_scales_do_not_decay():
  random = np.random.default_rng(0)
  params = {"kernel": (3, 4), "scale": (4,)}
  params = {
    name: random.standard_normal(shape).astype(np.float32) for name, shape in params.items()
  }
  rates = [RATE / 3, RATE * 2 / 3, RATE, RATE, RATE]
  made = schedule_free_adamw(
    lambda step: jnp.asarray(rates)[step], BETA_1, BETA_2, EPSILON, DECAY, decayed
  )
  state, steps, now = made.init(params), [], params
  update = jax.jit(made.update)
  for _ in rates:
    steps.append(jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), params))
    updates, state = update(steps[-1], state, now)
    now = optax.apply_updates(now, updates)
  for name, decay in (("kernel", DECAY), ("scale", 0.0)):
    wanted, point = by_hand(params[name], [grads[name] for grads in steps], rates, decay)
    np.testing.assert_allclose(now[name], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient_point(now, state)[name], point, rtol=1e-5, atol=1e-6)
  assert float(state.weight) == pytest.approx(3 + 1 / 9 + 4 / 9)


@pytest.mark.long
def test_a_run_resumes_to_the_bit_and_is_read_at_the_average(tmp_path):
  """What `evaluate`, `sample` and `export` read is what training has evaluated last."""
  keys = {"optimizer.name": "schedule_free_adamw", "optimizer.warmup_steps": 3}
  rows, job = runs.source(), runs.job(**keys)
  end = runs.train(tmp_path / "whole", rows, prepared=job)
  runs.train(tmp_path / "cut", rows, prepared=runs.job(**keys, **{"training.steps": 10}))
  runs.train(tmp_path / "cut", rows, prepared=job)
  runs.assert_same(tmp_path / "cut", tmp_path / "whole", job)
  _, params, _ = base_parameters.model_state(job, str(tmp_path / "cut"))
  for ours, its in zip(*map(jax.tree.leaves, (params, end.state.params)), strict=True):
    assert np.asarray(ours).tobytes() == np.asarray(its).tobytes()
  [written] = [
    line
    for line in runs.lines(tmp_path / "cut")
    if line.get("step") == runs.STEPS and "eval_loss" in line
  ]
  batches = EvaluationBatches(runs.source(), global_batch_size=runs.BATCH)
  evaluate = job.compile_eval_step().function

  def loss(params):
    sums = [
      jax.device_get(evaluate(params, batches.batch(number, job.batch_shardings)))
      for number in range(len(batches))
    ]
    return sum(x["loss"] for x in sums) / sum(x["weight"] for x in sums)

  assert loss(params) == pytest.approx(written["eval_loss"], rel=1e-6)
  with job.tracing():
    point = jax.jit(job.program.gradient_point)(end.state)
  assert abs(loss(point) - written["eval_loss"]) > 1e-4


def test_with_groups_only_its_own_parameters_have_another_point():
  groups = ({"parameters": "*kernel", "name": "schedule_free_adamw"},)
  keys = {"optimizer.groups": groups, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
  params, grads = drawn(0), drawn(1)
  made = make_optimizer(resolve(config_of("adamw", **keys)).optimizer, params)

  @jax.jit
  def two_steps(params, state):
    for _ in range(2):
      updates, state = made.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params, gradient_point(params, state)

  with jax.numpy_dtype_promotion("standard"):
    params, point = two_steps(params, made.init(params))
  assert {*point} == {*params}
  assert np.abs(point["kernel"] - params["kernel"]).max() > 1e-4
  np.testing.assert_array_equal(point["scale"], params["scale"])
