"""Digests of files that are read while others are still being written."""

import hashlib
import time

import jax
import numpy as np
import pytest
from etils import epath

from tests.training.checkpointing.states import CONFIG, RECORD
from training.checkpointing import async_writer as module
from training.checkpointing import integrity, reading
from training.checkpointing.async_writer import EarlyChecksums
from training.checkpointing.checkpointer import Checkpointer

LARGE = bytes(module._LEAST_BYTES)


@pytest.fixture
def data(tmp_path):
  """Returns the folder that process 1 writes its files of a save to."""
  folder = tmp_path / "7.saving.orbax-checkpoint-tmp" / "state.tmp" / "ocdbt.process_1" / "d"
  folder.mkdir(parents=True)
  return folder


def until(condition):
  """Waits; fails after ten seconds."""
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def test_a_file_is_read_when_it_has_its_name(tmp_path, data):
  with EarlyChecksums(epath.Path(tmp_path / "7.saving"), 1) as ahead:
    (data / "a.__lock").write_bytes(LARGE)
    (data / "small").write_bytes(b"x")
    (data / "b").write_bytes(LARGE)
    until(lambda: ahead.sha256("b", len(LARGE)))
    assert list(ahead._reading) == ["b"]
    (data / "a.__lock").rename(data / "a")
    until(lambda: ahead.sha256("a", len(LARGE)))
  assert ahead.sha256("a", len(LARGE)) == hashlib.sha256(LARGE).hexdigest()
  assert ahead.sha256("a", len(LARGE) + 1) == "", "another size, so another file"
  assert ahead.sha256("small", 1) == ""
  assert ahead.sha256("never", 1) == ""


def test_a_file_that_cannot_be_read_is_left_for_later(tmp_path, data, monkeypatch):
  def gone(path):
    raise FileNotFoundError(path)

  monkeypatch.setattr(integrity, "read_through", gone)
  (data / "a").write_bytes(LARGE)
  with EarlyChecksums(epath.Path(tmp_path / "7.saving"), 1) as ahead:
    until(lambda: "a" in ahead._reading)
  assert ahead.sha256("a", len(LARGE)) == ""


def test_a_file_that_grows_is_read_when_it_has_stopped(tmp_path, data):
  ahead = EarlyChecksums(epath.Path(tmp_path / "7.saving"), 1)
  with (data / "a").open("wb") as file:
    for _ in range(3):
      file.write(LARGE)
      file.flush()
      ahead._look()
      assert "a" not in ahead._reading
  ahead._look()
  assert ahead.sha256("a", 3 * len(LARGE)) == hashlib.sha256(3 * LARGE).hexdigest()


def test_files_read_ahead_are_not_read_again_and_are_in_the_digests(tmp_path, monkeypatch):
  whole, read = [], integrity.read_through

  def noted(path, *limit):
    size, value = read(path, *limit)  # raises where the folder is renamed meanwhile
    whole.append((path.name, size))
    return size, value

  monkeypatch.setattr(integrity, "read_through", noted)
  params = np.random.default_rng(0).standard_normal(2**20, np.float32)
  tree = jax.tree.map(jax.device_put, {"step": np.int32(3), "params": params})
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(3, tree, config=CONFIG, record=RECORD)
  listed = reading.read_digests(epath.Path(tmp_path / "3"))
  expected = sorted((digest.path.rpartition("/")[2], digest.size) for digest in listed)
  # A part of a file may have been read before it was complete, on a busy machine.
  assert sorted(one for one in whole if one in expected) == expected
  reading.check_contents(epath.Path(tmp_path / "3"), listed)
