"""A layer of experts beside NumPy, on one device and on a mesh of every axis it uses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models import model_spec
from models.experts import ENTROPY, ROUNDS, Experts
from models.load_balance import BALANCE, Z_LOSS
from models.losses import COUNTS
from models.positions import Rows
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job

KEYS = {
  "model.experts": 4,
  "model.experts_per_token": 2,
  "model.expert_feedforward_size": 24,
  "model.shared_feedforward_size": 8,
  "model.expert_biases": True,
  "model.router_bias": True,
  "model.gate_limit": 0.4,
  "model.up_offset": 1.0,
  "model.activation": "gelu_sigmoid",
  "training.parameter_dtype": "float64",
}
MESH = {"mesh.expert": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
PARTS = ("gate", "up", "down")


def softmax(x):
  exponents = np.exp(x - x.max(-1, keepdims=True))
  return exponents / exponents.sum(-1, keepdims=True)


def gated(x, p, *, limit=np.inf, offset=0.0):
  gate, up = x @ p["gate/kernel"] + p["gate/bias"], x @ p["up/kernel"] + p["up/bias"]
  gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
  return gate / (1 + np.exp(-1.702 * gate)) * (up + offset) @ p["down/kernel"] + p["down/bias"]


def in_numpy(x_BTD, p):
  """Returns the update, the experts of each token, probabilities and logits."""
  logits = x_BTD @ p["router/kernel"] + p["router/bias"]
  chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :2]
  gates = softmax(np.take_along_axis(logits, chosen, -1))  # renormalized
  shared = {f"{part}/kernel": p[f"shared/{part}/kernel"] for part in PARTS}
  update = gated(x_BTD, {**shared, **{f"{part}/bias": 0.0 for part in PARTS}})
  for place in np.ndindex(*chosen.shape):
    expert = chosen[place]
    own = {f"{a}/{b}": p[f"{a}/{b}"][expert] for a in PARTS for b in ("kernel", "bias")}
    update[place[:2]] += gates[place] * gated(x_BTD[place[:2]], own, limit=0.4, offset=1.0)
  return update, chosen, softmax(logits), logits


@pytest.fixture(scope="module")
def inputs():
  draw = np.random.default_rng(1)
  x_BTD = draw.normal(size=(16, 12, 40))
  weights_BT = draw.uniform(0.5, 1, size=(16, 12)) * (draw.uniform(size=(16, 12)) > 0.3)
  weights_BT[3] = 0.0
  return x_BTD, weights_BT


def run(x_BTD, weights_BT, **keys):
  """Returns parameters of one layer with biases drawn, the update, and the rows' numbers."""
  with jax.enable_x64(True):
    job = make_job("single", "lm", **KEYS, **keys)
    spec = model_spec(job.config)
    with job.tracing():
      graphdef, state = nnx.split(nnx.jit(lambda: Experts(spec, rngs=nnx.Rngs(params=0)))())
      draw = np.random.default_rng(2)
      state = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape) * 0.3), state)
      slots = jnp.arange(12, dtype=jnp.int32)[None]
      rows = Rows(slots, slots, None)

      @jax.jit
      def apply(state, x, weights):
        given = dataclasses.replace(rows, weights_BT=weights)
        return nnx.merge(graphdef, state)(x, given)

      update, numbers = jax.device_get(apply(state, jnp.asarray(x_BTD), jnp.asarray(weights_BT)))
    leaves = {name.removesuffix("/value"): np.asarray(x) for name, x in named_leaves(state).items()}
    return leaves, update, numbers


@pytest.fixture(scope="module")
def on_one_device(inputs):
  return run(*inputs)


def test_the_update_is_numpy_s(inputs, on_one_device):
  p, update, _ = on_one_device
  expected, *_ = in_numpy(inputs[0], p)
  np.testing.assert_allclose(update, expected, rtol=0, atol=1e-12)


def test_the_numbers_of_rows_are_numpy_s(inputs, on_one_device):
  p, _, numbers = on_one_device
  x_BTD, weights_BT = inputs
  _, chosen, probabilities, logits = in_numpy(x_BTD, p)
  sizes = np.log(np.exp(logits).sum(-1)) ** 2
  np.testing.assert_allclose(numbers[Z_LOSS], (sizes * weights_BT).sum(1), rtol=1e-12)
  entropy = -(probabilities * np.log(probabilities)).sum(-1)
  np.testing.assert_allclose(numbers[ENTROPY], (entropy * weights_BT).sum(1), rtol=1e-12)
  for row in range(16):
    counted = weights_BT[row] > 0
    counts = np.bincount(chosen[row][counted].reshape(-1), minlength=4)
    assert numbers[COUNTS][row].tolist() == counts.tolist()
    balance = 0.0
    if counted.any():
      share = counts / counted.sum() * 4 / 2
      balance = (share * probabilities[row][counted].mean(0)).sum() * weights_BT[row].sum()
    assert numbers[BALANCE][row] == pytest.approx(balance, rel=1e-12)


def test_on_a_mesh_both_are_the_same(inputs, on_one_device):
  p, update, numbers = run(*inputs, **MESH, **{"partitioning.sequence_parallel": True})
  assert {*p} == {*on_one_device[0]}
  np.testing.assert_allclose(update, on_one_device[1], rtol=0, atol=1e-12)
  for name in (BALANCE, COUNTS, ENTROPY, Z_LOSS):
    np.testing.assert_allclose(numbers[name], on_one_device[2][name], rtol=1e-12, atol=1e-13)


def test_many_rounds_give_the_same(inputs, on_one_device):
  _, update, numbers = run(*inputs, **MESH, **{"model.expert_capacity": 0.2})
  np.testing.assert_allclose(update, on_one_device[1], rtol=0, atol=1e-12)
  weights_B = inputs[1].sum(1)
  assert (numbers[ROUNDS][weights_B > 0] > 3 * weights_B[weights_B > 0]).all()


# ---- Memory ----


def temporary_bytes(exchange):
  """Returns what a device needs besides arguments and results, for a layer and its gradients."""
  sizes = {"model.experts": 16, "model.model_size": 128, "model.expert_feedforward_size": 64}
  keys = {**sizes, "mesh.expert": 8, "model.expert_exchange": exchange}
  job = make_job("single", "lm", **keys)
  slots = jnp.arange(512, dtype=jnp.int32)[None]

  def loss(state, x):
    return jnp.sum(nnx.merge(graphdef, state)(x, Rows(slots, slots, None))[0] ** 2)

  with job.tracing():
    spec = model_spec(job.config)
    module = nnx.eval_shape(lambda: Experts(spec, rngs=nnx.Rngs(params=0)))
    graphdef, state = nnx.split(module)
    x_BTD = jax.ShapeDtypeStruct((16, 512, 128), jnp.float32)
    x_BTD = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype, sharding=sharding_of(job, "expert"))
    state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding_of(job, *(["expert"] if x.ndim == 3 else []))
      ),
      state,
    )
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, x_BTD).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def sharding_of(job, *axes):
  return NamedSharding(job.mesh, PartitionSpec(*axes))


@pytest.mark.long
def test_rounds_need_a_third_of_the_temporary_memory_of_gathered_tokens():
  # Eight devices, 16 experts, 2 of each of 1024 tokens of a device, D = 128, M = 64.
  rounds, gathered = map(temporary_bytes, ("rounds", "gathered"))
  print(f"temporary bytes: rounds {rounds:,}, gathered {gathered:,}")
  assert rounds <= gathered / 3
