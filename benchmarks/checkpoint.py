r"""The cost of checkpoints: seconds blocked, bytes per second, time to a first step.

  python -m benchmarks.checkpoint [--parts=start,memory,disk] [--mebibytes=384] [--folder=DIR]

start: seconds from the command to the first step, of runs of main.py that restore a checkpoint and
of runs from scratch, alternating. A run before them has filled the compilation cache.

memory: the same state as below, sharded over four simulated devices, is saved to /dev/shm and to
the disk in turns. What a save to memory blocks is told as a share of the whole save to the disk,
each pair for itself, and beside it the bytes copied to an array that is there, by one thread.

disk: the state of an AdamW run, float32, random, `mebibytes` in all, on one device. A save
is timed from the call until it is committed; blocked is the part that the caller waits. `dd
conv=fsync` writes as many bytes to the same folder, alternating with it. Both are synced to the
disk. The ratio is the median over the pairs. A save has a fixed cost (some twenty small files, each
synced, and the removal of the previous save), which dominates for a small state.

A virtual machine may get its memory from the host only when it is touched (measured: 2 s per GiB,
all of it in the kernel). The first writer, a save or dd, pays for the pages of the file and its
copy. So memory is touched before each pair; the first save and the first dd, without that, are
printed separately: that is what a process sees.

Restores are timed with verification of all files (checkpoint.verify=full) and without (off),
alternating; the files are in the page cache.

Exits with 1 if a save reaches less than half of dd's bytes per second.
"""

import operator
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags, logging
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.timing import ratio, spread
from processes.workdir_lease import Ownership
from runtime import devices
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.memory_tier import MemoryTier

_PARTS = flags.DEFINE_list("parts", "start,memory,disk", "Which parts.")
_MEBIBYTES = flags.DEFINE_integer("mebibytes", 384, "memory, disk: size of the state, MiB.", 1)
_FOLDER = flags.DEFINE_string("folder", "", "On the disk to be measured; a temporary one.")

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST_RATIO = 0.5
CONFIG, STARTS, REPEATS = "configs/dp4_tp2.py", 5, 9
_LAYERS, _DEVICES = 8, 4


def main(argv):
  del argv
  logging.set_verbosity(logging.ERROR)  # Orbax warns of saves that are waited for, as they are here
  parts = {"start": _start, "memory": _memory, "disk": _disk}
  unknown = [part for part in _PARTS.value if part not in parts]
  if unknown:
    raise app.UsageError(f"--parts: {', '.join(unknown)}; there are {', '.join(parts)}")
  folder = pathlib.Path(tempfile.mkdtemp(dir=_FOLDER.value or None))
  try:
    # In this order: the others start JAX's backend here, which the runs would have to share.
    kept = [run(folder) for part, run in parts.items() if part in _PARTS.value]
  finally:
    shutil.rmtree(folder)
  return 0 if all(kept) else 1


# ------------------------------ runs of main.py ------------------------------


def _start(folder):
  """Prints the seconds to the first step, after a restore and without."""
  short = ["--config.training.steps=2", "--config.checkpoint.every_steps=1"]
  resumable = folder / "resumable"
  _train(folder, resumable, *short)
  shutil.rmtree(resumable / "checkpoints" / "2")  # so that step 1 is the newest, of 2
  seconds = {"fresh": [], "restored": []}
  for _ in range(STARTS):
    for kind, found in seconds.items():
      workdir = folder / kind
      if kind == "restored":
        shutil.copytree(resumable, workdir)
      found.append(first_step(_train(folder, workdir, *short), restored=kind == "restored"))
      shutil.rmtree(workdir)
  print(f"{CONFIG}: seconds from the command to the first step, compiled before")
  for kind, found in seconds.items():
    print(f"  {kind}: {spread(found)}")
  print(f"  restored / fresh: {ratio(seconds['restored'], seconds['fresh']):.2f}")
  return True


def first_step(text, *, restored):
  """Returns the seconds to the first step that a run has printed; checks how it has started."""
  if ("resumes from the checkpoint of step 1" in text) != restored:
    raise RuntimeError(
      f"this run was to {'restore' if restored else 'start from scratch'}:\n{text}"
    )
  return float(re.search(r"first step finished ([\d.]+) s after the command", text)[1])


def _train(folder, workdir, *arguments):
  """Runs main.py and returns what it has printed."""
  command = [
    *(sys.executable, "main.py", f"--config={CONFIG}", f"--workdir={workdir}"),
    f"--config.compilation_cache_dir={folder / 'compilation'}",
    "--config.data.evaluation_split=test[:1]",
    "--config.evaluation.every_steps=0",
    "--config.evaluation.sample_tokens=0",
    *arguments,
  ]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
  return done.stdout


# ------------------------------ one large state ------------------------------


def _memory(folder):
  """Prints what a save to memory blocks, beside a save to the disk; returns True."""
  devices.start({"data": _DEVICES}, simulate=True)
  mesh = jax.make_mesh((_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec("data"))
  whole = NamedSharding(mesh, PartitionSpec())
  state = _state(_MEBIBYTES.value)
  state = jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim else whole), state)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
  seconds = {"blocked by a save to memory": [], "save to the disk": [], "copied by NumPy": []}
  workdir = epath.Path(folder / "workdir")
  workdir.mkdir()
  tier = MemoryTier("", workdir, say=lambda _: None)
  tier.start_writing(Ownership(), state, resumed=False)
  with Checkpointer(folder / "stored", keep=1) as checkpointer:
    for repeat in range(REPEATS + 1):
      tree = {**state, "step": state["step"] + np.int32(repeat)}
      jax.block_until_ready(tree)
      began = time.perf_counter()
      checkpointer.save(repeat, tree, config={}, record={})
      checkpointer.wait()
      stored, began = time.perf_counter() - began, time.perf_counter()
      np.copyto(target, source)
      copied = time.perf_counter() - began
      blocked = tier.save(repeat, tree, config={}, record={})
      tier.finish()
      for found, took in zip(seconds.values(), (blocked, stored, copied), strict=True):
        found.extend([took] if repeat else [])  # the first save makes its files
  tier.remove()
  share = statistics.median(map(operator.truediv, *list(seconds.values())[:2]))
  print(f"{size / 2**20:.1f} MiB on {_DEVICES} simulated devices, seconds")
  for name, times in seconds.items():
    print(f"  {name}: {spread(times, 3)}")
  print(f"  blocked by a save to memory / save to the disk: {100 * share:.1f} %")
  return True


def _disk(folder):
  """Prints what saves and restores of a large state take; returns whether saves are fast."""
  state = _state(_MEBIBYTES.value)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  blocked, saved, plain = [], [], []
  with Checkpointer(folder / "checkpoints") as checkpointer:

    def save():
      tree = {**state, "step": state["step"] + np.int32(len(saved))}
      began = time.perf_counter()
      blocked.append(checkpointer.save(len(saved), tree, config={}, record={}))
      checkpointer.wait()
      saved.append(time.perf_counter() - began)

    for repeat in range(REPEATS + 1):
      if repeat:
        np.ones(3 * size, np.uint8)  # the save's copy, its file and dd's
      turns = (save, lambda: plain.append(_dd(folder, size)))
      for turn in turns if repeat % 2 == 0 else reversed(turns):
        turn()
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
  restored = {"full": [], "off": []}
  for _ in range(REPEATS):
    for verify, times in restored.items():
      with Checkpointer(folder / "checkpoints", read_only=True, verify=verify) as checkpointer:
        began = time.perf_counter()
        jax.block_until_ready(checkpointer.restore(abstract))
        times.append(time.perf_counter() - began)
  mib = size / 2**20
  print(f"{mib:.1f} MiB on one {jax.devices()[0].platform} device, seconds")
  print(f"  blocked by a save: {spread(blocked[1:], 3)}; by the first {blocked[0]:.3f}")
  for name, (first, *times) in (("save", saved), ("dd with fsync", plain)):
    rate = mib / statistics.median(times)
    print(f"  {name}: {spread(times, 3)}; the first {first:.3f}; {rate:.0f} MiB/s")
  of_dd = ratio(plain[1:], saved[1:])
  print(f"  ratio of bytes per second, save / dd: {of_dd:.2f}")
  for verify, times in restored.items():
    print(f"  restore, checkpoint.verify={verify}: {spread(times, 3)}")
  return of_dd >= LEAST_RATIO


def _state(mebibytes):
  """Returns a state of as many MiB."""
  rng, one = np.random.default_rng(0), jax.sharding.SingleDeviceSharding(jax.devices()[0])
  width = 64 * max(1, mebibytes * 2**20 // (4 * 3 * _LAYERS * 1024 * 64))

  def layers():
    arrays = (rng.standard_normal((1024, width), np.float32) for _ in range(_LAYERS))
    return {f"layer_{i}": jax.device_put(array, one) for i, array in enumerate(arrays)}

  step = jax.device_put(np.int32(0), one)
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


if __name__ == "__main__":
  app.run(main)
