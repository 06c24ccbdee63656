"""What work and communication cost on this machine."""

import functools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import rules
from reports.tour import scene
from reports.tour.launching import ROOT
from reports.tour.scene import DEVICES, Scene, Shown, mesh_of

TITLE = "The cost"
OPENING = """
The cost of a layout shows in seconds. Simulated devices share the cores of one machine. Their
times show what the parts of a program cost, but not how a real machine would scale.
"""


def products(size=512):
  """Multiplies 8 pairs of matrices: by NumPy, on one device, and over all devices.

  This is `benchmarks/matmul.py` with smaller matrices. It compares the products with NumPy's.
  """
  simulated = ["--simulate"] if jax.default_backend() == "cpu" else []
  command = [sys.executable, "-m", "benchmarks.matmul", f"--size={size}", *simulated]
  return size, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _products(result) -> Shown:
  size, done = result
  what = f"{size} x {size} matrices on one device and on all"
  if done.returncode == 0:
    finding = f"{what}: the products and NumPy's are the same, to rounding."
  elif "differs from NumPy's" in done.stderr:
    finding = f"{what}: the products and NumPy's are NOT the same: {done.stderr.strip()}"
  else:  # such as a TPU, which one process has to itself
    finding = "The benchmark did not run here; run it by itself: python -m benchmarks.matmul"
  return Shown([finding], measured_text=done.stdout.strip() or done.stderr.strip())


def gather_and_reduce(lengths=(1 << 11, 1 << 16, 1 << 21), axis="data"):
  """Measures an all-gather and an all-reduce that leave the same array on every device.

  In the gather each of 8 devices begins with an eighth of the array, in the sum with a full one.
  """
  mesh = mesh_of(data=DEVICES)
  kinds = {
    "all-gather": functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True),
    "all-reduce": functools.partial(jax.lax.psum, axis_name=axis),
  }
  results = []
  for length in lengths:
    for kind, collective in kinds.items():
      count = length if kind == "all-gather" else length * DEVICES
      x = jax.device_put(jnp.ones(count), NamedSharding(mesh, P("data")))
      mapped = jax.shard_map(collective, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
      compiled = jax.jit(mapped).lower(x).compile()
      results.append((mesh, kind, compiled, best_seconds(compiled, x)))
  return results


def best_seconds(compiled, x, repeats=5):
  """Returns the seconds of the fastest run, after one to warm up."""
  seconds = []
  for _ in range(repeats + 1):
    began = time.perf_counter()
    jax.block_until_ready(compiled(x))
    seconds.append(time.perf_counter() - began)
  return min(seconds[1:])


def _gather_and_reduce(results) -> Shown:
  lines, runs = [], {}
  for mesh, kind, compiled, seconds in results:
    size = sum(row.bytes for row in scene.sent(compiled, mesh))
    found = " and ".join(row.kind for row in scene.sent(compiled, mesh)) or "nothing"
    runs.setdefault(kind, []).append((found, size, seconds))
    lines.append(
      f"{kind:<11} {rules.size_text(size):>10} {1000 * seconds:9.3f} ms "
      f"{size / seconds / 1e9:7.2f} GB/s a device"
    )
  findings, measured = [], []
  for kind, ((found, first_size, first), *_, (_, last_size, last)) in runs.items():
    findings.append(
      f"{kind}: the program sends {found}, from {rules.size_text(first_size)} to "
      f"{rules.size_text(last_size)} a device."
    )
    if first_size:
      measured.append(
        f"{kind}: {last_size / first_size:,.0f} times the bytes take {last / first:,.1f} times as "
        "long."
      )
  return Shown(findings, measured_text="\n".join(lines), measured=measured)


SCENES = (
  Scene("A batch of matmuls", products, _products),
  Scene("All-gather and all-reduce", gather_and_reduce, _gather_and_reduce, parts=(best_seconds,)),
)
