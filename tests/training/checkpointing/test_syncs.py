"""The order in which a save reaches the disk, which decides what a power cut leaves."""

from tests.helpers.syncs import Syncs
from tests.training.checkpointing.states import save_counting
from training.checkpointing import async_writer
from training.checkpointing.checkpointer import Checkpointer


def test_a_step_is_on_the_disk_before_its_name_and_its_name_before_the_older_ones_go(
  tmp_path, monkeypatch
):
  syncs, removed = Syncs(monkeypatch), []
  original = async_writer.Writer._remove_folder

  def remove(writer, folder):
    removed.append((folder.name, len(syncs.events)))
    original(writer, folder)

  monkeypatch.setattr(async_writer.Writer, "_remove_folder", remove)
  with Checkpointer(tmp_path / "checkpoints", tokenizer={"tokenizer.json": b"{}"}) as checkpoints:
    save_counting(checkpoints, 1, 2)
  folder = tmp_path / "checkpoints"
  assert syncs.unsynced_at(folder / "1") == syncs.unsynced_at(folder / "2") == []
  committed = syncs.place("rename", folder / "2.saving", folder / "2")
  aside = syncs.place("rename", folder / "1", folder / "1.removing")
  assert ("sync", folder) in syncs.events[committed:aside]
  [(_, began)] = [one for one in removed if one[0] == "1.removing"]
  assert syncs.events[aside + 1 : began] == [("sync", folder)]
