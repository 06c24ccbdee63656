"""Muon beside NumPy and optax, and what it is given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.helpers.optimizer_updates import updated
from training.optimizers import muon

RATE, DECAY, MOMENTUM = 8e-3, 0.1, 0.9
CONSTANT = {
  "optimizer.schedule": "constant",
  "optimizer.warmup_steps": 0,
  "optimizer.learning_rate": RATE,
}


@functools.cache
def job_of(arguments="", **overrides):
  keys = {"optimizer.name": "muon", "optimizer.arguments": arguments, **CONSTANT}
  return make_job("single", "lm", **{**keys, **overrides})


def taken(job, count):
  """Returns the parameters before and after steps, and the gradients of each, by name."""
  random = np.random.default_rng(0)
  grads = [
    jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), job.state.params)
    for _ in range(count)
  ]
  return *updated(job, grads), [named_leaves(one) for one in grads]


def orthogonal(matrix):
  """Returns the iteration of Jordan et al. 2024 by NumPy, in float64, written out."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = np.asarray(matrix, np.float64)
  x = x / np.sqrt((x**2).sum())
  for _ in range(5):
    x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
  return x


def by_hand(before, grads):
  """Returns one matrix after these gradients: momentum, Nesterov, decay and AdamW's size."""
  total, after = 0.0, np.asarray(before, np.float64)
  for g in grads:
    total = MOMENTUM * total + g
    update = 0.2 * np.sqrt(max(g.shape)) * orthogonal(g + MOMENTUM * total)
    after = after - RATE * (update + DECAY * after)
  return after


def test_each_matrix_moves_as_numpy_says():
  """Each head of attention, and the kernels of the feed-forward block, of each layer."""
  job = job_of(f"momentum={MOMENTUM},per_head=True")
  before, after, grads = taken(job, 2)
  heads = {"attention/query": np.s_[:, 1], "attention/out": np.s_[1], "attention/key": np.s_[:, 2]}
  for name, part in {**heads, "mlp/gate": np.s_[:], "mlp/down": np.s_[:]}.items():
    for layer in range(2):
      x, found, *given = (x[f"layers/{name}/kernel"][layer][part] for x in (before, after, *grads))
      np.testing.assert_allclose(found, by_hand(x, given), rtol=1e-4, atol=2e-5)


def test_it_is_optax_s_muon_with_its_update_in_adamw_s_size_and_adamw_elsewhere():
  """Of another library: `contrib.muon` with `consistent_rms`, and `adamw`."""
  before, after, [grads] = taken(job_of(), 1)
  kernel, tables = (
    "layers/attention/query/kernel",
    ("embed/table", "final_norm/scale", "unembed/kernel"),
  )
  muon_s = optax.contrib.muon(RATE, beta=0.95, consistent_rms=0.2, weight_decay=DECAY)
  decayed = {name: not name.endswith("scale") for name in tables}
  adamw_s = optax.adamw(RATE, 0.9, 0.95, 1e-8, weight_decay=DECAY, mask=decayed)

  @jax.jit
  def updates(trees, grads):
    with jax.numpy_dtype_promotion("standard"):
      pairs = zip((muon_s, adamw_s), trees, grads, strict=True)
      return [theirs.update(given, theirs.init(tree), tree)[0] for theirs, tree, given in pairs]

  both = [
    ({"x": x[kernel][0].reshape(40, 48)}, {name: x[name] for name in tables})
    for x in (before, grads)
  ]
  matrix, others = map(optax.apply_updates, both[0], updates(*both))
  ours = after[kernel][0].reshape(40, 48)  # all heads as one matrix
  np.testing.assert_allclose(ours, matrix["x"], rtol=1e-4, atol=1e-5)
  for name, wanted in others.items():
    np.testing.assert_allclose(after[name], wanted, rtol=1e-6, atol=1e-7)


@functools.cache
def iterated(dtype):
  """Returns orthogonalized matrices: three random ones, and zeros."""
  x = np.random.default_rng(0).standard_normal((4, 40, 56))
  x[3] = 0
  found = jax.jit(muon.newton_schulz, static_argnums=1)(jnp.asarray(x, dtype), 5)
  assert found.dtype == dtype
  return np.asarray(found, np.float32)


def test_its_updates_are_as_large_as_adamw_s():
  found = iterated(jnp.float32)
  values = np.linalg.svd(found[:3], compute_uv=False)
  assert 0.68 < values.min() < values.max() < 1.21
  size = 0.2 * np.sqrt(56) * np.sqrt(np.mean(np.square(found[:3])))
  assert size == pytest.approx(0.2, rel=0.15)
  assert not found[3].any()


# ---- Its dtype ----


def products(job):
  """Returns the dtypes of the matmuls of an update."""
  params, optimizer = job.state.params, job.state.optimizer
  with jax.numpy_dtype_promotion("standard"):
    text = str(jax.make_jaxpr(job.program.optimizer.update)(params, optimizer, params))
  lines = [line for line in text.splitlines() if "dot_general[" in line]
  return {line.partition(":")[2].partition("[")[0] for line in lines}


def test_matrices_are_iterated_in_the_compute_dtype_unless_another_is_given():
  half = {"training.compute_dtype": "bfloat16"}
  assert products(job_of()) == {"f32"}
  narrow = job_of(**half)
  assert products(narrow) == {"bf16"}
  assert products(job_of("newton_schulz_dtype=float32", **half)) == {"f32"}
  state = named_leaves(narrow.state.optimizer)  # as the parameters, whatever is computed in
  assert {leaf.dtype for leaf in state.values() if leaf.ndim} == {jnp.dtype("float32")}


def test_bfloat16_is_as_near_to_orthogonal_as_float32():
  half, whole = iterated(jnp.bfloat16)[:3], iterated(jnp.float32)[:3]
  values = np.linalg.svd(half, compute_uv=False)
  assert 0.6 < values.min() < values.max() < 1.3
  assert np.vdot(half, whole) / np.linalg.norm(half) / np.linalg.norm(whole) > 0.99


# ---- What is refused ----


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ("steps=0", "steps=0: at least 1"),
    ("newton_schulz_dtype=int8", "newton_schulz_dtype='int8': one of bfloat16, float32, float64"),
    ("hidden=1,b1=0.8", "hidden: it follows from the model\n  b1: set optimizer.beta_1"),
  ],
)
def test_wrong_arguments_are_refused(arguments, said):
  with pytest.raises(ValueError, match="optimizer") as error:
    job_of(arguments)
  assert said in str(error.value)


def test_sgd_s_momentum_is_refused_with_how_to_set_muon_s():
  with pytest.raises(ValueError, match=r"its own arguments are given by optimizer\.arguments"):
    job_of(**{"optimizer.momentum": 0.9})
