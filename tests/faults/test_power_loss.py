"""A power cut at any moment of a save leaves the old step or the new one, never a torn one."""

import pathlib
import random
import shutil
import sys

import numpy as np
import pytest
from etils import epath

from input_pipeline import store
from tests.faults import power
from tests.training.checkpointing.states import assert_bit_equal, counting_target, counting_tree
from training.checkpointing import integrity, reading
from training.checkpointing.checkpointer import Checkpointer
from training.checkpointing.consensus import Together

ROOT = pathlib.Path(__file__).parents[2]
SEED, DRAWN = 0, 4

pytestmark = pytest.mark.faults

SAVE = """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from training.checkpointing.checkpointer import Checkpointer
from tests.training.checkpointing.states import save_counting
folder = sys.argv[1]
with Checkpointer(f"{folder}/checkpoints", tokenizer={"tokenizer.json": b"{}"}) as checkpoints:
  for step in (1, 2, 3):
    save_counting(checkpoints, step)
    os.mkdir(f"{folder}/saved-{step}")
"""

PREPARE = """
import sys
import numpy as np
from etils import epath
from input_pipeline import shard_writer, store
folder = epath.Path(sys.argv[1])
def fill(shard):
  for size in (3, 1, 9000):
    shard.add(np.arange(size, dtype=np.uint32) % 256, size, size)
shard_writer.write_shard(folder / "shard", 256, {"files": "here"}, fill)
"""


def replayed(code, tmp_path):
  """Runs code under strace; yields (call, disk) after each call that has changed something."""
  if shutil.which("strace") is None:
    pytest.fail("no strace, which records the system calls; install it: apt-get install strace")
  folder = tmp_path / "traced"
  folder.mkdir()
  calls = power.trace(
    [sys.executable, "-c", code, str(folder)],
    tmp_path / "strace",
    cwd=ROOT,
    stderr=None,
  )
  disk = power.Disk(folder)
  for call in disk.replay(calls):
    yield call, disk
  [everything] = [*disk.states(random.Random(SEED), 0)][-1:]
  there = {
    str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
    for path in folder.rglob("*")
  }
  assert everything == there, "the replay is what happened"


def test_a_save_leaves_the_old_step_or_the_new_one(tmp_path):
  draw, seen, done, found = random.Random(SEED), {}, 0, []
  for call, disk in replayed(SAVE, tmp_path):
    if call.name == "mkdir" and b"/saved-" in call.texts[0]:
      done = int(call.texts[0].rpartition(b"-")[2])
    for state in disk.states(draw, DRAWN):
      key = (done, *sorted(state.items()))
      if (key := hash(key)) in seen:
        continue
      power.make(state, tmp_path / "after")
      seen[key] = step = newest(tmp_path / "after" / "checkpoints")
      assert step is not None or not done, (call, sorted(state))
      assert step is None or done <= step <= done + 1, (done, call, sorted(state))
      if step and draw.random() < 0.03:
        found.append(restored(tmp_path / "after" / "checkpoints", step))
  assert {*seen.values()} == {None, 1, 2, 3}
  assert {*found} == {1, 2, 3}
  print(f"{len(seen)} states, {len(found)} of them restored")


def newest(folder):
  """Returns the newest step that is complete, with fitting digests; None if there is none."""
  for step in reversed(integrity.steps(epath.Path(folder))):
    try:
      verified = reading.check(epath.Path(folder / str(step)), integrity.FULL)
      reading.check_share(verified.path, verified.large, Together())
    except integrity.UnreadableError:
      continue
    return step
  return None


def restored(folder, step):
  """Opens a folder as the next start does, and compares what it restores with what was saved."""
  with Checkpointer(folder, warn=lambda text: None) as checkpoints:
    got, tree = checkpoints.restore(counting_target())
    assert got == step
    assert_bit_equal(tree, counting_tree(step))
    assert not [path for path in folder.iterdir() if ".saving" in path.name]
  return got


def test_prepared_data_is_absent_or_right(tmp_path):
  draw, seen, found = random.Random(SEED), set(), []
  for _, disk in replayed(PREPARE, tmp_path):
    for state in disk.states(draw, DRAWN):
      if (key := hash(tuple(sorted(state.items())))) in seen:
        continue
      seen.add(key)
      power.make(state, tmp_path / "after")
      found.append(_shard(tmp_path / "after" / "shard"))
  assert {*found} == {False, True}
  print(f"{len(seen)} states")


def _shard(folder):
  """Returns whether there is a shard, which then is right."""
  folder = epath.Path(folder)
  if not store.is_there(folder):
    return False
  documents = store.Documents([store.Shard.open(folder)])
  tokens, _ = documents.read(np.arange(documents.records))
  wanted = np.concatenate([np.arange(size) % 256 for size in (3, 1, 9000)])
  np.testing.assert_array_equal(tokens, wanted)
  return True
