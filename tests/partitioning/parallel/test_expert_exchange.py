"""The exchange of tokens beside a loop over experts in NumPy, for routings set by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from partitioning.parallel import expert_exchange
from partitioning.parallel.expert_exchange import Exchange, Exchanged, grouped_matmul

EXPERTS, EACH, WIDTH, HIDDEN, TOKENS = 8, 2, 5, 7, 64
DATA, DEVICES = 2, 4
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(TOKENS, WIDTH))
GATES = DRAW.uniform(0.1, 1, size=(TOKENS, EACH))
UP = DRAW.normal(size=(EXPERTS, WIDTH, HIDDEN))
DOWN = DRAW.normal(size=(EXPERTS, HIDDEN, WIDTH))
DY = DRAW.normal(size=(TOKENS, WIDTH))


def routing(name):
  """Returns the experts of each token, two different ones."""
  first = np.arange(TOKENS) % EXPERTS
  if name == "balanced":
    return np.stack([first, (first + 3) % EXPERTS], 1)
  if name == "all to one expert":  # and evenly to the others
    return np.stack([np.full(TOKENS, 5), np.where(first == 5, 6, first)], 1)
  if name == "all to one device":
    return np.stack([np.full(TOKENS, 6), np.full(TOKENS, 7)], 1)
  if name == "an expert without tokens":
    first = np.where(first == 2, 3, first)
    return np.stack([first, np.where(first == 4, 5, 4)], 1)
  assert name == "drawn"
  return np.stack([DRAW.permutation(EXPERTS)[:EACH] for _ in range(TOKENS)])


ROUTINGS = ("balanced", "all to one expert", "all to one device", "an expert without tokens")
ROUTED = {name: routing(name) for name in (*ROUTINGS, "drawn")}


def in_numpy(x, gates, chosen, up, down, dy):
  """Returns the sums, and the gradients of x, gates, up and down."""
  y, dx, dgates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
  dup, ddown = np.zeros_like(up), np.zeros_like(down)
  for token, slot in np.ndindex(*chosen.shape):
    expert, gate = chosen[token, slot], gates[token, slot]
    hidden = np.tanh(x[token] @ up[expert])
    result = hidden @ down[expert]
    y[token] += gate * result
    dgates[token, slot] = dy[token] @ result
    dhidden = gate * down[expert] @ dy[token] * (1 - hidden**2)
    ddown[expert] += gate * np.outer(hidden, dy[token])
    dup[expert] += np.outer(x[token], dhidden)
    dx[token] += up[expert] @ dhidden
  return y, (dx, dgates, dup, ddown)


def compute(rows, weights, groups, how):
  product = functools.partial(grouped_matmul, sizes_E=groups.sizes_E, how=how)
  return product(jnp.tanh(product(rows, weights[0])), weights[1])


def program(name, capacity, filler=0.0, way="tiles"):
  """Returns a function on a mesh of data=2 x expert=4 -> (results, gradients, rounds, fullest)."""
  exchange = Exchange(
    name, "expert", DEVICES, EXPERTS // DEVICES, capacity, compute, way, 8, filler
  )
  tokens, experts, each = (
    PartitionSpec(("data", "expert")),
    PartitionSpec("expert"),
    PartitionSpec(),
  )

  def region(x, gates, chosen, up, down):
    return expert_exchange.exchanged(exchange, x, gates, chosen, (up, down))

  whole = jax.shard_map(
    region,
    in_specs=(tokens, tokens, tokens, experts, experts),
    out_specs=Exchanged(tokens, each, each),
    check_vma=False,
  )

  @jax.jit
  def run(x, gates, chosen, up, down, dy):
    def loss(x, gates, up, down):
      found = whole(x, gates, chosen, up, down)
      return jnp.sum(found.tokens_nD * dy), found

    gradients, found = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(x, gates, up, down)
    return found, gradients

  return run


@pytest.fixture(scope="module")
def mesh():
  kinds = (jax.sharding.AxisType.Auto,) * 2
  made = jax.make_mesh((DATA, DEVICES), ("data", "expert"), axis_types=kinds)
  with jax.enable_x64(True), jax.set_mesh(made):
    yield made


PROGRAMS = {
  "gathered": ("gathered", 1.25),
  "rounds": ("rounds", 1.25),
  "small buffers, their unused rows NaN": ("rounds", 0.3, np.nan),
  "ragged": ("rounds", 2.0, np.nan, "ragged"),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def compiled(mesh, request):
  return request.param, program(*PROGRAMS[request.param])


@pytest.mark.parametrize("name", ROUTED)
def test_results_and_gradients_are_those_of_a_loop_over_experts(compiled, name):
  kind, run = compiled
  chosen = ROUTED[name].astype(np.int32)
  expected, of_expected = in_numpy(X, GATES, chosen, UP, DOWN, DY)
  found, gradients = run(X, GATES, chosen, UP, DOWN, DY)
  np.testing.assert_allclose(found.tokens_nD, expected, rtol=0, atol=1e-12)
  for one, other in zip(gradients, of_expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)
  size = TOKENS // (DATA * DEVICES) * EACH  # assignments of a device
  of_pairs = [
    np.sum(rows // (EXPERTS // DEVICES) == device)
    for rows in np.split(chosen.reshape(-1), DATA * DEVICES)
    for device in range(DEVICES)
  ]
  assert float(found.fullest) == pytest.approx(max(of_pairs) * DEVICES / size)
  buffer = {"rounds": 8, "small buffers, their unused rows NaN": 8, "ragged": 8}.get(kind)
  assert float(found.rounds) == (-(-max(of_pairs) // buffer) if buffer else 1)


def test_one_device_has_all_experts(mesh):
  exchange = Exchange("rounds", "", 1, EXPERTS, 1.25, compute, "tiles", 8)
  chosen = ROUTED["drawn"].astype(np.int32)
  weights = jnp.asarray(UP), jnp.asarray(DOWN)
  run = jax.jit(functools.partial(expert_exchange.exchanged, exchange))
  found = run(X, GATES, chosen, weights)
  expected, _ = in_numpy(X, GATES, chosen, UP, DOWN, DY)
  np.testing.assert_allclose(found.tokens_nD, expected, rtol=0, atol=1e-12)
  assert (float(found.rounds), float(found.fullest)) == (0, 1)


@pytest.mark.parametrize(
  ("capacity", "tokens", "each", "rows"),
  [(1.25, 64, 2, 40), (0.01, 64, 2, 8), (100.0, 64, 2, 128), (100.0, 64, 4, 128)],
)
def test_buffers_have_the_mean_times_the_capacity_and_at_most_what_can_be_sent(
  capacity, tokens, each, rows
):
  exchange = Exchange("rounds", "expert", 4, 2, capacity, compute, "tiles", 8)
  assert exchange.buffer(tokens, each) == rows
