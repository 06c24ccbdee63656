"""What is shown while data is prepared, and that a stop then leaves nothing half made."""

import pathlib

import pytest

from input_pipeline import tfds_documents
from processes import preemption
from processes.preemption import Stopped, StopRequest
from training.metrics import console


@pytest.fixture(autouse=True)
def _look_always(monkeypatch):
  """Lets each tick look at the clock."""
  monkeypatch.setattr(console, "_LOOK_SECONDS", 0.0)


def files_of(folder: pathlib.Path) -> list[str]:
  return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("after", [1, 2])
def test_a_stop_ends_the_preparation_and_leaves_nothing_half_made(config, tmp_path, after):
  data, seen = config("digits", "image", data_dir=str(tmp_path)), []
  with StopRequest() as stop:

    def tick(what: str, count: int, text: str = "") -> None:
      seen.append(what)
      if len(seen) == after:
        stop.request("SIGINT")
      shown.tick(what, count, text)

    with console.preparing("digits") as shown:
      assert stop.polls
      with pytest.raises(Stopped):
        tfds_documents.prepare(data, "test", tick)
  assert len(seen) == after
  left = files_of(tmp_path)
  assert all(name.endswith(".lock") for name in left), left
  assert not list(tmp_path.rglob("*.tmp"))
  assert preemption.current() is None
  assert len(tfds_documents.prepare(data, "test")[0].documents)


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
  monkeypatch.setattr(console, "_LOG_SECONDS", -1.0)
  with console.preparing("text, train") as shown:
    shown.tick("documents", 3)
    shown.tick("documents", 7, "7 documents, 90 tokens")
  line, last = capsys.readouterr().out.splitlines()
  assert line == "preparing text, train: 7 documents, 90 tokens"
  assert last.startswith("prepared text, train: 7 documents in ")


def test_a_log_gets_one_line_and_only_where_something_was_prepared(config, tmp_path, capsys):
  data = config("digits", "image", data_dir=str(tmp_path))
  for _ in range(2):
    with console.preparing("digits, test") as shown:
      tfds_documents.prepare(data, "test", shown.tick)
  [line] = capsys.readouterr().out.splitlines()
  assert line.startswith("prepared digits, test: 300 images in ")
