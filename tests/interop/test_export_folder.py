"""The folder of an export: what is refused, what a kill leaves, and that it appears at once."""

import os

import pytest
from etils import epath

from interop.export_folder import ExportFolder, check


def begun(final):
  folder = ExportFolder(check(str(final), None))
  folder.begin()
  return folder


def test_it_appears_under_its_name_complete(tmp_path):
  final = tmp_path / "new" / "model"
  folder = begun(final)
  folder.write("config.json", "{}")
  assert not final.exists()
  folder.commit()
  assert [path.name for path in final.iterdir()] == ["config.json"]
  assert [path.name for path in final.parent.iterdir()] == ["model"]


def test_an_empty_folder_may_be_there_and_links_are_followed(tmp_path):
  (tmp_path / "there").mkdir()
  (tmp_path / "link").symlink_to("there")
  folder = begun(tmp_path / "link")
  folder.write("a.json", "{}")
  folder.commit()
  assert (tmp_path / "there" / "a.json").exists()
  assert (tmp_path / "link").is_symlink()


def test_what_a_kill_has_left_is_replaced(tmp_path):
  killed = begun(tmp_path / "model")
  killed.write("model.safetensors", b"half")
  killed.write("tokenizer.json.tmp", b"")
  os.close(killed._lock)  # as the kernel does
  folder = begun(tmp_path / "model")
  assert list(folder.path.iterdir()) == []
  folder.write("config.json", "{}")
  folder.commit()
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_export_leaves_nothing(tmp_path):
  folder = begun(tmp_path / "model")
  folder.write("config.json", "{}")
  folder.remove()
  assert list(tmp_path.iterdir()) == []


def test_two_exports_to_one_folder(tmp_path):
  folder = begun(tmp_path / "model")
  with pytest.raises(ValueError, match=r"another export is writing .*model\.exporting; wait"):
    check(str(tmp_path / "model"), None)
  with pytest.raises(ValueError, match="another export is writing"):
    ExportFolder(folder.final).begin()
  folder.remove()


def test_something_appears_meanwhile(tmp_path):
  folder = begun(tmp_path / "model")
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "notes").write_text("mine")
  with pytest.raises(FileExistsError, match=r"written there meanwhile.*model"):
    folder.commit()
  folder.remove()
  assert (tmp_path / "model" / "notes").read_text() == "mine"


def test_refusals_change_nothing(tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "full").mkdir()
  for name in "abcdefg":
    (tmp_path / "full" / name).write_text("")
  (tmp_path / "x.exporting").mkdir()
  (tmp_path / "x.exporting" / "thesis.tex").write_text("")
  (tmp_path / "y.exporting").symlink_to("full")
  steps = tmp_path / "run" / "checkpoints"
  (steps / "4").mkdir(parents=True)
  before = sorted(map(str, tmp_path.rglob("*")))
  for name, said in {
    "file": "file is a file; give a folder that is new or empty",
    "full": r"full is not empty \(it has a, b, c, d, e and 2 more\)",
    "x": r"x\.exporting has thesis\.tex, which no export writes",
    "y": r"y\.exporting is not a folder",
    "run/checkpoints": "it is among the checkpoints of the run",
    "run/checkpoints/4/model": "it is among the checkpoints of the run",
  }.items():
    with pytest.raises(ValueError, match=said):
      check(str(tmp_path / name), epath.Path(steps))
  assert check(str(tmp_path / "run" / "model"), epath.Path(steps)).name == "model"
  assert sorted(map(str, tmp_path.rglob("*"))) == before
