"""Tokens that are sent to their experts: rows in order, grouped matmuls, exchanges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from partitioning.parallel import expert_exchange
from partitioning.parallel.expert_exchange import Exchange, Exchanged, Places, Way, grouped_matmul

# ------------------------------ expert rows ------------------------------


def test_assignments_are_in_order_of_their_experts_those_of_others_last():
  experts = jnp.asarray([2, -1, 0, 2, 1, 7, 0], jnp.int32)
  found = expert_exchange.in_order(experts, 3)
  order = np.asarray(found.order_A)
  assert order[:5].tolist() == [2, 6, 4, 0, 3]  # of equal experts the first comes first
  assert sorted(order[5:].tolist()) == [1, 5]
  assert np.asarray(found.inverse_A)[order].tolist() == list(range(7))
  assert found.starts_E1.tolist() == [0, 2, 3, 5]
  assert found.counts.tolist() == [2, 1, 2]


def test_groups_start_at_tiles_and_the_rows_between_have_no_expert():
  counts = jnp.asarray([3, 0, 5], jnp.int32)
  groups, within, used, starts = expert_exchange.rows_in_order(counts, 8, Way("tiles", 4))
  assert starts.tolist() == [0, 4, 4, 12]
  expected = [0, 0, 0, 3, 2, 2, 2, 2, 2, 3, 3, 3]
  assert groups.expert_X.tolist()[:12] == expected
  assert set(groups.expert_X.tolist()[12:]) == {3}
  assert within[used].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_each_gather_is_the_other_s_transpose():
  # Three rows, of which row 0 goes to places 3 and 1, row 2 to place 0; place 2 has none.
  to = Places(jnp.asarray([2, 0, 0, 0], jnp.int32), jnp.asarray([True, True, False, True]))
  back = Places(
    jnp.asarray([[3, 1], [0, 0], [0, 0]], jnp.int32),
    jnp.asarray([[True, True], [False, False], [True, False]]),
  )
  matrix = np.array([[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]], np.float32)
  x, y = np.arange(6.0).reshape(3, 2) + 1, np.arange(8.0).reshape(4, 2) - 3
  x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
  spread, pull = jax.vjp(lambda x: expert_exchange.spread(x, to, back), x)
  np.testing.assert_array_equal(spread, matrix @ x)
  np.testing.assert_array_equal(pull(y)[0], matrix.T @ y)
  summed, pull = jax.vjp(lambda y: expert_exchange.summed(y, to, back), y)
  np.testing.assert_array_equal(summed, matrix.T @ y)
  np.testing.assert_array_equal(pull(x)[0], matrix @ x)


# ------------------------------ grouped matmul ------------------------------

SIZES = np.array([5, 0, 17, 9], np.int32)
ROWS, INPUTS, OUTPUTS = 40, 6, 7
WAYS = {
  "tiles of 8": Way("tiles", 8),
  "tiles of 16": Way("tiles", 16),
  "ragged": Way("ragged"),
  "megablox": Way("ragged", interpret=True),
}


def groups_of(sizes, how, rows):
  """Returns the group of each row of the buffer, -1 where it has none."""
  starts = np.asarray(expert_exchange.starts(jnp.asarray(sizes), how))
  found = np.full(rows, -1)
  for group, size in enumerate(sizes):
    assert starts[group] % how.tile == 0
    found[starts[group] : starts[group] + size] = group
  return found


@pytest.mark.parametrize(
  ("name", "sizes"),
  [
    *((name, SIZES) for name in WAYS),
    *(("tiles of 16", [0, 40, 0, 0]), ("tiles of 8", [0] * 4), ("megablox", [0] * 4)),
  ],
)
def test_products_and_gradients_are_numpy_s(name, sizes):
  how, sizes, draw = WAYS[name], np.asarray(sizes, np.int32), np.random.default_rng(0)
  rows = expert_exchange.padded_rows(ROWS, len(sizes), how)
  group = groups_of(sizes, how, rows)
  used = (group >= 0)[:, None]
  x = np.where(used, draw.normal(size=(rows, INPUTS)), 0).astype(np.float32)
  dy = np.where(used, draw.normal(size=(rows, OUTPUTS)), 0).astype(np.float32)
  kernels = draw.normal(size=(len(sizes), INPUTS, OUTPUTS)).astype(np.float32)
  y, pull = jax.vjp(
    lambda x, kernels: expert_exchange.grouped_matmul(x, kernels, jnp.asarray(sizes), how),
    *(jnp.asarray(x), jnp.asarray(kernels)),
  )
  dx, dkernels = pull(jnp.asarray(dy))
  of_row = kernels[group]
  np.testing.assert_allclose(y, np.where(used, np.einsum("xa,xab->xb", x, of_row), 0), atol=2e-6)
  expected = np.where(used, np.einsum("xb,xab->xa", dy, of_row), 0)
  np.testing.assert_allclose(np.where(used, dx, 0), expected, atol=3e-6)
  for number in range(len(sizes)):
    mine = group == number
    np.testing.assert_allclose(dkernels[number], x[mine].T @ dy[mine], atol=1e-5)


def test_rows_past_the_last_group_may_hold_anything():
  how, sizes = Way("ragged"), jnp.asarray(SIZES)
  behind = np.arange(ROWS) >= SIZES.sum()
  x = np.where(behind[:, None], np.nan, 1.0).astype(np.float32) * np.ones(INPUTS, np.float32)
  kernels = jnp.ones((4, INPUTS, OUTPUTS))
  y, pull = jax.vjp(
    lambda x, k: expert_exchange.grouped_matmul(x, k, sizes, how), jnp.asarray(x), kernels
  )
  dy = jnp.where(behind[:, None], jnp.nan, jnp.ones_like(y))
  dx, dkernels = pull(dy)
  assert np.isfinite(y).all()
  assert np.isfinite(dx).all()
  np.testing.assert_allclose(dkernels, np.broadcast_to(SIZES[:, None, None], dkernels.shape))


def test_weight_gradients_are_added_up_in_float32():
  how, count = Way("tiles", 8), 4096
  x = jnp.ones((count + 8, 1), jnp.bfloat16)
  function = lambda k: expert_exchange.grouped_matmul(  # noqa: E731
    x, k, jnp.asarray([count], jnp.int32), how
  )
  _, pull = jax.vjp(function, jnp.ones((1, 1, 1), jnp.bfloat16))
  [found] = pull(jnp.ones((count + 8, 1), jnp.bfloat16))
  assert float(found[0, 0, 0]) == count  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize(
  ("rows", "groups", "most", "tile"),
  [(4096, 8, 128, 128), (256, 8, 128, 32), (40, 8, 128, 8), (4096, 1, 64, 64)],
)
def test_tiles_are_about_as_long_as_groups(rows, groups, most, tile):
  assert expert_exchange.way("tiles", rows, groups, most) == Way("tiles", tile)
  assert expert_exchange.way("ragged", rows, groups, most) == Way("ragged")


# ------------------------------ expert exchange ------------------------------

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


def sent_among_nans(self, x, places):
  """Sends rows in buffers whose unused rows are no numbers."""
  rows = expert_exchange.taken(x, places)
  there = places.there.reshape(-1, *(1,) * (rows.ndim - 1))
  return self.back(jnp.where(there, rows, jnp.asarray(np.nan, rows.dtype)))


def program(name, capacity, way="tiles"):
  """Returns a function on a mesh of data=2 x expert=4 -> (results, gradients, rounds, fullest)."""
  exchange = Exchange(name, "expert", DEVICES, EXPERTS // DEVICES, capacity, compute, way, 8)
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
  "small buffers, their unused rows NaN": ("rounds", 0.3),
  "ragged": ("rounds", 2.0, "ragged"),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def compiled(mesh, request):
  with pytest.MonkeyPatch.context() as patch:
    if request.param not in ("gathered", "rounds"):
      patch.setattr(expert_exchange._Round, "_sent", sent_among_nans)
    yield request.param, program(*PROGRAMS[request.param])


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


@pytest.mark.parametrize(
  ("capacity", "tokens", "each", "rows"),
  [(1.25, 64, 2, 40), (0.01, 64, 2, 8), (100.0, 64, 2, 128), (100.0, 64, 4, 128)],
)
def test_buffers_have_the_mean_times_the_capacity_and_at_most_what_can_be_sent(
  capacity, tokens, each, rows
):
  exchange = Exchange("rounds", "expert", 4, 2, capacity, compute, "tiles", 8)
  assert exchange.buffer(tokens, each) == rows
