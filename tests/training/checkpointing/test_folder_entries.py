"""What this application has not made is neither removed, nor renamed, nor counted as a step."""

import pathlib
import shutil

import pytest
from etils import epath

from tests.training.checkpointing.states import (
  CONFIG,
  RECORD,
  assert_bit_equal,
  contents,
  counting_target,
  counting_tree,
  restored_parameters,
  save_counting,
)
from training.checkpointing import integrity, reading
from training.checkpointing.async_writer import SaveError
from training.checkpointing.checkpointer import Checkpointer

NOTES = "somebody's work of a month\n"


def notes(folder, name):
  """Makes a folder with notes."""
  (folder / name).mkdir(parents=True)
  (folder / name / "notes.txt").write_text(NOTES)


# Names that a step, a save, a removal or a broken step would have.
FOREIGN = (
  "7",
  "999",
  "50.saving_notes",
  "50.saving",
  "50.saving-1",
  "51.removing",
  "52.orbax-checkpoint-tmp",
  "53.saving.orbax-checkpoint-tmp",
  "54.backup",
)


def foreign_contents(folder):
  """Returns the contents of the foreign folders that are there."""
  return {name: contents(folder / name) for name in FOREIGN if (folder / name).exists()}


def test_foreign_folders_are_reported_and_left_alone(tmp_path):
  said = []
  for name in FOREIGN:
    notes(tmp_path, name)
  before = foreign_contents(tmp_path)
  with Checkpointer(tmp_path, keep=2, warn=said.append) as checkpointer:
    assert checkpointer.steps() == []
    save_counting(checkpointer, 1, 2, 3, 4)  # retention removes 1 and 2
    assert checkpointer.steps() == [3, 4]
    assert checkpointer.restore(counting_target())[0] == 4
    checkpointer.remove_after(3)
    assert checkpointer.steps() == [3]
  assert foreign_contents(tmp_path) == before
  names = ", ".join(sorted(FOREIGN))
  assert said == [
    f"WARNING: {tmp_path} contains entries not saved by this application: {names}; "
    f"they are left alone, and no step can be saved under these names"
  ]


@pytest.mark.parametrize(("step", "named"), [(7, "7"), (50, "50.saving")])
def test_a_step_whose_place_is_taken_is_not_saved_and_the_next_one_is(step, named, tmp_path):
  notes(tmp_path, named)
  before = foreign_contents(tmp_path)
  with Checkpointer(tmp_path, warn=lambda _: None) as checkpointer:
    with pytest.raises(SaveError, match=rf"/{named} is there, and was not saved by this applic"):
      checkpointer.save(step, counting_tree(step), config=CONFIG, record=RECORD)
    save_counting(checkpointer, step + 1)
    assert checkpointer.steps() == [step + 1]
  assert foreign_contents(tmp_path) == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns a folder with two steps."""
  folder = tmp_path_factory.mktemp("saved") / "checkpoints"
  with Checkpointer(folder, keep=2) as checkpointer:
    save_counting(checkpointer, 10, 20)
  return folder


@pytest.fixture
def copy(saved, tmp_path):
  """Returns a copy of that folder."""
  return shutil.copytree(saved, tmp_path / "checkpoints")


def test_a_damaged_step_is_still_ours(copy):
  (copy / "20" / "digests").rename(copy / "digests")
  assert integrity.steps(epath.Path(copy)) == [10, 20], "by its items"
  (copy / "digests").rename(copy / "20" / "digests")
  shutil.rmtree(copy / "20" / "record")
  assert integrity.steps(epath.Path(copy)) == [10, 20], "by its digests"
  (copy / "20" / "digests").write_text("somebody else's\n")
  assert integrity.steps(epath.Path(copy)) == [10]


def test_each_broken_step_is_kept(copy):
  notes(copy, "20.broken")
  (copy / "20" / "commit_success.txt").unlink()
  with Checkpointer(copy, keep=2, warn=lambda _: None) as checkpointer:
    assert checkpointer.restore(counting_target())[0] == 10
    save_counting(checkpointer, 20)
    (copy / "20" / "commit_success.txt").unlink()
    assert checkpointer.restore(counting_target())[0] == 10
  assert (copy / "20.broken" / "notes.txt").read_text() == NOTES
  assert sorted(path.name for path in copy.iterdir()) == [
    "10",
    "20.broken",
    "20.broken-2",
    "20.broken-3",
  ]


def test_a_link_to_a_step_is_not_a_step_of_this_folder(copy, tmp_path):
  elsewhere = tmp_path / "elsewhere" / "20"
  elsewhere.parent.mkdir()
  (copy / "20").rename(elsewhere)
  (copy / "20").symlink_to(elsewhere)
  before, said = contents(elsewhere), []
  with Checkpointer(copy, warn=said.append) as checkpointer:
    assert checkpointer.steps() == [10]
    checkpointer.remove_after(0)
    save_counting(checkpointer, 30, 40)
    assert checkpointer.steps() == [40]
  assert (copy / "20").is_symlink()
  assert contents(elsewhere) == before
  assert "not saved by this application: 20;" in said[0]
  # Named by itself it can be read.
  folder, step = reading.parse_location(str(copy / "20"))
  _, parameters = restored_parameters(folder, step)
  assert_bit_equal(parameters, counting_tree(20)["params"])


def test_a_step_with_somebody_elses_files_in_it_is_not_removed(copy):
  (copy / "10" / "notes.txt").write_text(NOTES)
  said = []
  with Checkpointer(copy, keep=1, warn=said.append) as checkpointer:
    save_counting(checkpointer, 30, 40)
    assert checkpointer.steps() == [10, 40]
  assert (copy / "10" / "notes.txt").read_text() == NOTES
  assert said == [f"WARNING: {copy / '10'} holds more than was saved there, and is not removed"]


def test_what_saves_have_left_is_recognized_by_its_name_and_its_content(tmp_path):
  names = {
    "50.saving": True,
    "50.saving-3": True,
    "50.saving-7-1": True,
    "50.saving-7-1.orbax-checkpoint-tmp": True,
    "0.saving-1a2b3c4d": True,
    "50.removing-2": True,
    "50.saving.orbax-checkpoint-tmp": True,
    "50.orbax-checkpoint-tmp-17": True,
    "50.saving_notes": False,
    "50.savings": False,
    "50.removing.old": False,
    "x50.saving": False,
    "50": False,
  }
  for name, ours in names.items():
    path = pathlib.Path(tmp_path / name)
    path.mkdir()
    (path / "state.orbax-checkpoint-tmp").mkdir()
    (path / "digests.tmp").touch()
    (path / "state" / "ocdbt.process_0" / "d").mkdir(parents=True)
    (path / "state" / "ocdbt.process_0" / "d" / ("0a" * 16 + ".__lock")).touch()
    assert integrity.is_leftover(epath.Path(path)) == ours, name
    for place in (path, path / "state", path / "state" / "ocdbt.process_0" / "d"):
      (place / "notes.txt").touch()
      assert not integrity.is_leftover(epath.Path(path)), (name, place)
      (place / "notes.txt").unlink()
