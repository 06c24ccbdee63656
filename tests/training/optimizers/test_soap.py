"""SOAP beside NumPy, and what it is given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.helpers.optimizer_updates import updated
from training.optimizers.build import decayed
from training.optimizers.soap import eigenvectors, iterated

RATE, DECAY, B1, B2, BETA, EPS = 8e-3, 0.1, 0.8, 0.95, 0.9, 1e-8
STEPS, FREQUENCY = 6, 2  # refreshes after steps 3 and 5; the first step makes the bases
FLOAT64 = {"training.parameter_dtype": "float64", "training.matmul_precision": "highest"}
CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
LARGEST = 48
ARGUMENTS = f"precondition_frequency={FREQUENCY},shampoo_beta={BETA},max_precondition_dim={LARGEST}"
OF_MLP = {
  **{"optimizer.name": "adamw", "optimizer.arguments": "", "optimizer.ema_decays": (0.9,)},
  "optimizer.groups": ({"parameters": "layers/mlp/*", "name": "soap", "arguments": ARGUMENTS},),
}


def job_of(arguments="", **overrides):
  keys = {"optimizer.name": "soap", "optimizer.arguments": arguments, "optimizer.beta_1": B1}
  return make_job("single", "lm", **{**keys, **CONSTANT, **overrides})


@functools.cache
def wide_job(*, grouped):
  """Returns a job in float64, all of SOAP or its feed-forward blocks alone."""
  return job_of(ARGUMENTS, **FLOAT64, **(OF_MLP if grouped else {}))


@functools.cache
def taken(noise=0.0, grouped=False):
  """Returns the parameters before and after the steps, and the gradients of each, by name."""
  with jax.enable_x64(True):
    job = wide_job(grouped=grouped)
    random, (leaves, structure) = np.random.default_rng(0), jax.tree.flatten(job.state.params)
    grads = []
    for _ in range(STEPS):
      drawn = [random.standard_normal((2, *x.shape)) for x in leaves]
      grads.append(jax.tree.unflatten(structure, [g + noise * h for g, h in drawn]))
    return *updated(job, grads), [named_leaves(one) for one in grads]


def first_basis(statistic):
  """Returns eigenvectors, the largest first, and an orthogonal basis of the null space.

  It may be any: what it is of here are the unit vectors' projections, by Gram-Schmidt.
  """
  values, vectors = np.linalg.eigh(statistic)
  basis = [v for value, v in zip(values[::-1], vectors.T[::-1], strict=True) if value > 1e-12]
  for unit in np.eye(len(statistic))[len(basis) :]:
    for _ in range(2):
      unit = unit - sum((q @ unit) * q for q in basis)
    basis.append(unit / np.linalg.norm(unit))
  return np.stack(basis, 1)


def by_hand(before, grads, rows=True, columns=True):
  """Returns one matrix after these gradients: algorithm 3 of arXiv:2409.11321, written out."""
  after = np.asarray(before, np.float64)
  left, right = (np.zeros((n, n)) for n in after.shape)
  q_left, q_right = (np.eye(n) for n in after.shape)
  m = v = np.zeros(after.shape)
  for step, g in enumerate(grads):
    update = 0.0
    if step > 0:
      turned = q_left.T @ g @ q_right
      m, v = B1 * m + (1 - B1) * turned, B2 * v + (1 - B2) * turned**2
      adam = m / (1 - B1**step) / (np.sqrt(v / (1 - B2**step)) + EPS)
      update = q_left @ adam @ q_right.T
    after = after - RATE * (update + DECAY * after)
    left = BETA * left + (1 - BETA) * g @ g.T
    right = BETA * right + (1 - BETA) * g.T @ g
    if step % FREQUENCY == 0:
      m = q_left @ m @ q_right.T  # as it was, before the bases change
      q_left = new_basis(left, q_left, step) if rows else q_left
      q_right = new_basis(right, q_right, step) if columns else q_right
      m = q_left.T @ m @ q_right
  return after


def new_basis(statistic, basis, step):
  if step == 0:
    return first_basis(statistic)
  order = np.argsort(-np.diag(basis.T @ statistic @ basis))
  found = np.empty_like(basis)
  found[:, order] = np.linalg.qr((statistic @ basis)[:, order])[0]
  return found


SIDES = {"attention/query": (40, 48), "attention/out": (48, 40), "attention/key": (40, 24)}
SIDES |= {"mlp/gate": (40, 56), "mlp/down": (56, 40)}


@pytest.mark.parametrize("grouped", [False, True])
def test_each_matrix_moves_as_numpy_says_and_other_parameters_as_optax_s_adamw(grouped):
  """Of both layers: F = 56 has no preconditioner, and the other sides have one.

  Also where it is the optimizer of a group, with an average of the parameters around it.
  """
  before, after, grads = taken(grouped=grouped)
  for name, shape in SIDES.items():
    for layer in range(2) if name.startswith("mlp") or not grouped else ():
      x, found, *given = (
        x[f"layers/{name}/kernel"][layer].reshape(shape) for x in (before, after, *grads)
      )
      wanted = by_hand(x, given, *(size <= LARGEST for size in shape))
      far = np.linalg.norm(found - wanted) / np.linalg.norm(wanted - x)
      assert far < 1e-10, (name, layer)
  other = "layers/attention/query/kernel" if grouped else "final_norm/scale"
  assert_adamw_s(before, after, grads, ("embed/table", "unembed/kernel", other))


def test_rounding_does_not_decide_where_a_matrix_goes():
  """The first gradient leaves a null space: the bases of it must not be made of noise."""
  before, plain, _ = taken()
  noisy = taken(1e-14)[1]
  for name, x in plain.items():
    far = np.linalg.norm(noisy[name] - x) / np.linalg.norm(x - before[name])
    assert far < 1e-11, name


def assert_adamw_s(before, after, grads, names):
  """Compares some parameters with optax's AdamW."""
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    adamw = optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY, mask=decayed)
    params = {name: before[name] for name in names}
    state = adamw.init(params)
    for given in grads:
      updates, state = adamw.update({name: given[name] for name in names}, state, params)
      params = optax.apply_updates(params, updates)
  for name, wanted in params.items():
    np.testing.assert_allclose(after[name], wanted, rtol=1e-10, atol=1e-12)


# ---- Bases ----


def statistics(*spectra):
  """Returns symmetric matrices with these eigenvalues, and their eigenvectors."""
  random = np.random.default_rng(0)
  vectors = [np.linalg.qr(random.standard_normal((len(one),) * 2))[0] for one in spectra]
  found = [u @ np.diag(one) @ u.T for u, one in zip(vectors, spectra, strict=True)]
  return np.stack(found).astype(np.float32), np.stack(vectors)


def test_eigenvectors_are_those_of_a_statistic_and_a_basis_of_its_null_space():
  found, vectors = statistics([5, 4, 3, 2, 1], [9, 6, 3, 0, 0])
  found = np.concatenate([found, np.zeros((1, 5, 5), np.float32)])
  bases = np.asarray(jax.jit(eigenvectors)(found))
  np.testing.assert_allclose(bases.mT @ bases, [np.eye(5)] * 3, atol=1e-6)
  np.testing.assert_allclose(np.abs(bases[0].T @ vectors[0]), np.eye(5), atol=1e-5)
  np.testing.assert_allclose(np.abs(bases[1].T @ vectors[1])[:3], np.eye(5)[:3], atol=1e-5)
  np.testing.assert_allclose(np.abs(bases[2]), np.eye(5), atol=1e-6)  # of a statistic of zeros


def test_iterated_bases_become_eigenvectors_and_keep_the_order_of_their_columns():
  [statistic], [vectors] = statistics([1, 8, 4, 2, 16])
  start = vectors + 0.05 * np.random.default_rng(1).standard_normal(vectors.shape)
  basis = jnp.asarray(np.linalg.qr(start)[0], jnp.float32)[None]
  for _ in range(20):
    basis = jax.jit(iterated)(statistic[None], basis)
  np.testing.assert_allclose(np.abs(np.asarray(basis[0]).T @ vectors), np.eye(5), atol=1e-4)


# ---- Its state, and what is refused ----


def test_matrices_too_large_on_both_sides_are_adamw_s():
  state = named_leaves(job_of("max_precondition_dim=24").state.optimizer)
  soap_s = [name for name in state if "/soap/" in name and "/mu/" in name]
  assert [name.rpartition("layers/")[2] for name in soap_s] == [
    "attention/key/kernel",
    "attention/value/kernel",
  ]


def test_state_has_two_squares_of_each_small_side_in_float32_where_parameters_are_narrower():
  job = job_of(f"max_precondition_dim={LARGEST}")
  optimizer = job.program.optimizer
  narrow = jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), job.program.params)
  with jax.numpy_dtype_promotion("standard"):
    state = jax.eval_shape(optimizer.init, narrow)
    updates, after = jax.eval_shape(optimizer.update, narrow, state, narrow)
  kernel = "layers/mlp/down/kernel"
  found = {
    name.partition("/inner_state/")[2].partition("/")[0]: (x.shape, str(x.dtype))
    for name, x in named_leaves(after).items()
    if name.endswith(kernel)
  }
  square = ((2, 40, 40), "float32")  # of D; F = 56 is too large
  moments = dict.fromkeys(("mu", "nu"), ((2, 56, 40), "bfloat16"))
  assert found == {**moments, "right": square, "right_basis": square}
  assert named_leaves(updates)[kernel].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  "said",
  ["precondition_frequency=0: at least 1", "shampoo_beta=1.0: at least 0 and below 1"],
)
def test_wrong_arguments_are_refused(said):
  with pytest.raises(ValueError, match=said):
    job_of(said.partition(":")[0])
