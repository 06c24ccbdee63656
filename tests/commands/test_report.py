"""The verb `report`: pages from workdirs alone, and what it refuses."""

import pytest

from tests.reports import runs
from tests.reports.test_layout_page import Reader


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  other = {**runs.CONFIG, "seed": 4}
  return runs.write(folder / "one"), runs.write(folder / "two", config=other)


def test_the_page_of_a_run_and_of_several(main, two):
  one, other = two
  code, out, err = main("report", f"--workdir={one}")
  assert (code, err) == (0, "")
  assert out.startswith(f"wrote {one}/run.html, ")
  said = "".join(Reader((one / "run.html").read_text()).said)
  assert "Step 40 of 60" in said
  assert f"python main.py report --workdir={one}" in said
  file = one.parent / "both.html"
  code, out, err = main("report", f"--workdir={one}", "--against", str(other), f"--html={file}")
  assert (code, err) == (0, "")
  read = Reader(file.read_text())
  assert ["seed", "3", "4"] in read.rows
  assert f"report --workdir={one} --against {other} --html" in "".join(read.said)
  code, out, _ = main("report", f"--workdir={one}", f"--against={other}")
  assert (code, out.split(",")[0]) == (0, f"wrote {one}/against.html")


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    ((), "give the run's --workdir"),
    (("--workdir=",), "--workdir= is empty"),
    (("--workdir={one}", "--against="), "--against= is empty"),
    (("--workdir={one}", "--against={one}/"), "/one is given twice"),
    (("--workdir={one}", *(f"--against={n}" for n in range(8))), "9 runs, and there are colors"),
    (("--workdir={one}/none",), "/one/none does not exist"),
    (("--workdir={one}/..",), "is not a run's folder"),
    (("--workdir={one}", "--html={one}/none/x.html"), "give a file in a folder that exists"),
    (("--workdir={one}", "--html={one}"), "give a file in a folder that exists"),
    (("--config=configs/dp8.py",), "--config belongs to the verbs"),
    (("more",), "unexpected 'more' after the verb"),
  ],
)
def test_what_is_refused_has_exit_code_two(main, two, words, expected):
  code, out, err = main("report", *(word.format(one=two[0]) for word in words))
  assert (code, out) == (2, "")
  assert expected in err
  assert len(err.splitlines()) == 1


def test_against_stays_a_config_for_other_verbs(main, two):
  code, _, err = main("layout", "--config=configs/dp8.py:mlp", f"--against={two[1]}")
  assert code == 2
  assert "there is no config file" in err
