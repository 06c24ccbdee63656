"""A run that no longer owns its workdir commits, renames and removes nothing."""

import pytest

from tests.training.checkpointing.states import (
  CONFIG,
  RECORD,
  contents,
  counting_tree,
  save_counting,
)
from training.checkpointing.async_writer import SaveError
from training.checkpointing.checkpointer import Checkpointer


class Owner:
  """The right to write, until `lost` is set; counts how often it was asked for."""

  def __init__(self, number):
    self.number, self.lost, self.asked = number, False, 0

  def require(self):
    """Raises once it is lost."""
    self.asked += 1
    if self.lost:
      raise RuntimeError("owned by another run")


def test_a_save_that_is_under_way_is_not_committed(tmp_path, monkeypatch):
  owner, said = Owner(7), []
  with Checkpointer(tmp_path, owner=owner, warn=said.append) as checkpointer:
    save_counting(checkpointer, 1)
    checkpointer.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    owner.lost = True
    with pytest.raises(SaveError, match="owned by another run"):
      checkpointer.wait()
    with pytest.raises(RuntimeError, match="owned by another run"):
      checkpointer.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    assert checkpointer.steps() == [1]
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names[0] == "1"
  assert all(name.startswith("2.saving-7") for name in names[1:])  # its own alone, not removed
  assert any("owned by another run" in line for line in said)


def test_what_the_next_owner_has_is_left_alone(tmp_path):
  owner = Owner(7)
  with Checkpointer(tmp_path, keep=1, owner=owner, warn=lambda text: None) as stale:
    save_counting(stale, 1)
    with Checkpointer(tmp_path, keep=2, owner=Owner(8)) as fresh:
      save_counting(fresh, 2, 3)
      (tmp_path / "4.saving-8").mkdir()
      owner.lost, before = True, contents(tmp_path)
      for change in (lambda: stale.remove_after(1), lambda: stale._set_aside([2])):
        with pytest.raises(RuntimeError, match="owned by another run"):
          change()
      stale._writer._tidy("leftovers", stale._writer.remove_leftovers)
      assert contents(tmp_path) == before
      (tmp_path / "4.saving-8").rmdir()


def test_the_next_owner_takes_the_unfinished_save_of_the_one_before_away(tmp_path):
  stale = Checkpointer(tmp_path, owner=Owner(7), warn=lambda text: None)
  meanwhile = []

  def replaced():
    """Comes when the right was asked for the last time, just before the rename."""
    meanwhile.append((tmp_path / "2.saving-7" / "digests").exists())
    with Checkpointer(tmp_path, owner=Owner(8)):
      meanwhile.append([path.name for path in tmp_path.iterdir()])

  with stale:
    save_counting(stale, 1)
    stale.save(2, counting_tree(2), config=CONFIG, record=RECORD)
    stale._owner.require = replaced
    with pytest.raises(SaveError, match=r"2\.saving-7"):
      stale.wait()
    stale._owner.require = lambda: None
    assert stale.steps() == [1]
  assert meanwhile[:2] == [True, ["1"]]
