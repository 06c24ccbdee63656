"""Tests stand where the tree has what they test: by name, or by a row of docs/architecture.md."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TITLE = "## Files whose test has another name"
NOT_TESTED = {"tests", "benchmarks", "requirements", "docs"}


def production():
  """Returns the paths of all files that may need a test, relative to the root."""
  tops = (top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith("."))
  packages = [top for top in tops if top.name not in NOT_TESTED and any(top.glob("*.py"))]
  files = [path for top in packages for path in sorted(top.rglob("*.py"))]
  with_code = (path for path in files if len(ast.parse(path.read_text()).body) > 1)
  return [path.relative_to(ROOT).as_posix() for path in with_code if path.name != "__init__.py"]


def own_test(file):
  path = pathlib.PurePosixPath(file)
  return f"tests/{path.parent}/test_{path.name}"


def rows():
  """Returns file -> the tests that its row names."""
  section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
  found = {}
  for line in section.splitlines():
    if line.startswith("| `"):
      files, tests = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
      found.update(dict.fromkeys(files, tests))
  return found


def test_every_file_has_a_test_of_its_name_or_a_row():
  files = production()
  assert len(files) > 100
  named = {file for file in files if (ROOT / own_test(file)).exists()}
  assert set(files) - named == set(rows())


def test_the_tests_of_a_row_are_there():
  for file, tests in rows().items():
    assert tests, file
    for test in tests:
      assert (ROOT / test).exists(), f"{file}: {test}"
