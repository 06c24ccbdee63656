"""What `checkpoint.verify` looks at: every byte, sizes, or Orbax's marks."""

import gc
import json
import random
import shutil
import sys
import time

import jax
import numpy as np
import pytest

from tests.training.checkpointing import damage
from tests.training.checkpointing.states import (
  assert_bit_equal,
  contents,
  counting_target,
  counting_tree,
  restored_parameters,
  save_counting,
)
from training.checkpointing import async_writer, integrity, reading
from training.checkpointing.checkpointer import Checkpointer

OLDER, NEWER = 10, 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns a folder with two steps."""
  folder = tmp_path_factory.mktemp("saved") / "checkpoints"
  with Checkpointer(folder, keep=2) as checkpointer:
    save_counting(checkpointer, OLDER, NEWER)
  return folder


@pytest.fixture
def copy(saved, tmp_path):
  """Returns a copy of that folder, to be broken."""
  return shutil.copytree(saved, tmp_path / "checkpoints")


def restored(folder, verify) -> tuple[int, list[str]]:
  """Restores the newest that can be read; returns its step and what was said."""
  said = []
  with Checkpointer(folder, read_only=True, verify=verify, warn=said.append) as checkpointer:
    step, tree = checkpointer.restore(counting_target())
  assert_bit_equal(tree, counting_tree(step))
  return step, said


@pytest.mark.parametrize("how", damage.DAMAGES, ids=lambda how: how.__name__)
def test_every_damage_is_found_and_by_sizes_what_is_missing_or_cut(how, saved, tmp_path):
  step, kinds = tmp_path / str(NEWER), [integrity.FULL, integrity.SIZE][: 1 + (how != damage.flip)]
  for name in damage.CLASSES:
    shutil.copytree(saved / str(NEWER), step)
    done = damage.harm(step, name, how, random.Random())
    for verify in kinds:
      with pytest.raises(integrity.UnreadableError) as error:
        reading.check(path_of(tmp_path), verify)
      assert str(error.value).startswith(f"{done.partition(':')[0]}: ")
    shutil.rmtree(step)


def change(folder, before: bytes, after: bytes) -> list[str]:
  """Changes some bytes wherever they stand in the newest step's state; returns the files."""
  changed, step = [], folder / str(NEWER)
  for path in sorted((step / "state").rglob("*")):
    content = path.read_bytes() if path.is_file() else b""
    if before in content:
      path.write_bytes(content.replace(before, after))
      changed.append(str(path.relative_to(step)))
  assert changed
  return changed


def flip_an_array(folder) -> str:
  """Flips a bit of the parameters of the newest step; returns the first file that holds it."""
  row = np.asarray(counting_tree(NEWER)["params"]["up"]["kernel"])[3].tobytes()
  return change(folder, row, bytes([row[0] ^ 1]) + row[1:])[0]


def test_sizes_alone_do_not_tell_of_a_flipped_bit_and_full_does(copy):
  path = flip_an_array(copy)
  said = []
  for verify in (integrity.SIZE, integrity.OFF):
    with Checkpointer(copy, read_only=True, verify=verify, warn=said.append) as checkpointer:
      step, tree = checkpointer.restore(counting_target())
    assert step == NEWER
    assert not said
    with pytest.raises(AssertionError):
      assert_bit_equal(tree, counting_tree(step))
  step, [line] = restored(copy, integrity.FULL)
  assert step == OLDER
  assert f"/{NEWER} cannot be read ({path}: its bytes have changed (SHA-256 " in line


# What Orbax and TensorStore can do without, or do not look at.
UNSEEN = {"digests", "state/_sharding", "state/ocdbt.process_*/manifest.ocdbt"}
SEEN = ("record/commit_success.txt", "state/_METADATA", "state/d/*", "state/ocdbt.process_*/d/*")


@pytest.mark.parametrize("name", ["digests", *SEEN])
def test_without_verification_the_marks_and_what_cannot_be_read_count(name, copy):
  for path in damage.files(copy / str(NEWER), name):
    damage.delete(path, random.Random())
  step, said = restored(copy, integrity.OFF)
  assert step == (NEWER if name in UNSEEN else OLDER)
  assert len(said) == (name not in UNSEEN)


# ------------------------------ without digests ------------------------------


@pytest.fixture
def plain(copy):
  """Returns checkpoints as they were before there were digests."""
  for step in (OLDER, NEWER):
    (copy / str(step) / "digests").unlink()
  return copy


@pytest.mark.parametrize("verify", [integrity.FULL, integrity.SIZE])
def test_checkpoints_without_digests_are_refused_with_the_fix(verify, plain):
  before = contents(plain)
  with (
    Checkpointer(plain, verify=verify) as checkpointer,
    pytest.raises(ValueError, match="nothing to restore from") as refusal,
  ):
    checkpointer.restore(counting_target())
  assert str(refusal.value).count("checkpoint.verify=off reads it as it is") == 2
  assert contents(plain) == before


def test_checkpoints_without_digests_can_be_read_as_they_are(plain):
  assert restored(plain, integrity.OFF) == (NEWER, [])
  with Checkpointer(plain, keep=3, verify=integrity.OFF) as checkpointer:
    assert checkpointer.restore(counting_target())[0] == NEWER
    save_counting(checkpointer, 30)
  assert restored(plain, integrity.FULL) == (30, [])


# ------------------------------ what is read when ------------------------------


@pytest.fixture
def read(monkeypatch):
  """Returns the list of files whose content is compared from here on."""
  found, check = [], reading.check_contents

  def noting(folder, listed, **more):
    found.extend(digest.path for digest in listed)
    return check(folder, listed, **more)

  monkeypatch.setattr(reading, "check_contents", noting)
  monkeypatch.setattr(reading, "SMALL_BYTES", 2000)
  return found


def test_every_file_is_compared_once(copy, read):
  assert restored(copy, integrity.FULL)[0] == NEWER
  assert sorted(read) == sorted(digest.path for digest in reading.read_digests(path_of(copy)))


def path_of(folder):
  """Returns the newest step's folder."""
  return reading.epath.Path(folder) / str(NEWER)


def test_what_does_not_fit_is_refused_before_arrays_are_read(copy, read):
  target = counting_target()
  bias = target["params"]["bias"]
  target["params"]["bias"] = jax.ShapeDtypeStruct(bias.shape, np.int32, sharding=bias.sharding)
  with (
    Checkpointer(copy, read_only=True) as checkpointer,
    pytest.raises(ValueError, match=r"params/bias: float32\[7\] in the checkpoint, int32\[7\]"),
  ):
    checkpointer.restore(target)
  sizes = integrity.file_sizes(path_of(copy))
  assert max(sizes[path] for path in read) <= reading.SMALL_BYTES < max(sizes.values())


def test_damaged_names_are_damage_and_no_refusal(copy):
  [path] = change(copy, b'"bias"', b'"bizs"')
  step, [line] = restored(copy, integrity.FULL)
  assert step == OLDER
  assert f"/{NEWER} cannot be read ({path}: its bytes have changed" in line


def test_parameters_alone_are_verified_too(copy):
  path, said = flip_an_array(copy), []
  for verify, wanted in ((integrity.FULL, OLDER), (integrity.OFF, NEWER)):
    step, _ = restored_parameters(copy, verify=verify, warn=said.append)
    assert step == wanted
  assert len(said) == 1
  assert path in said[0]
  with pytest.raises(ValueError, match=f"step {NEWER} cannot be read: {path}: its bytes"):
    restored_parameters(copy, NEWER)


# ------------------------------ metadata that was changed ------------------------------


@pytest.mark.parametrize(
  "change", [lambda text: "[]", lambda text: "[" * 100_000, lambda text: text[:99]]
)
def test_changed_metadata_is_one_message_and_the_older_step(change, copy):
  path = copy / str(NEWER) / "state" / "_METADATA"
  path.write_text(change(path.read_text()))
  step, [line] = restored(copy, integrity.OFF)
  assert step == OLDER
  assert f"/{NEWER} cannot be read (state" in line
  assert len(line.splitlines()) == 1
  assert len(line) < 700


@pytest.fixture
def unraisable(monkeypatch):
  """A list of what Python prints as `Exception ignored in`, from here on."""
  gc.collect()  # what earlier tests have left is not this one's
  seen = []
  monkeypatch.setattr(sys, "unraisablehook", lambda raised: seen.append(str(raised.exc_value)))
  monkeypatch.setattr(async_writer, "_installed", False)
  return seen


def test_opens_that_end_after_another_has_failed_print_nothing(copy, unraisable):
  path = copy / str(NEWER) / "state" / "_METADATA"
  content = json.loads(path.read_text())
  path.write_text(json.dumps({**content, "use_zarr3": not content["use_zarr3"]}))
  for _ in range(8):  # it is a race
    assert restored(copy, integrity.OFF)[0] == OLDER
  gc.collect()
  time.sleep(0.2)  # in which the threads of TensorStore end
  assert unraisable == []


def test_reads_that_are_given_up_after_another_has_failed_print_nothing(copy, unraisable):
  for path in damage.files(copy / str(NEWER), "state/ocdbt.process_*/d/*"):
    path.write_bytes(b"")
  for _ in range(3):  # whether reads are still under way is a race
    assert restored(copy, integrity.OFF)[0] == OLDER
    gc.collect()
  assert unraisable == []
