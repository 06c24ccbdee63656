"""HBM traffic of Gated DeltaNet's recurrence as compiled for a TPU, beside that of a fused kernel.

  pip install -r requirements/plan.txt
  python -m benchmarks.recurrence_traffic

Compiles it, and it with its gradient, for one v6e that is not there, and counts what the optimized
HLO reads and writes. A fused kernel at its best reads its arguments and writes its results once in
each pass, and writes and reads the states between chunks. Takes about ten minutes of a core.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax.sharding import SingleDeviceSharding

from benchmarks.timing import table
from commands import plan_process
from models import recurrence
from planning import aot, step_time
from planning.interconnect import Places
from planning.topology import parse
from runtime import hlo
from runtime.chips import Rates

# Of Qwen3-Next 80B: heads of keys and of values, their size; rows and tokens of a device.
GROUPS, HEADS, SIZE, ROWS, TOKENS = 16, 32, 128, 4, 4096


def outputs(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array):
  """Returns the outputs of all tokens, from a state of zeros."""
  zeros = jnp.zeros((ROWS, HEADS, SIZE, SIZE), jnp.float32)
  found, _ = recurrence.recurrence(q, k, v, log_decay, beta, zeros, delta=True)
  return found.astype(jnp.bfloat16)


def with_gradients(of_output: jax.Array, *given: jax.Array):
  """Returns the outputs, and the gradients of the arguments."""
  found, backward = jax.vjp(outputs, *given)
  return found, backward(of_output)


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  topology = parse("v6e:1x1")
  sharding = SingleDeviceSharding(aot.start(topology, 1, ())[0])
  tokens = (ROWS, TOKENS)
  shapes = [(GROUPS, SIZE), (GROUPS, SIZE), (HEADS, SIZE), (HEADS,), (HEADS,)]
  given = [
    jax.ShapeDtypeStruct((*tokens, *shape), jnp.float32, sharding=sharding) for shape in shapes
  ]
  out = jax.ShapeDtypeStruct((*tokens, HEADS, SIZE), jnp.bfloat16, sharding=sharding)
  arguments, results = (sum(x.size * x.dtype.itemsize for x in of) for of in (given, [out]))
  states = TOKENS // recurrence.CHUNK * ROWS * HEADS * SIZE * SIZE * 4
  where = Places(topology, np.zeros((1, 3), int), np.zeros(1, int))
  lines = []
  for name, function, its, least in (
    ("forward", outputs, given, arguments + results),
    ("with its gradient", with_gradients, [out, *given], 3 * arguments + 2 * results + 2 * states),
  ):
    text = jax.jit(function).lower(*its).compile().as_text()
    times = step_time.times(hlo.parse(text), [], where, topology.chip, Rates())
    gib = times.work.bytes / 2**30
    lines.append([name, f"{gib:.2f}", f"{least / 2**30:.2f}", f"{times.work.flops / 1e12:.3f}"])
    lines[-1].append(f"{1e3 * times.step:.1f}")
  print(table(["", "GiB of HBM", "a fused kernel's", "TFLOP", "ms, predicted"], lines))


if __name__ == "__main__":
  os.environ.update(plan_process.ENVIRONMENT)  # before the compiler for TPUs is loaded
  app.run(main)
