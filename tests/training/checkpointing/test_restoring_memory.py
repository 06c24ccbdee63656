"""Restoring never holds more than the target's shards, but for the pieces that are being read.

Simulated devices share the memory of their process, so two processes restore one state, each half
of the devices. An array of which each needs half then fits no process whole: what a process grows
by stays below the array's size.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from processes.listening import free_port
from training.checkpointing import checkpointer as store

PROCESSES = 2
SHAPE = (8 * 2048, 4096)  # float32: 256 MiB
BYTES = 4 * SHAPE[0] * SHAPE[1]


def save(folder):
  """Saves a state with one large array, which one device writes."""
  device = jax.devices()[0]
  large = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
  tree = {
    "step": jax.device_put(np.int32(1), device),
    "params": {"small": jax.device_put(np.ones(3, np.float32), device)},
    "optimizer": {"large": jax.device_put(large, device)},
  }
  with store.Checkpointer(folder) as checkpointer:
    checkpointer.save(1, tree, config={}, record={})


def restore_in_processes(forks, folder) -> list[dict[str, int]]:
  """Returns what each process tells of its restore."""
  script = pathlib.Path(__file__).with_name("restoring_process.py")
  port = free_port()
  started = [
    forks.start(
      [script, folder, index, PROCESSES, port],
      out=folder.with_suffix(f".{index}.out"),
      err=folder.with_suffix(f".{index}.err"),
    )
    for index in range(PROCESSES)
  ]
  told = []
  try:
    for index, process in enumerate(started):
      assert process.wait(120) == 0, folder.with_suffix(f".{index}.err").read_text()
      told.append(json.loads(folder.with_suffix(f".{index}.out").read_text().splitlines()[-1]))
  finally:
    for process in started:
      process.kill()
  return told


def within_bound(told: dict[str, int]) -> bool:
  """Tells whether a process held its shards, a piece for each of them, and a piece to spare."""
  pieces = 8 // PROCESSES + 1  # the shards lie in a piece each, and all may be read at once
  return told["growth"] <= told["shards"] + pieces * store.CHUNK_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the highest resident memory")
@pytest.mark.long
def test_a_process_holds_its_shards_and_the_pieces_being_read(forks, tmp_path, monkeypatch):
  save(tmp_path / "pieces")
  for told in restore_in_processes(forks, tmp_path / "pieces"):
    assert told["shards"] == BYTES // PROCESSES
    assert within_bound(told), told

  # Without the cut into pieces a process holds the whole array, and the check sees it.
  with monkeypatch.context() as patches:
    patches.setattr(store, "CHUNK_BYTES", 2 * BYTES)
    patches.setattr(store, "FILE_BYTES", 2 * BYTES)  # a piece is never larger than a file
    save(tmp_path / "whole")
  whole = restore_in_processes(forks, tmp_path / "whole")
  assert not any(within_bound(told) for told in whole), whole
