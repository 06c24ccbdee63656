"""The prediction that plans state is that of the page which measures it."""

import pathlib
import re

import pytest

from planning import prediction
from tests.docs.pages import section

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "plan.md").read_text()
THROUGHPUT = "## Predicted and published throughput"
TRAFFIC = "## FLOPs and HBM traffic by formula and in compiled programs"
MEMORY = "## Memory by formula and by the compiler"


def column(heading, number):
  """Returns the cells of a column of each table of a section whose first column is the model."""
  parts = section(PAGE, heading).split("\n\n")
  tables = [part for part in parts if part.startswith("| model")]
  return [[row.split("|")[number].strip() for row in one.splitlines()[2:]] for one in tables]


def test_throughputs_are_those_of_the_page():
  cells = column(THROUGHPUT, 4)
  assert [len(found) for found in cells] == [3, 2]
  ratios = [[float(cell) for cell in found if cell] for found in cells]
  stated = [prediction.PUBLISHED, prediction.PUBLISHED_BY_FORMULA]
  assert [(min(r), max(r)) for r in ratios] == stated


def test_traffic_is_that_of_the_page():
  [flops], [cells] = column(TRAFFIC, 4), column(TRAFFIC, 7)
  ratios = [float(cell) for cell in cells]
  assert (min(ratios), max(ratios)) == prediction.TRAFFIC
  assert {*flops} == {"1.00"}  # "the FLOPs agree"


def test_memory_is_that_of_the_page():
  [cells] = column(MEMORY, 4)
  ratios = [float(cell) for cell in cells]
  close, every = prediction.MEMORY
  assert (sum(abs(ratio - 1) <= 0.1 for ratio in ratios), len(ratios)) == (close, every)
  assert f"{close} of {every} are within 10 %" in section(PAGE, MEMORY)


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
    said, prediction.accuracy_of_times(platform, compiled=compiled).removeprefix("predictions are ")
  )
