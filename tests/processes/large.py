"""Collectives of large arrays over two processes, compared with NumPy; prints what is wrong.

jax#40830 reports wrong numbers of a reduce-scatter with large chunks over gloo, jax#40831 that
they time out after 30 s; `partitioning.parallel.collectives` does without.
"""

import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.parallel import collectives
from processes import coordination as groups
from runtime import devices

P = PartitionSpec
MEGABYTE = 2**20
# What exchanges the chunks, where it has another name: gloo's reduce-scatter is not to be used.
BY = {"reduce-scatter": "all-to-all", "gradient": "all-to-all"}


def operands(count: int, chunk_bytes: int) -> np.ndarray:
  """Returns float32 [count, elements] of whole numbers, whose sums are exact; each row differs."""
  elements = count * (chunk_bytes // 4)
  numbers = np.arange(elements, dtype=np.uint32)
  return np.stack(
    [
      (numbers * np.uint32(2654435761 + 2 * d) >> np.uint32(20)).astype(np.float32)
      for d in range(count)
    ]
  )


def scatter(x_CE):
  """Sums over the devices, each of which keeps a chunk; as training does it."""
  return collectives.reduce_scatter(x_CE[0], ("x",), 0)


def gradient(x_CE):
  """The gradient of a gathered shard, whose transpose is that sum."""
  chunk = x_CE[0, : x_CE.shape[1] // jax.lax.axis_size("x")]
  _, transpose = jax.vjp(lambda chunk: collectives.all_gather(chunk, ("x",), 0), chunk)
  return transpose(x_CE[0])[0]


def reduce(x_CE):
  """Sums over the devices, by hand."""
  return jax.lax.psum(x_CE[0], "x")


def gather(x_CE):
  """Gives every device all rows."""
  return jax.lax.all_gather(x_CE[0], "x")


def exchange(x_CE):
  """Gives device d the d-th chunk of every row."""
  return jax.lax.all_to_all(x_CE[0], "x", 0, 0, tiled=True)


def wrong(mesh: Mesh, chunk_bytes: int) -> list[str]:
  """Returns a line for each collective that gives other numbers than NumPy."""
  count = mesh.size
  host = operands(count, chunk_bytes)
  sharding = NamedSharding(mesh, P("x"))
  x_CE = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
  chunks = host.reshape(count, count, -1)
  total = host.sum(0)
  cases = {
    "reduce-scatter": (scatter, P("x"), lambda d: total.reshape(count, -1)[d]),
    "gradient": (gradient, P("x"), lambda d: total.reshape(count, -1)[d]),
    "all-reduce": (reduce, P(), lambda d: total),
    "all-gather": (gather, P(), lambda d: host),
    "all-to-all": (exchange, P("x"), lambda d: chunks[:, d].reshape(-1)),
  }
  lines = []
  place = {device: d for d, device in enumerate(mesh.devices.flat)}
  for name, (function, spec, expected) in cases.items():
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(x_CE).compile()
    text = compiled.as_text()
    if BY.get(name, name) not in text or "reduce-scatter" in text:
      lines.append(f"{name} is not as it should be in the program")
    began = time.monotonic()
    for shard in compiled(x_CE).addressable_shards:
      d = place[shard.device]
      bad = np.count_nonzero(np.asarray(shard.data) != expected(d))
      if bad:
        lines.append(f"{name}, {chunk_bytes} bytes per chunk, device {d}: {bad} numbers are wrong")
    seconds = time.monotonic() - began
    if seconds > 20:
      lines.append(f"{name}, {chunk_bytes} bytes per chunk: took {seconds:.0f} s")
  summed = jax.jit(lambda x: x.sum(0), out_shardings=sharding)(x_CE)
  for shard in summed.addressable_shards:
    if (np.asarray(shard.data) != total[shard.index]).any():
      lines.append(f"a sum that the compiler splits, {chunk_bytes} bytes per chunk: wrong")
  return lines


if __name__ == "__main__":
  joined = groups.connect(start_timeout_seconds=60, heartbeat_seconds=60)
  devices.start({"data": 2 * joined.count}, processes=joined.count)
  everyone = jax.devices()
  for argument in sys.argv[1:]:
    per_process, megabytes = map(int, argument.split("x"))
    chosen = [d for d in everyone if d in everyone[::2] or per_process == 2]
    found = wrong(Mesh(np.array(chosen), ("x",)), megabytes * MEGABYTE + 4 * 7)
    print("\n".join([*found, f"compared {argument}"]), flush=True)
  groups.part()
