"""A layer of experts beside plain loops over experts; tiles beside ragged_dot. Prints a table.

  python -m benchmarks.experts

Value and gradients (of the tokens, the gates and the kernels) of one layer in float32 on one
device, 4,096 tokens of width 256, each with 2 of 8 experts of width 512. The loops are plain JAX
and import nothing of the project: `every token` sends each token through each expert and multiplies
by its gate, which is 0 for most; `own tokens` is a loop in Python over experts that picks each
one's tokens, compiled by itself for each number of tokens, as eager frameworks do it. All ways take
turns; the table has the median of each one's processor time, and its ratio to that of `own tokens`.
They must agree to rounding, or the exit code is 1.
"""

import functools
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from benchmarks.timing import in_turns, table
from partitioning.parallel import expert_exchange
from partitioning.parallel.expert_exchange import Exchange, grouped_matmul

TOKENS, WIDTH, HIDDEN, EXPERTS, EACH = 4096, 256, 512, 8, 2
ROUNDS = 7
TOLERANCE = 1e-5  # relative L2: float32 rounding of sums of thousands of terms
TILE = 128


def mlp(x, gate, up, down):
  """Returns down(silu(gate(x)) * up(x))."""
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def every_token(x, gates, chosen, kernels):
  """Returns the sum over experts of each token's gate times the MLP."""
  hot = jax.nn.one_hot(chosen, len(kernels[0]), dtype=x.dtype)
  gate_of = jnp.sum(hot * gates[..., None], axis=1).T

  def add(total, inputs):
    gate, *own = inputs
    return total + gate[:, None] * mlp(x, *own), None

  return jax.lax.scan(add, jnp.zeros_like(x), (gate_of, *kernels))[0]


def ours(way, x, gates, chosen, kernels):
  """Returns the project's, of one device."""

  def compute(rows, weights, groups, how):
    product = functools.partial(grouped_matmul, sizes_E=groups.sizes_E, how=how)
    hidden = jax.nn.silu(product(rows, weights[0])) * product(rows, weights[1])
    return product(hidden, weights[2])

  experts = len(kernels[0])
  exchange = Exchange("rounds", "", 1, experts, 1.25, compute, way, TILE)
  return expert_exchange.exchanged(exchange, x, gates, chosen, kernels).tokens_nD


def of_a_loss(function):
  """Returns value and gradients of the sum of squares of what a function returns, compiled."""

  def loss(x, gates, kernels, chosen):
    return jnp.sum(function(x, gates, chosen, kernels) ** 2)

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@jax.jit
def _one_expert(x, gate, kernels):
  return jax.vjp(lambda x, gate, kernels: gate[:, None] * mlp(x, *kernels), x, gate, kernels)


@jax.jit
def _back(pull, dy):
  return pull(dy)


def own_tokens(x, gates, kernels, chosen):
  """Returns value and gradients by a loop in Python; each expert's tokens are picked by NumPy."""
  tokens, gates_of = np.asarray(chosen), np.asarray(gates)
  total, kept = np.zeros(x.shape, x.dtype), []
  x = np.asarray(x)
  for expert in range(len(kernels[0])):
    rows, slots = np.nonzero(tokens == expert)
    own = tuple(kernel[expert] for kernel in kernels)
    y, pull = _one_expert(x[rows], gates_of[rows, slots], own)
    total[rows] += np.asarray(y)
    kept.append((rows, slots, pull))
  dx, dgates, dkernels = np.zeros_like(x), np.zeros_like(gates_of), []
  dy = 2 * total
  for rows, slots, pull in kept:
    of_rows, of_gates, of_kernels = _back(pull, dy[rows])
    dx[rows] += np.asarray(of_rows)
    dgates[rows, slots] = np.asarray(of_gates)
    dkernels.append(of_kernels)
  stacked = tuple(jnp.stack(one) for one in zip(*dkernels, strict=True))
  return np.sum(total**2), (dx, dgates, stacked)


def inputs(n=TOKENS, d=WIDTH, f=HIDDEN, e=EXPERTS):
  """Returns tokens [n, d], gates, kernels of e experts and those of each token, drawn unevenly."""
  draw = np.random.default_rng(0)
  x = draw.standard_normal((n, d), np.float32)
  scores = draw.standard_normal((n, e)) + draw.standard_normal(e) / 2
  chosen = np.argsort(-scores, axis=1)[:, :EACH].astype(np.int32)
  gates = draw.uniform(0.2, 1, chosen.shape).astype(np.float32)
  shapes = (e, d, f), (e, d, f), (e, f, d)
  kernels = tuple(draw.standard_normal(s, np.float32) * s[1] ** -0.5 for s in shapes)
  return jax.tree.map(jnp.asarray, (x, gates, kernels, chosen))


def distance(found, wanted) -> float:
  """Returns the largest relative L2 distance of two trees of arrays."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  return max(
    float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))
    for a, b in pairs
  )


def main(argv: list[str]) -> int:
  """Prints the table; returns the exit code."""
  del argv
  ways = {
    "own tokens": own_tokens,
    "every token": of_a_loss(every_token),
    "ours, tiles": of_a_loss(functools.partial(ours, "tiles")),
    "ours, ragged": of_a_loss(functools.partial(ours, "ragged")),
  }
  given = inputs()
  results = {name: jax.block_until_ready(way(*given)) for name, way in ways.items()}
  times = in_turns({name: functools.partial(way, *given) for name, way in ways.items()}, ROUNDS)
  flops = 3 * 3 * 2 * TOKENS * EACH * WIDTH * HIDDEN
  plain, rows, wrong = statistics.median(times["own tokens"]), [], []
  for name, seconds in times.items():
    median = statistics.median(seconds)
    numbers = f"{median:.3f}", f"{median / plain:.2f}", f"{flops / median / 1e9:.1f}"
    rows.append([name, *numbers])
    if (apart := distance(results[name], results["own tokens"])) > TOLERANCE:
      wrong.append(f"{name}: differs from the loop over its own tokens by {apart:.1e}")
  print(f"{TOKENS} tokens, {EACH} of {EXPERTS} experts, jax {jax.__version__}")
  print(table(("way", "seconds", "ratio", "useful Gflop/s"), rows))
  print("\n".join(wrong), file=sys.stderr)
  return 1 if wrong else 0


if __name__ == "__main__":
  app.run(main)
