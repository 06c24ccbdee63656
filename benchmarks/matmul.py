r"""A batch of matmuls by NumPy, on one device and on all devices. Prints a table.

  python -m benchmarks.matmul [--batch=8] [--size=4096]

C[b] = X[b] @ Y[b] for b in 0..batch-1, float32, each matrix size x size. On one device and on all
of them the matmul is compiled by `jax.jit`, at the highest precision, with arrays placed
beforehand; over all devices the batch is split, and the program must have no collectives. Times are
the best of three runs after a warm-up. The results must equal NumPy's up to rounding, or the exit
code is 1.

The default size is 4096 on an accelerator and 2048 on a CPU, where 4096 takes a minute or more.
Without an accelerator, 8 CPU devices are simulated: they share the cores, and XLA already uses all
cores for one device, so no speed-up is expected there.
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import best_seconds, table
from partitioning.mesh import make_mesh
from runtime import devices
from runtime.collectives import collectives

_BATCH = flags.DEFINE_integer("batch", 8, "Matmuls; a multiple of the devices.", 1)
_SIZE = flags.DEFINE_integer("size", None, "Rows and columns of a matrix.", 1)
# Relative L2 distance to NumPy's result: float32 rounding of sums of thousands of terms.
TOLERANCE = 1e-5


def main(argv: list[str]) -> int:
  """Prints the table; returns the exit code."""
  del argv
  [started] = devices.start({"data": -1})
  mesh, count = make_mesh(started.sizes), jax.device_count()
  if _BATCH.value % count:
    raise ValueError(f"--batch={_BATCH.value} is not a multiple of the {count} devices")
  size = _SIZE.value or (2048 if started.platform == "cpu" else 4096)
  draw, shape = np.random.default_rng(0), (_BATCH.value, size, size)
  x, y = (draw.standard_normal(shape, np.float32) for _ in range(2))
  right = np.matmul(x, y)
  seconds, good = {"NumPy": best_seconds(lambda: np.matmul(x, y), 3)}, True
  layouts = {
    "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    f"all {count} devices": NamedSharding(mesh, P("data")),
  }
  matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  for name, sharding in layouts.items():
    operands = jax.device_put((x, y), sharding)
    compiled = jax.jit(matmul, out_shardings=sharding).lower(*operands).compile()
    assert not (sent := collectives(compiled.as_text(), mesh)), f"{name} communicates: {sent}"
    seconds[name] = best_seconds(functools.partial(compiled, *operands), 3)
    error = np.linalg.norm(compiled(*operands) - right) / np.linalg.norm(right)
    if error > TOLERANCE:
      print(f"{name}: differs from NumPy's product by {error:.1e} of it", file=sys.stderr)
      good = False
  kind = "simulated CPU device" if started.simulated else jax.devices()[0].device_kind
  print(f"{_BATCH.value} products of {size} x {size} by {size} x {size}, float32")
  print(f"{count} x {kind}, {os.cpu_count()} cores, jax {jax.__version__}, numpy {np.__version__}")
  flops = 2 * _BATCH.value * size**3
  rows = [
    [name, f"{took:.4f}", f"{seconds['NumPy'] / took:.1f}x", f"{flops / took / 1e9:,.0f}"]
    for name, took in seconds.items()
  ]
  print(table(("", "seconds", "speed-up", "Gflop/s"), rows))
  return 0 if good else 1


if __name__ == "__main__":
  app.run(main)
