r"""Seconds that a save blocks, bytes per second to disk beside dd, seconds of a restore.

  python benchmarks/checkpoint.py [--mebibytes=384] [--devices=1] [--repeats=5] [--folder=DIR]

The state is that of an AdamW run: parameters and two moments, float32, random, `mebibytes` in all,
split over the devices. A save is timed from the call until it is committed; `dd conv=fsync` writes
as many bytes to the same folder, in turns with it. Both are synced to the disk. The medians are
printed; the ratio is the median of each pair's. A save has a fixed cost (some twenty small files,
each synced, and the removal of the save before), which a small state does not outweigh. Exits with
1 where a save reaches less than half of dd's bytes per second.
"""

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from checkpointing.store import Checkpointer

_MEBIBYTES = flags.DEFINE_integer("mebibytes", 384, "Size of the state, MiB.")
_DEVICES = flags.DEFINE_integer("devices", 1, "Devices; simulated on a CPU.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Saves, and as many runs of dd.")
_FOLDER = flags.DEFINE_string("folder", "", "On the disk to be measured; a temporary one.")

_LEAST_RATIO = 0.5
_LAYERS = 8


def _state(mebibytes):
  """Returns a state of as many MiB, split over all devices."""
  mesh = jax.make_mesh((_DEVICES.value,), ("fsdp",))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
  rng = np.random.default_rng(0)
  width = 64 * max(1, mebibytes * 2**20 // (4 * 3 * _LAYERS * 1024 * 64))

  def layers():
    return {
      f"layer_{i}": jax.device_put(rng.standard_normal((1024, width), np.float32), split)
      for i in range(_LAYERS)
    }

  step = jax.device_put(np.int32(0), whole)
  return {"step": step, "params": layers(), "optimizer": {"mu": layers(), "nu": layers()}}


def _dd(folder, size):
  """Returns the seconds that dd takes for `size` bytes, synced."""
  source, target = folder / "source", folder / "target"
  if not source.exists():
    source.write_bytes(os.urandom(size))
  command = ["dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync"]
  began = time.perf_counter()
  subprocess.run(command, check=True, capture_output=True)
  seconds = time.perf_counter() - began
  target.unlink()
  return seconds


def main(argv):
  del argv
  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  state = _state(_MEBIBYTES.value)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  folder = pathlib.Path(tempfile.mkdtemp(dir=_FOLDER.value or None))
  blocked, saved, plain, restored = [], [], [], []
  try:
    with Checkpointer(folder / "checkpoints") as checkpointer:
      for repeat in range(_REPEATS.value + 1):
        tree = {**state, "step": state["step"] + np.int32(repeat)}
        began = time.perf_counter()
        seconds = checkpointer.save(repeat, tree, config={}, record={})
        checkpointer.wait()
        if repeat:  # the first one starts threads
          saved.append(time.perf_counter() - began)
          blocked.append(seconds)
          plain.append(_dd(folder, size))
      for _ in range(_REPEATS.value):
        began = time.perf_counter()
        jax.block_until_ready(checkpointer.restore(abstract))
        restored.append(time.perf_counter() - began)
  finally:
    shutil.rmtree(folder)
  ratio = statistics.median(dd / ours for dd, ours in zip(plain, saved, strict=True))
  mib = size / 2**20
  print(f"{mib:.1f} MiB over {_DEVICES.value} {jax.devices()[0].platform} device(s)")
  print(f"a save blocks {statistics.median(blocked):.3f} s (at most {max(blocked):.3f})")
  for name, times in (("a save", saved), ("dd", plain)):
    middle = statistics.median(times)
    print(
      f"{name}: {middle:.3f} s ({min(times):.3f} to {max(times):.3f}), {mib / middle:.0f} MiB/s"
    )
  print(f"ratio {ratio:.2f}")
  print(f"a restore {statistics.median(restored):.3f} s")
  return 0 if ratio >= _LEAST_RATIO else 1


if __name__ == "__main__":
  app.run(main)
