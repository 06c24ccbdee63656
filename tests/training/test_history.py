"""The history of a run: a line per event, whatever a kill or a full disk has left."""

import json

import pytest
from etils import epath

from training import history, workdir_files
from training.history import History


def test_events_read_back_in_their_order(tmp_path):
  written = History(epath.Path(tmp_path))
  written.add("start", 0, mesh={"data": 2})
  written.add("saved", 5)
  first, second = history.events((tmp_path / workdir_files.HISTORY).read_bytes())
  assert (first["event"], first["step"], first["mesh"]) == ("start", 0, {"data": 2})
  assert (second["event"], second["step"]) == ("saved", 5)
  assert second["time"] >= first["time"]


def test_a_line_that_a_kill_has_cut_short_does_not_damage_the_next(tmp_path):
  path = tmp_path / workdir_files.HISTORY
  History(epath.Path(tmp_path)).add("start", 0)
  path.write_bytes(path.read_bytes() + b'{"event": "sav')
  History(epath.Path(tmp_path)).add("start", 3)
  assert [one["step"] for one in history.events(path.read_bytes())] == [0, 3]


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path):
  (tmp_path / workdir_files.HISTORY).mkdir()
  said = []
  written = History(epath.Path(tmp_path), report=said.append)
  written.add("start", 0)
  written.add("saved", 1)
  assert len(said) == 1
  assert "history.jsonl" in said[0]
  assert "training continues" in said[0]


def test_a_run_that_may_not_write_any_more_does_not(tmp_path):
  def lost():
    raise RuntimeError("another run has taken over")

  with pytest.raises(RuntimeError, match="taken over"):
    History(epath.Path(tmp_path), lost).add("start", 0)
  assert not (tmp_path / workdir_files.HISTORY).read_bytes()


@pytest.mark.parametrize(
  "line", ["[]", "3", '{"event": 1, "step": 2, "time": 3}', '{"event": "a"}', "\x00", "{" * 99]
)
def test_lines_that_are_no_events_are_left_out(line):
  good = json.dumps({"event": "a", "step": 1, "time": 2.0})
  content = "\n".join([line, good, line]).encode()
  assert [one["step"] for one in history.events(content)] == [1]
