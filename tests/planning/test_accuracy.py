"""The accuracy that plans state is that of the pages which measure it."""

import pathlib
import re

import pytest

from planning import accuracy

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def column(page, number):
  """Returns the cells of a column of each table of a page whose first column is the model."""
  parts = (DOCS / page).read_text().split("\n\n")
  tables = [part for part in parts if part.startswith("| model")]
  return [[row.split("|")[number].strip() for row in one.splitlines()[2:]] for one in tables]


def test_throughputs_are_those_of_the_page():
  cells = column("planner_accuracy.md", 4)
  assert [len(found) for found in cells] == [3, 2]
  ratios = [[float(cell) for cell in found if cell] for found in cells]
  stated = [accuracy.PUBLISHED, accuracy.PUBLISHED_BY_FORMULA]
  assert [(min(r), max(r)) for r in ratios] == stated


def test_traffic_is_that_of_the_page():
  [flops], [cells] = column("planner_traffic.md", 4), column("planner_traffic.md", 7)
  ratios = [float(cell) for cell in cells]
  assert (min(ratios), max(ratios)) == accuracy.TRAFFIC
  assert {*flops} == {"1.00"}  # "the FLOPs agree"


def test_memory_is_that_of_the_page():
  [cells] = column("planner_memory.md", 4)
  ratios = [float(cell) for cell in cells]
  close, every = accuracy.MEMORY
  assert (sum(abs(ratio - 1) <= 0.1 for ratio in ratios), len(ratios)) == (close, every)
  assert f"{close} of {every} are within 10 %" in (DOCS / "planner_memory.md").read_text()


@pytest.mark.parametrize(
  ("platform", "compiled", "said"),
  [
    ("cpu", True, "simulated devices"),
    ("tpu", True, r"\d\.\d\d to \d\.\d\d of published TPU throughputs"),
    ("tpu", False, "unknown by formula, without the compiler"),
    ("gpu", False, r"by formula, predictions are \d\.\d\d to \d\.\d\d of two published"),
  ],
)
def test_what_is_said_of_times(platform, compiled, said):
  assert re.match(
    said, accuracy.of_times(platform, compiled=compiled).removeprefix("predictions are ")
  )
