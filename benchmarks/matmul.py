r"""A batch of matmuls by NumPy, on one device and on all devices. Prints a table.

  python -m benchmarks.matmul [--batch=8] [--size=4096] [--repeats=3]

C[b] = X[b] @ Y[b] for b in 0..batch-1, float32, each matrix size x size. On one device and on all
of them the matmul is compiled by `jax.jit`, at the highest precision, with arrays placed
beforehand; over all devices the batch is split, and the compiled text must show no communication.
Times are the best of `repeats` runs after a warm-up. The results must equal NumPy's up to rounding,
or the exit code is 1.

The default size is 4096 on an accelerator and 2048 on a CPU, where 4096 takes a minute or more.
Without an accelerator, 8 CPU devices are simulated (--devices): they share the cores, and XLA
already uses all cores for one device, so no speed-up is expected there.
"""

import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning.mesh import make_mesh
from runtime import devices

_BATCH = flags.DEFINE_integer("batch", 8, "Matmuls; a multiple of the devices.", 1)
_SIZE = flags.DEFINE_integer("size", None, "Rows and columns of a matrix.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs; the best counts.", 1)
_DEVICES = flags.DEFINE_integer("devices", -1, "Devices; -1 for all there are, or 8 simulated.")
_SIMULATE = flags.DEFINE_bool(
  "simulate", False, "Use simulated CPU devices even if there is a GPU or TPU."
)

# Relative L2 distance to NumPy's result: float32 rounding of sums of thousands of terms.
TOLERANCE = 1e-5
COMMUNICATION = re.compile(
  r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-|\b(send|recv)\("
)


def best_seconds(function, *operands) -> float:
  """Returns the seconds of the fastest of the runs after the first."""
  seconds = []
  for _ in range(_REPEATS.value + 1):
    began = time.perf_counter()
    jax.block_until_ready(function(*operands))
    seconds.append(time.perf_counter() - began)
  return min(seconds[1:])


def compile_product(sharding: jax.sharding.Sharding, shape: tuple[int, ...]):
  """Returns the matmul compiled for operands and result with this sharding."""
  operand = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  def product(x, y):
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)

  return jax.jit(product, out_shardings=sharding).lower(operand, operand).compile()


def main(argv: list[str]) -> int:
  """Prints the table; returns the exit code."""
  del argv
  [started] = devices.start({"data": _DEVICES.value}, simulate=_SIMULATE.value)
  count = jax.device_count()
  if _BATCH.value % count:
    raise ValueError(f"--batch={_BATCH.value} is not a multiple of the {count} devices")
  size = _SIZE.value or (2048 if started.platform == "cpu" else 4096)
  generator = np.random.default_rng(0)
  shape = (_BATCH.value, size, size)
  x, y = (generator.standard_normal(shape, np.float32) for _ in range(2))

  kind = "simulated CPU device" if started.simulated else jax.devices()[0].device_kind
  print(f"{_BATCH.value} products of {size} x {size} by {size} x {size}, float32")
  print(f"{count} x {kind}, {os.cpu_count()} cores, jax {jax.__version__}, numpy {np.__version__}")
  numpy_seconds = best_seconds(np.matmul, x, y)
  right = np.matmul(x, y)
  rows, good = [("NumPy", numpy_seconds)], True
  layouts = {
    "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    f"all {count} devices": NamedSharding(make_mesh(started.sizes), P("data")),
  }
  for name, sharding in layouts.items():
    product = compile_product(sharding, shape)
    sent = [line for line in product.as_text().splitlines() if COMMUNICATION.search(line)]
    assert not sent, f"{name}: the devices communicate: {sent}"
    operands = jax.device_put((x, y), sharding)
    rows.append((name, best_seconds(product, *operands)))
    error = np.linalg.norm(product(*operands) - right) / np.linalg.norm(right)
    if error > TOLERANCE:
      print(f"{name}: differs from NumPy's product by {error:.1e} of it", file=sys.stderr)
      good = False

  print(f"\n{'':<14}  seconds  speed-up  Gflop/s")
  for name, seconds in rows:
    rate = 2 * _BATCH.value * size**3 / seconds / 1e9
    print(f"{name:<14}  {seconds:7.4f}  {numpy_seconds / seconds:7.1f}x  {rate:7,.0f}")
  if started.simulated:
    print(
      "\nSimulated devices share this machine's cores: no speed-up is to be expected from them."
    )
  return 0 if good else 1


if __name__ == "__main__":
  app.run(main)
