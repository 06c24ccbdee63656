"""What a step does in numbers: the keys of dropout, clipping, the learning rate, the optimizer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import layer_stack, layers
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from training.optimizer import OPTIMIZERS, Optimizer

LAYERS, MICROBATCHES = 2, 2
DROPPING = {
  "model.layers": LAYERS,
  "model.dropout_rate": 0.25,
  "training.gradient_accumulation_steps": MICROBATCHES,
  "optimizer.learning_rate": 0.0,
}
SGD = {
  "optimizer.name": "sgd",
  "optimizer.learning_rate": 0.5,
  "optimizer.weight_decay": 0.0,
  "optimizer.schedule": "constant",
  "optimizer.warmup_steps": 0,
}


def steps(job):
  """Returns a compiled function of (state, batch): state, metrics, gradients, all on the host."""
  compiled = job.compile(
    job.program.step_and_gradients,
    job.state,
    job.batch,
    in_shardings=(job.state_shardings, job.batch_shardings),
  ).function

  def step(state, batch):
    state, metrics, gradients = compiled(state, place(job, batch))
    return state, jax.device_get(metrics), jax.device_get(named_leaves(gradients))

  return step


def parameters(state):
  """Returns name -> float64 array; read before the state is used again."""
  return {name: np.array(x, np.float64) for name, x in named_leaves(state.params).items()}


# ---- Dropout ----


def test_each_dropout_of_a_layer_a_microbatch_and_a_step_has_a_key_of_its_own(monkeypatch):
  seen, drop = [], layer_stack.dropout

  def noting(x_BRD, rate, key, slots_R):
    assert rate == 0.25
    jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
    return drop(x_BRD, rate, key, slots_R)

  monkeypatch.setattr(layer_stack, "dropout", noting)
  job = make_job("single", "lm", **DROPPING)
  step, batch = steps(job), host_batch(job)
  state, keys, losses = first_state(job), [], []
  for number in range(3):
    if number == 2:
      state = first_state(job)
    seen.clear()
    state, metrics, _ = step(state, batch)
    jax.effects_barrier()
    keys.append(set(seen))
    losses.append(float(metrics["loss"]))
  # Two in each layer of each microbatch.
  assert [len(one) for one in keys] == 3 * [2 * LAYERS * MICROBATCHES]
  assert not keys[0] & keys[1]
  assert losses[0] != losses[1]  # of the same parameters: nothing is learned
  # They follow from the seed and the step alone.
  assert (keys[2], losses[2]) == (keys[0], losses[0])


def test_dropout_zeroes_its_share_and_scales_up_the_rest():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 50, 60)), jnp.float32)
  slots = jnp.arange(50, dtype=jnp.int32)
  job = make_job("single", "lm", **{"model.model_size": 60, "data.sequence_length": 50})
  with job.tracing():
    found = np.asarray(
      jax.jit(lambda x, key: layers.dropout(x, 0.3, key, slots))(x, jax.random.key(5))
    )
  kept = found != 0
  n = kept.size
  assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / n)
  np.testing.assert_allclose(found[kept], np.asarray(x)[kept] / 0.7, rtol=1e-6)
  # Neither rows nor tokens nor the model's dim share a mask: two masks agree by chance only.
  for axis in range(3):
    one, other = np.take(kept, 0, axis), np.take(kept, 1, axis)
    agreeing = 0.7**2 + 0.3**2
    assert abs((one == other).mean() - agreeing) < 5 * math.sqrt(0.25 / one.size)


# ---- Clipping and the optimizer ----


def test_gradients_beyond_the_clip_norm_are_scaled_down_and_never_up():
  norms = {}
  for clip in (0.0, 1e3, 0.125):
    job = make_job("fsdp8", "mlp", **{**SGD, "optimizer.clip_norm": clip})
    state = first_state(job)
    before = parameters(state)
    state, metrics, gradients = steps(job)(state, host_batch(job))
    norm = math.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)  # before it is clipped
    norms[clip] = norm
    scale = clip / norm if 0 < clip < norm else 1.0
    for name, after in parameters(state).items():
      wanted = before[name] - 0.5 * scale * np.asarray(gradients[name], np.float64)
      np.testing.assert_allclose(after, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
  assert 0.25 < norms[0.125] < 1e3 / 2, "each clip must lie on its side of the norm"


def test_what_an_optimizer_measures_is_a_metric(monkeypatch):
  def measured_sgd(learning_rate):
    norm = optax.snapshot("update_norm", optax.tree.norm)
    return optax.chain(optax.scale_by_learning_rate(learning_rate), norm)

  monkeypatch.setitem(OPTIMIZERS, "measured_sgd", Optimizer(measured_sgd))
  keys = {**SGD, "optimizer.name": "measured_sgd", "optimizer.clip_norm": 0.0}
  job = make_job("fsdp8", "mlp", **keys)
  step, state = steps(job), first_state(job)
  for number in range(2):
    before = parameters(state)
    state, metrics, _ = step(state, host_batch(job, seed=number))
    squares = [np.sum((after - before[name]) ** 2) for name, after in parameters(state).items()]
    assert metrics["update_norm"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-4)
  twice = {"optimizer.groups": ({"parameters": "*/bias", "learning_rate": 0.1},)}
  job = make_job("fsdp8", "mlp", **keys, **twice)
  with pytest.raises(ValueError, match="measures update_norm in 2 of its parts; give each a name"):
    steps(job)


def rate(step, *, peak, warmup, total):
  """Returns the learning rate of a step, counted from 0, as docs and recipes define it."""
  if step < warmup:
    return peak * (step + 1) / warmup
  share = min(1.0, (step - warmup) / (total - warmup))
  return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def test_the_learning_rate_that_is_logged_is_the_one_of_the_update():
  peak, warmup, total = 0.5, 3, 9
  keys = {
    **SGD,
    "optimizer.clip_norm": 0.0,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": warmup,
    "training.steps": total,
  }
  job = make_job("single", "mlp", **keys)
  step, state = steps(job), first_state(job)
  for number in range(total):
    before = parameters(state)
    state, metrics, gradients = step(state, host_batch(job, seed=number))
    wanted = rate(number, peak=peak, warmup=warmup, total=total)
    assert metrics["learning_rate"] == pytest.approx(wanted, rel=1e-5), number
    moved = {name: before[name] - after for name, after in parameters(state).items()}
    name = "layer_3/kernel"
    used = np.vdot(moved[name], gradients[name]) / np.vdot(gradients[name], gradients[name])
    assert used == pytest.approx(wanted, rel=1e-3), number


@pytest.mark.parametrize("independent", [False, True])
def test_adamw_is_the_papers(independent):
  # arXiv:1711.05101, algorithm 2; three steps of one kernel and of one bias, in NumPy.
  beta_1, beta_2, epsilon, decay, peak = 0.9, 0.95, 1e-8, 0.3, 0.01
  keys = {
    "optimizer.learning_rate": peak,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.beta_1": beta_1,
    "optimizer.beta_2": beta_2,
    "optimizer.weight_decay": decay,
    "optimizer.independent_weight_decay": independent,
    "optimizer.clip_norm": 0.0,
    "model.bias_standard_deviation": 0.5,
  }
  job = make_job("single", "mlp", **keys)
  step, state = steps(job), first_state(job)
  wanted = parameters(state)
  first = {name: np.zeros_like(x) for name, x in wanted.items()}
  second = {name: np.zeros_like(x) for name, x in wanted.items()}
  for number in range(1, 4):
    state, _, gradients = step(state, host_batch(job, seed=number))
    for name, gradient in gradients.items():
      gradient = np.asarray(gradient, np.float64)
      first[name] = beta_1 * first[name] + (1 - beta_1) * gradient
      second[name] = beta_2 * second[name] + (1 - beta_2) * gradient**2
      mean = first[name] / (1 - beta_1**number)
      spread = second[name] / (1 - beta_2**number)
      decayed = decay * wanted[name] if name.endswith("kernel") else 0.0
      if not independent:
        decayed = peak * decayed
      wanted[name] = wanted[name] - peak * mean / (np.sqrt(spread) + epsilon) - decayed
    for name, found in parameters(state).items():
      np.testing.assert_allclose(found, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


# ---- Parameters in bfloat16 ----

BFLOAT16 = {"training.parameter_dtype": "bfloat16"}


def test_a_step_of_bfloat16_parameters_is_one_of_float32_rounded_at_its_end():
  wide, narrow = make_job("single", "mlp"), make_job("single", "mlp", **BFLOAT16)
  assert {x.dtype.name for x in jax.tree.leaves(narrow.state.params)} == {"bfloat16"}
  ours = first_state(narrow)
  theirs = first_state(wide)
  params = jax.tree.map(lambda x: x.astype(jnp.float32), ours.params)
  theirs = type(theirs)(theirs.step, params, theirs.optimizer)
  batch = host_batch(wide)
  ours, metrics, gradients = steps(narrow)(ours, batch)
  theirs, wanted, exact = steps(wide)(theirs, batch)
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
  for name, value in exact.items():
    assert gradients[name].dtype == np.float32
    np.testing.assert_allclose(gradients[name], value, rtol=1e-5, atol=1e-8, err_msg=name)
  stored, updated = parameters(ours), parameters(theirs)
  assert all(
    np.all(np.abs(stored[n] - x) <= np.abs(x) * 2.0**-7 + 1e-9) for n, x in updated.items()
  )
  nearest = {n: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for n, x in updated.items()}
  assert np.mean(stored["layer_1/kernel"] != nearest["layer_1/kernel"]) > 0.1


@pytest.mark.parametrize("stochastic", [True, False])
def test_updates_below_the_distance_of_bfloat16_numbers_are_lost_only_to_the_nearest(stochastic):
  keys = {**SGD, "optimizer.learning_rate": 2.0**-11, "optimizer.clip_norm": 0.0}
  job = make_job(
    "single", "mlp", **keys, **BFLOAT16, **{"training.stochastic_rounding": stochastic}
  )
  state = first_state(job)
  ones = jax.tree.map(jnp.ones_like, state.params)
  grads = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), state.params)
  update = jax.jit(job.program.updated)
  state = type(state)(state.step, ones, state.optimizer)
  for _ in range(64):
    params, optimizer, _ = update(state, grads)
    state = type(state)(state.step + 1, params, optimizer)
  kernel = np.asarray(state.params["layer_1"]["kernel"], np.float64)
  if not stochastic:
    assert np.all(kernel == 1)
    return
  # Each step takes 1/8 of the distance 2**-8 below 1: down with a chance of an eighth.
  deviation = 2**-8 * math.sqrt(64 / 8 * 7 / 8)
  assert abs(kernel.mean() - (1 - 64 * 2**-11)) < 5 * deviation / math.sqrt(kernel.size)
  assert abs(kernel.std() / deviation - 1) < 0.1


def test_parameters_are_drawn_in_float32_and_rounded():
  wide, narrow = make_job("single", "mlp"), make_job("single", "mlp", **BFLOAT16)
  both = jax.jit(lambda key: [job.program.init(key).params for job in (wide, narrow)])
  drawn, rounded = map(named_leaves, both(jax.random.key(0)))
  for name, x in drawn.items():
    np.testing.assert_array_equal(np.asarray(rounded[name]), np.asarray(x.astype(jnp.bfloat16)))
