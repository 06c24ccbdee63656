"""Saves that fail, at each of their stages: nothing is lost, and the next one goes well."""

import contextlib
import errno
import logging
import os
import resource
import time
import types

import pytest

from runtime import files
from tests.training.checkpointing.states import (
  CONFIG,
  RECORD,
  assert_bit_equal,
  counting_target,
  counting_tree,
  save_counting,
)
from training.checkpointing import async_writer, integrity
from training.checkpointing.async_writer import SaveError
from training.checkpointing.checkpointer import Checkpointer


@contextlib.contextmanager
def full_disk(size=1024):
  """Lets this process write no more than so many bytes to a file."""
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def save_and_check(checkpointer, step):
  """Saves, and checks as the step loop does until a check has something to say."""
  checkpointer.save(step, counting_tree(step), config=CONFIG, record=RECORD)
  deadline = time.monotonic() + 30
  while checkpointer.saving and time.monotonic() < deadline:
    checkpointer.check()


def assert_nothing_lost(checkpointer, step):
  """Looks whether the step before stands alone, and a step can be saved."""
  assert checkpointer.steps() == [1]
  assert not checkpointer.saving
  checkpointer.check()
  assert_bit_equal(checkpointer.restore(counting_target())[1], counting_tree(1))
  save_counting(checkpointer, step)
  assert sorted(path.name for path in checkpointer.folder.iterdir()) == ["1", str(step)]
  assert_bit_equal(checkpointer.restore(counting_target())[1], counting_tree(step))


@pytest.mark.parametrize("size", [0, 100, 2000])  # the most bytes of a file
def test_a_failed_save_is_reported_once_and_the_step_can_be_saved_again(size, tmp_path, caplog):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1)
    with full_disk(size), pytest.raises(SaveError, match="File too large") as failure:
      save_and_check(checkpointer, 2)
    assert str(failure.value).startswith(f"saving step 2 to {tmp_path} failed: ")
    assert failure.value.step == 2
    assert failure.value.agreed
    assert_nothing_lost(checkpointer, 2)
  assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


# As TensorStore says it, but for the settings themselves.
OPENING = (
  'OUT_OF_RANGE: Error opening "zarr" driver: Error writing "step/.zarray": Failed to write 1360 '
  'bytes to file 3: File too large [tensorstore_spec=\'{\\"create\\":true,'
  + 300 * '\\"path\\":[[3]],'
  + "}'] [os_error_code='27']"
)


def test_the_cause_is_not_lost_among_settings():
  assert async_writer.reason(ValueError(OPENING)) == (
    'ValueError: OUT_OF_RANGE: Error opening "zarr" driver: Error writing "step/.zarray": Failed '
    "to write 1360 bytes to file 3: File too large [os_error_code='27']"
  )
  last = OPENING.removesuffix(" [os_error_code='27']")
  assert async_writer.reason(ValueError(last)).endswith("file 3: File too large")


def test_what_threads_of_a_failed_save_write_late_is_removed_too(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1)
    with full_disk(100), pytest.raises(SaveError):
      save_and_check(checkpointer, 2)
    late = tmp_path / "2.saving.orbax-checkpoint-tmp" / "state"
    monkeypatch.setattr(async_writer.Writer, "_sync", lambda _: late.mkdir(parents=True))
    save_counting(checkpointer, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def full(*arguments):
  """Fails as a write does on a full disk."""
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["compute_digests", "write_digests"])
def test_a_save_without_digests_is_none(name, tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1)
    with monkeypatch.context() as patch:
      patch.setattr(integrity, name, full)
      with pytest.raises(SaveError, match=r"failed: OSError: \[Errno 28\] No space left on device"):
        save_and_check(checkpointer, 2)
    assert_nothing_lost(checkpointer, 2)


def test_a_save_that_cannot_start_is_a_failed_one(tmp_path, monkeypatch):
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1)
    with monkeypatch.context() as patch:
      patch.setattr(async_writer.ocp.AsyncCheckpointer, "save", full_memory)
      with pytest.raises(SaveError, match=r"saving step 2 to .* failed: MemoryError: full"):
        checkpointer.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    assert_nothing_lost(checkpointer, 2)


def full_memory(*arguments, **more):
  """Fails for want of memory."""
  raise MemoryError("full")


def test_a_failed_last_save_ends_the_with_block(tmp_path):
  def save_last():
    with Checkpointer(tmp_path) as checkpointer, full_disk():
      checkpointer.save(1, counting_tree(1), config=CONFIG, record=RECORD)
      while not checkpointer._writer.ended:
        time.sleep(0.01)

  with pytest.raises(SaveError, match="saving step 1"):
    save_last()


def test_without_disk_space_no_save_is_started(tmp_path, monkeypatch):
  disk = types.SimpleNamespace(free=5 * 4096, total=2**30)
  with Checkpointer(tmp_path, keep=2) as checkpointer:
    save_counting(checkpointer, 1)
    with monkeypatch.context() as patch:
      patch.setattr(files.shutil, "disk_usage", lambda path: disk)
      patch.setattr(async_writer.ocp.AsyncCheckpointer, "save", full_memory)  # is not called
      with pytest.raises(SaveError, match=r"20\.0 KiB free, and a checkpoint needs 24\.4 KiB"):
        checkpointer.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    with monkeypatch.context() as patch:
      patch.setattr(async_writer.epath.Path, "mkdir", full, raising=False)
      patch.setattr(type(checkpointer.folder), "mkdir", full, raising=False)
      with pytest.raises(SaveError, match="No space left on device"):
        checkpointer.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    assert_nothing_lost(checkpointer, 2)


def test_what_fails_once_the_step_is_there_is_a_warning(tmp_path, monkeypatch):
  said = []
  with Checkpointer(tmp_path, warn=said.append) as checkpointer:
    save_counting(checkpointer, 1)
    for step, name in ((2, "_sync"), (3, "remove")):
      with monkeypatch.context() as patch:
        patch.setattr(async_writer.Writer, name, full)
        save_counting(checkpointer, step)
    # Where a step's name may not be on the disk, no older one is removed.
    assert checkpointer.steps() == [1, 2, 3]
    assert said == [
      f"WARNING: {tmp_path}, after the save of step {step}: {what} failed: "
      "OSError: [Errno 28] No space left on device"
      for step, what in ((2, "waiting for the disk"), (3, "removing older steps"))
    ]
    save_counting(checkpointer, 4)
    assert checkpointer.steps() == [4]


def test_a_long_reason_keeps_its_beginning_and_its_end():
  text = async_writer.reason(ValueError("begin " + "x" * 5000 + "\n end"))
  assert text.startswith("ValueError: begin x")
  assert text.endswith("x end")
  assert len(text) < 1010
