"""Checkpoints in the memory of hosts: copies, what is taken of them, and what is not."""

import dataclasses
import errno
import os
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from etils import epath

from processes.workdir_lease import Ownership
from tests.training.checkpointing.states import (
  CONFIG,
  RECORD,
  assert_bit_equal,
  counting_target,
  counting_tree,
)
from training.checkpointing import memory_copies
from training.checkpointing.memory_copies import OWN, SENT, CopyFolder
from training.checkpointing.memory_tier import Layout, MemoryTier

ABSTRACT = counting_target()


@pytest.fixture
def said():
  return []


@pytest.fixture
def tier(tmp_path, said):
  """Returns a function that makes the tier of a start, in a folder instead of memory."""
  workdir = epath.Path(tmp_path) / "run"
  workdir.mkdir()
  made = []

  def start(number: int = 1, *, resumed: bool | None = None) -> MemoryTier:
    found = MemoryTier(str(tmp_path / "memory"), workdir, say=said.append)
    if resumed is None:
      resumed = (workdir / memory_copies.RUN_ID).exists()
    found.start_writing(Ownership(number=number), counting_tree(0), resumed=resumed)
    made.append(found)
    return found

  yield start
  for one in made:
    one.close()


def save(tier: MemoryTier, *steps: int) -> None:
  """Saves steps; of the last one the copy is complete, and the one before is still there."""
  for step in steps:
    tier.save(step, counting_tree(step), config=CONFIG, record={**RECORD, "step": step})
  tier.close()


def restored(tier: MemoryTier, after: int = 0) -> int | None:
  """Returns the step that a start takes, after comparing every bit of it; None where none."""
  if (found := tier.newest(lambda record: ABSTRACT, after=after)) is None:
    return None
  assert_bit_equal(tree := tier.restore(found), counting_tree(found.step))
  assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, tree, ABSTRACT))
  assert (found.config, found.record) == (CONFIG, {**RECORD, "step": found.step})
  return found.step


def copies(tmp_path) -> list[pathlib.Path]:
  """Returns the files of the process, the newest last."""
  found = tmp_path.glob(f"memory/*/*/process-0/*.{OWN}")
  return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


def test_the_newest_step_is_restored_to_the_bit_and_older_ones_are_written_over(tier, tmp_path):
  first = tier()
  save(first, 1, 2, 3)
  assert [path.name for path in copies(tmp_path)] == [f"2-1-0.{OWN}", f"3-1-0.{OWN}"]
  after = tier(2)
  assert restored(after) == 3
  assert restored(after, after=3) is None, "storage has it"
  save(after, 4, 5)
  assert restored(tier(3)) == 5
  after.remove()
  assert not (tmp_path / "memory" / f"meshwright-{os.getuid()}").exists()


def test_of_two_owners_the_later_ones_steps_count_even_if_they_are_older(tier):
  save(tier(1), 8, 9)
  save(tier(2), 5)
  assert restored(tier(3)) == 5


def test_a_start_that_has_not_resumed_from_them_leaves_no_copies_to_later_ones(tier, tmp_path):
  save(tier(1), 8, 9)
  [old] = (tmp_path / "memory").glob("*/*")
  kept = shutil.copytree(old, tmp_path / "on a host that was away")
  second = tier(2, resumed=False)  # from storage, as another mesh does
  assert not old.exists()
  shutil.move(kept, old)
  assert restored(tier(3)) is None
  save(second, 5)
  assert restored(tier(4)) == 5


def flipped(path: pathlib.Path, place: int) -> None:
  with open(path, "r+b") as file:
    file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 16]))


DAMAGE = {
  "a bit of a shard": lambda path: flipped(path, 1000),
  "a bit of the facts": lambda path: flipped(path, -200),
  "a bit of their digest": lambda path: flipped(path, -50),
  "cut in the shards": lambda path: os.truncate(path, 2000),
  "nothing": lambda path: os.truncate(path, 0),
  "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_torn_or_changed_copy_is_not_taken(tier, tmp_path, damage):
  save(tier(), 1, 2)
  old, new = copies(tmp_path)
  damage(new)
  assert restored(tier()) == 1
  damage(old)
  assert restored(tier()) is None


def test_a_kill_between_the_shards_and_the_name_leaves_the_step_before(tier, tmp_path):
  save(tier(), 1, 2)
  new = copies(tmp_path)[-1]
  new.rename(new.with_name(f"{OWN}.writing"))
  assert restored(tier()) == 1


def test_a_full_memory_gives_the_save_up_with_a_message_and_the_next_one_may_succeed(
  tier, tmp_path, said, monkeypatch
):
  save(tier(0), 1)

  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patched:
    patched.setattr(os, "posix_fallocate", full)
    first = tier(1)
    save(first, 2)
    first.finish()
  assert "the save of step 2 to memory is given up" in said[-1]
  assert "No space left on device" in said[-1]
  assert first.lost == 1
  [left] = (tmp_path / "memory").glob("*/*/process-0/*")
  assert left.name == f"1-0-0.{OWN}", "no memory is kept that another program may need"
  save(first, 3)
  first.finish()
  assert first.lost == 1
  assert restored(tier()) == 3


def test_a_rollback_removes_newer_steps_and_another_mesh_takes_none(tier):
  first = tier()
  save(first, 4)
  first.roll_back(4)
  assert restored(tier()) == 4
  save(first, 5)
  first.roll_back(4)
  assert restored(tier()) is None
  save(first, 5)
  assert restored(tier()) == 5
  whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE), ABSTRACT)
  assert tier().newest(lambda record: whole) is None


ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_copies_of_runs_that_are_gone_are_removed_and_those_of_others_stay(tier, tmp_path):
  save(tier(), 1)
  [ours] = (tmp_path / "memory").glob("*/*")
  for name, is_there in (("there", True), ("gone", False)):
    other = epath.Path(tmp_path) / name
    other.mkdir()
    (other / memory_copies.RUN_ID).write_text(name)
    CopyFolder(str(tmp_path / "memory"), name, 0).open(other)
    if not is_there:
      other.rmtree()
  tier()
  assert sorted(path.name for path in ours.parent.iterdir()) == sorted([ours.name, "there"])
  (tmp_path / "run" / memory_copies.RUN_ID).unlink()
  assert restored(tier()) is None, "a new run in the same workdir"
  assert not ours.exists()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
  base = tmp_path / f"meshwright-{os.getuid()}"
  (tmp_path / "elsewhere").mkdir()
  base.symlink_to(tmp_path / "elsewhere")
  with pytest.raises(PermissionError, match="is not a folder that only user"):
    CopyFolder(str(tmp_path), "run", 0).open(epath.Path(tmp_path))


# ------------------------------ which process has what ------------------------------


@dataclasses.dataclass(frozen=True)
class Device:
  """A device of a process."""

  number: int
  process_index: int


class OneDimSharded:
  """A sharding of dim 0 over groups of processes, each of which holds a shard."""

  def __init__(self, *holders: tuple[int, ...]):
    self._holders = holders

  def devices_indices_map(self, shape):
    each = shape[0] // len(self._holders)
    return {
      Device(part, process): (slice(part * each, (part + 1) * each),)
      for part, by in enumerate(self._holders)
      for process in by
    }


def layout_of(hosts, *holders):
  leaf = {"shape": (len(holders) * 6,), "dtype": np.dtype(np.float32)}
  return Layout({"w": types.SimpleNamespace(**leaf, sharding=OneDimSharded(*holders))}, hosts)


def files_of(layout, lost=()):
  """Returns, of each process, the files on its host; none of those that were lost."""
  parts = [
    [(process, OWN), *([(peer, SENT)] if layout.size((peer, SENT)) else [])]
    for process in range(len(layout.hosts))
    for peer in [layout.peer_of(process)]
  ]
  return [[] if process in lost else part for process, part in enumerate(parts)]


ONE_HOST, TWO_HOSTS = (0, 0, 0, 0), (0, 0, 1, 1)
APART = ((0,), (1,), (2,), (3,))  # each process has a shard of its own
ACROSS = ((0, 2), (1, 3))  # replicas on both of two hosts
WITHIN = ((0, 1), (2, 3))  # replicas on one host each


@pytest.mark.parametrize(
  ("hosts", "holders", "sent", "survived", "not_survived"),
  [
    (ONE_HOST, APART, 24, [(0,), (3,), (0, 2), (1, 3)], [(0, 1), (3, 0), (0, 1, 2, 3)]),
    (TWO_HOSTS, APART, 24, [(0,), (0, 1), (2, 3), (1, 2)], [(0, 2), (1, 3)]),
    (TWO_HOSTS, ACROSS, 0, [(0, 1), (2, 3), (0, 3)], [(0, 2), (1, 3), (0, 1, 2)]),
    (TWO_HOSTS, WITHIN, 24, [(0, 1), (2, 3), (1, 3)], [(0, 1, 2), (0, 1, 2, 3)]),
    ((0,), ((0,),), 0, [()], [(0,)]),
  ],
  ids=["one host", "two hosts", "replicas apart", "replicas together", "alone"],
)
def test_what_survivors_have_every_shard_of(hosts, holders, sent, survived, not_survived):
  layout = layout_of(hosts, *holders)
  assert max(layout.size((process, SENT)) for process in range(len(hosts))) == sent
  for lost in survived + not_survived:
    there = files_of(layout, lost)
    found = [layout.sources(process, there) for process in range(len(hosts))]
    assert (None not in found) == (lost in survived), lost
    for taken in found if lost in survived else ():
      assert all(part in there[source] for source, part in taken)


def test_a_process_takes_its_own_files_where_they_are_there():
  layout = layout_of(TWO_HOSTS, *APART)
  there = files_of(layout)
  assert layout.sources(1, there) == [(1, (1, OWN))]
  assert layout.sources(1, [[], [], *there[2:]]) == [(3, (1, SENT))]


def test_what_is_sent_is_the_first_part_of_what_a_process_has():
  layout = layout_of(TWO_HOSTS, (0, 2), (0, 1), (1, 3), (2, 3))
  own, sent = (layout.shards((0, kind)) for kind in (OWN, SENT))
  assert [shard.key for shard in sent] == [("w", ((6, 12),))]
  assert own[0] == sent[0]
  assert len(own) == 2
  assert own[1].offset == 64


@pytest.mark.parametrize(("hosts", "peers"), [(ONE_HOST, [3, 0, 1, 2]), (TWO_HOSTS, [2, 3, 0, 1])])
def test_a_peer_is_on_another_host_where_there_is_one(hosts, peers):
  layout = layout_of(hosts, *APART)
  assert [layout.peer_of(process) for process in range(4)] == peers
