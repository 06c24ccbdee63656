"""What is compared before the first collective: who differs, in what, and who does not see what."""

import functools
import pathlib
import re

import pytest
from etils import epath

from processes import preflight
from processes.coordination import NotTogetherError
from processes.preflight import DifferenceError, agree, differences, same_folder
from tests.processes.stores import groups_of, together


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
  """A folder that another process does not see is waited for a moment, not 4 s."""
  monkeypatch.setattr(preflight, "_LATE_SECONDS", 0.7)


def agreed(*facts, stage="start", seconds=20.0):
  """Returns what `agree` raised on each process, "" for nothing."""
  members = groups_of(len(facts))
  calls = [
    functools.partial(agree, member, stage, own, timeout_seconds=seconds)
    for member, own in zip(members, facts, strict=True)
  ]
  results = together(*calls)
  assert all(r is None or isinstance(r, DifferenceError) for r in results), results
  return ["" if result is None else str(result) for result in results]


def test_the_same_facts():
  facts = {"seed": 0, "mesh": {"data": 2}, "tables": [["a", None]], "name": "x", "rate": 0.1}
  assert agreed(facts, dict(facts), dict(facts)) == ["", "", ""]


def test_one_differs_and_all_say_the_same():
  texts = agreed({"seed": 0, "b": 1}, {"seed": 7, "b": 1}, {"seed": 0, "b": 1})
  assert len(set(texts)) == 1
  assert "\n  seed: 0 on processes 0, 2; 7 on process 1\n" in texts[0]
  assert "b:" not in texts[0]


@pytest.mark.parametrize(
  ("shown", "line"),
  [
    ([{"k": 1}, {"k": 2}, {"k": 2}], "k: 2 on processes 1, 2; 1 on process 0"),
    ([{"k": "b"}, {"k": "a"}], 'k: "b" on process 0; "a" on process 1'),  # those with process 0
    ([{"k": n} for n in (1, 2, 3, 3)], "k: 3 on processes 2, 3; 1 on process 0; 2 on process 1"),
    ([{"k": 1, "n": None}, {"n": None}], "k: 1 on process 0; missing on process 1"),
    ([{"k": 1}, {"k": "1"}], 'k: 1 on process 0; "1" on process 1'),
    ([{"k": 0}, {"k": False}], "k: 0 on process 0; false on process 1"),
    (
      [{"k": index == 99} for index in range(100)],
      "k: false on processes 0, 1, 2, 3, 4, 5, ...; true on process 99",
    ),
  ],
)
def test_a_line_names_each_value_and_its_processes(shown, line):
  assert differences(dict(enumerate(shown))) == [line]


def test_more_lines_than_one_reads():
  first, second = ({f"key{n:02}": n + own for n in range(20)} for own in (0, 1))
  text = agreed(first, second)[0]
  lines = text.splitlines()
  assert [line.split(":")[0].strip() for line in lines[1:13]] == [f"key{n:02}" for n in range(12)]
  assert lines[13:] == ["  and 8 more", "start all with the same command, code and libraries"]


def test_someone_who_does_not_come_is_named():
  first, second, _ = groups_of(3)
  results = together(
    *(
      functools.partial(agree, member, "run", {}, timeout_seconds=0.2) for member in (first, second)
    )
  )
  for result in results:
    assert isinstance(result, NotTogetherError)
    assert (
      "process 2 of 3 has not reached 'run' within 0.2 s (processes.start_timeout_seconds)"
      in str(result)
    )


def test_stages_are_compared_apart():
  members = groups_of(2)

  def both(member):
    agree(member, "start", {"k": 1}, timeout_seconds=20)
    agree(member, "run", {"k": member.index}, timeout_seconds=20)

  results = together(*(functools.partial(both, member) for member in members))
  assert ["k: 0 on process 0; 1 on process 1" in str(result) for result in results] == [True] * 2


# ------------------------------ one folder ------------------------------


def sees(*folders: pathlib.Path):
  """Returns what `same_folder` raised on each process, each with a folder of its own."""
  members = groups_of(len(folders))
  calls = [
    functools.partial(same_folder, member, epath.Path(folder), timeout_seconds=20)
    for member, folder in zip(members, folders, strict=True)
  ]
  return together(*calls)


def everything(folder: pathlib.Path) -> list[str]:
  """Returns what lies in a folder."""
  return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("there", [["run", "run/config.json"], []])
def test_all_see_the_folder_and_what_was_in_it_stays(tmp_path, there):
  if there:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
  assert sees(*[tmp_path / "run"] * 3) == [None] * 3
  assert everything(tmp_path) == (there or ["run"])


def test_one_sees_another_folder_and_nothing_is_left(tmp_path):
  (tmp_path / "other").mkdir()
  run = tmp_path / "runs" / "of" / "mine"
  for result in sees(run, tmp_path / "other", run):
    assert isinstance(result, DifferenceError)
    text = str(result)
    assert re.match(r"process 1 of 3 cannot read what process 0 writes to the workdir /", text)
    assert "name a folder that all see (a network file system, or gs://...) with --workdir" in text
  assert everything(tmp_path) == ["other"]


def test_process_0_cannot_write(tmp_path):
  (tmp_path / "file").write_text("")
  first, _ = groups_of(2)
  with pytest.raises(OSError, match="file"):
    same_folder(first, epath.Path(tmp_path / "file" / "run"), timeout_seconds=1)


class LateFolder(type(epath.Path("/"))):
  """A folder of a network file system: what others write there shows itself after a while."""

  asked = 0

  def exists(self) -> bool:
    """Is not there when asked for the first times."""
    if ".preflight" in self.name:
      LateFolder.asked += 1
      if LateFolder.asked < 4:
        return False
    return super().exists()


def test_a_folder_that_shows_itself_late(tmp_path):
  # A client of NFS may take a folder that another has just made for missing, for some seconds.
  members = groups_of(2)
  folders = (epath.Path(tmp_path / "run"), LateFolder(tmp_path / "run"))
  results = together(
    *(
      functools.partial(same_folder, member, folder, timeout_seconds=20)
      for member, folder in zip(members, folders, strict=True)
    )
  )
  assert LateFolder.asked == 4, results
  assert results == [None, None]
