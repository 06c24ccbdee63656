"""The verb `report`: pages from workdirs alone, and what it refuses."""

import re
import shlex

import pytest

from commands import report
from tests.reports import runs
from tests.reports.test_layout_page import Reader


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  other = {**runs.CONFIG, "seed": 4}
  return runs.write(folder / "one"), runs.write(folder / "two", config=other)


def test_the_page_of_a_run_and_of_several(main, two):
  one, other = two
  code, out, err = main("report", str(one))
  assert (code, err) == (0, "")
  assert out.startswith(f"wrote {one}/run.html, ")
  said = "".join(Reader((one / "run.html").read_text()).said)
  assert "Step 40 of 60" in said
  assert f"python main.py report {one}" in said
  # The other folders that match are no runs'.
  pages = []
  for words, file in (
    ((f"--workdir={one}", "--against", str(other)), one / "against.html"),
    ((f"{one.parent}/*", f"--html={one.parent}/both.html"), one.parent / "both.html"),
  ):
    code, out, err = main("report", *words)
    assert (code, err) == (0, "")
    *table, wrote = out.splitlines()
    assert [line.split()[0] for line in table] == ["run", "one", "two"]
    assert wrote.startswith(f"wrote {file}, ")
    pages.append(read := Reader(file.read_text()))
    assert ["seed", "3", "4"] in read.rows
    assert shlex.join(["python", "main.py", "report", *words]) in "".join(read.said)
  assert pages[0].rows == pages[1].rows


def test_a_folder_of_runs_has_an_index_with_a_link_to_each(main, tmp_path):
  for name in ("a", "b/c", "b/d"):
    runs.write(tmp_path / name)
  (tmp_path / "notes").mkdir()
  (tmp_path / "a" / "run.html").write_text("kept")
  code, out, err = main("report", f"{tmp_path}/")
  assert (code, err) == (0, "")
  assert [line.split()[0] for line in out.splitlines()] == ["run", "a", "c", "d", "wrote"]
  assert f"wrote {tmp_path}/index.html, " in out
  read = Reader((tmp_path / "index.html").read_text())
  assert read.links[:3] == ["a/run.html", "b/c/run.html", "b/d/run.html"]
  assert (tmp_path / "a" / "run.html").read_text() == "kept"
  assert "Step 40 of 60" in (tmp_path / "b" / "d" / "run.html").read_text()


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    ((), "name a run, such as runs/dp4_tp2_lm, or several"),
    (("{one}", ""), "a run's name is empty"),
    (("{one}", "{one}/"), "/one is given twice"),
    (("{one}", "{runs}/on?"), "/one is given twice"),
    (("{runs}/lr*",), "no run's workdir matches '"),
  ],
)
def test_words_that_name_no_runs_are_refused(two, words, expected):
  with pytest.raises(ValueError, match=re.escape(expected)):
    report._folders([word.format(one=two[0], runs=two[0].parent) for word in words])


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    (("{one}/none",), "/one/none does not exist"),
    (("{one}", "--html={one}/none/x.html"), "give a file in a folder that exists"),
  ],
)
def test_what_is_refused_has_exit_code_two(main, two, words, expected):
  code, out, err = main("report", *(word.format(one=two[0], runs=two[0].parent) for word in words))
  assert (code, out) == (2, "")
  assert expected in err
  assert len(err.splitlines()) == 1
