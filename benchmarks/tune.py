"""Times block sizes of attention on the device at hand; prints a row of models/attention.py.

  python -m benchmarks.tune [--rows=2] [--length=2048] [--heads=4] [--head_size=64]

Forward and backward of one attention, of complete rows, with each candidate in turns; the best of
`times` rounds counts, in processor time on a CPU. Blockwise attention is tried everywhere, splash
on TPUs. A size that does not compile (it needs too much on-chip memory) is left out with a note. If
no size is left, the exit code is 1.
"""

import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.timing import in_turns, resolved
from models import attention, fused_attention, model_spec
from partitioning.constraints import activation_layout
from partitioning.dtypes import wide_dtype
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.attention_blocks import Blocks, Scores
from partitioning.parallel.splash_kernel import LANES, SplashBlocks

_ROWS = flags.DEFINE_integer("rows", 2, "Rows.", 1)
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of a row.", 1)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads of queries, and of keys and values.", 1)
_HEAD_SIZE = flags.DEFINE_integer("head_size", 64, "Size of a head.", 1)
_DTYPE = flags.DEFINE_enum("tune_dtype", "float32", ["float32", "bfloat16"], "Of all arrays.")
_TIMES = flags.DEFINE_integer("times", 3, "Rounds; the best counts.", 1)
SIZES = (64, 128, 256, 512, 1024, 2048)


def candidates(platform: str) -> dict[tuple[str, int], Callable]:
  """Returns (kernel, tokens of a block) -> attention of queries, keys and values."""
  slots_BT = jnp.arange(_LENGTH.value, dtype=jnp.int32)[None]

  def blockwise(size, q, k, v):
    scores = Scores(q.shape[-1] ** -0.5, wide_dtype(q.dtype))
    how = Blocks(scores, size, size, complete=True)
    return fused_attention.attention(how, q, k, v, slots_BT)

  def splash(size, q, k, v):
    how = SplashBlocks(q.shape[-1] ** -0.5, 0.0, (None,), size, complete=True)
    return fused_attention.attention(how, q, k, v)

  kernels = {"blockwise": blockwise} | ({"splash": splash} if platform == "tpu" else {})
  return {
    (name, size): functools.partial(function, size)
    for name, function in kernels.items()
    for size in SIZES
    if size <= _LENGTH.value and (name == "blockwise" or size >= LANES)
  }


def compiled(attend: Callable, arrays: list[jax.Array]) -> Callable | None:
  """Returns forward and backward of an attention, compiled; None if it does not fit the device."""

  def both(q, k, v, d_out):
    out, back = jax.vjp(attend, q, k, v)
    return out, back(d_out)

  try:
    return jax.jit(both).lower(*arrays).compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None


def main(argv: list[str]) -> int:
  """Prints the times and the row; returns the exit code."""
  del argv
  device = jax.devices()[0]
  shape = (_ROWS.value, _LENGTH.value, _HEADS.value, _HEAD_SIZE.value)
  sizes = {"heads": _HEADS.value, "kv_heads": _HEADS.value, "head_size": _HEAD_SIZE.value}
  config = resolved("lm", {f"model.{name}": size for name, size in sizes.items()})
  mesh = make_mesh(dict.fromkeys(AXES, 1), [device])
  tables = config.partitioning
  legend = model_spec(config).legend
  with jax.set_mesh(mesh), activation_layout(legend, tables.activations):
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape, jnp.dtype(_DTYPE.value)) for key in keys]
    found = {name: compiled(attend, arrays) for name, attend in candidates(device.platform).items()}
    fitting = {name: function for name, function in found.items() if function is not None}
    for kernel, size in found.keys() - fitting.keys():
      print(f"{kernel}, {size} tokens: does not fit {device.device_kind}")
    if not fitting:
      print(f"no block size fits {device.device_kind}; make --length smaller", file=sys.stderr)
      return 1
    clock = time.process_time if device.platform == "cpu" else time.perf_counter
    ways = {name: functools.partial(function, *arrays) for name, function in fitting.items()}
    best = {name: min(seconds) for name, seconds in in_turns(ways, _TIMES.value, clock).items()}

  print(f"{device.device_kind}, {_DTYPE.value}, rows, tokens, heads, size of a head: {shape}")
  for (kernel, size), seconds in best.items():
    print(f"{kernel:<10} {size:>5}  {1e3 * seconds:10.2f} ms")
  default = attention.DEFAULT_TILES
  size, splash = (
    min((one for one in best if one[0] == kernel), key=best.get, default=(kernel, usual))[1]
    for kernel, usual in (("blockwise", default.blockwise[0]), ("splash", default.splash))
  )
  print(
    f"\nthe row for TILES in models/attention.py:\n  {device.device_kind.lower()!r}: "
    f'Tiles(({size}, {size}), {splash}, "measured by benchmarks/tune.py"),'
  )
  return 0


if __name__ == "__main__":
  app.run(main)
