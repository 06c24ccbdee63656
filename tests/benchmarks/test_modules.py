"""Benchmarks run as modules, `python -m benchmarks.NAME`, from the root of the project."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
PROGRAMS = [path for path in BENCHMARKS if '__name__ == "__main__"' in path.read_text()]


def test_nothing_changes_where_modules_are_found():
  files = [*BENCHMARKS, *sorted((ROOT / "reports/tour").glob("*.py"))]
  assert len(files) > 20
  assert [path.name for path in files if "sys.path" in path.read_text()] == []


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_names_the_command_that_runs_it(path):
  assert f"python -m benchmarks.{path.stem}" in ast.get_docstring(ast.parse(path.read_text()))
