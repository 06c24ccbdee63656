"""The prediction that plans state is that of the page which measures it."""

import pathlib

import pytest

from benchmarks import planner_accuracy
from benchmarks.published_runs import MEASURED, bound, error, runs_of
from configs import single
from planning import prediction
from runtime.chips import CHIPS
from tests.docs.pages import section

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "plan.md").read_text()
THROUGHPUT = "## Predicted and published throughput"
MEMORY = "## Memory by formula and by the compiler"


def tables(heading, first):
  """Returns the rows, as lists of cells, of each table of a section whose first column is so."""
  parts = [one for one in section(PAGE, heading).split("\n\n") if one.startswith(f"| {first}")]
  lines = [part.splitlines()[2:] for part in parts]
  return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in rows] for rows in lines]


def test_the_record_of_each_class_is_that_of_the_page():
  [classes] = tables(THROUGHPUT, "class")
  percents = {name: [int(cell.split()[0]) for cell in cells[:4]] for name, *cells in classes}
  stated = {
    name: [one.runs, *(round(100 * share) for share in (one.median, one.worst, one.range))]
    for name, one in prediction.RECORDS.items()
  }
  assert stated == percents


def test_the_records_follow_from_the_rows_of_the_page():
  compiled, formula, _ = tables(THROUGHPUT, "model, topology")
  of_programs = [one for name, one in prediction.RECORDS.items() if name.endswith("compiled")]
  assert sum(one.runs for one in of_programs) == len(compiled)
  worst = max(error(float(row[2])) for row in compiled)
  assert worst == pytest.approx(max(one.worst for one in of_programs), abs=0.006)
  by_formula = [one for one in prediction.RECORDS.values() if one not in of_programs]
  assert sum(one.runs for one in by_formula) == len(formula)
  worst = max(error(float(row[2])) for row in formula)
  assert worst == pytest.approx(max(one.worst for one in by_formula), rel=0.03)
  assert abs(2 * sum(row[5] == "fitted" for row in formula) - len(formula)) <= 12  # about half


def test_what_was_measured_on_one_gpu_is_predicted_as_the_page_says():
  [*_, rows] = tables(THROUGHPUT, "model, topology")
  found = [planner_accuracy.step_of(run) for run in runs_of(MEASURED)]
  assert rows == [planner_accuracy.cells(-1, step) for step in found]
  for step in found:  # what XLA keeps of unrolled layers, and the gradient of the logits
    assert step.peak / 2**30 == pytest.approx(step.run.memory_gib, rel=0.1)
  llama, gpt2 = (step.ratio() for step in found)  # half of GPT-2's step is not matmuls
  assert error(llama) < 0.25
  assert error(gpt2) < 0.25
  # With the share that was fitted to published steps of several GPUs, a third too slow.
  fitted = f"h100.matmul={CHIPS['h100'].formula}"
  assert found[0].ratio(fitted) < 0.8


def test_a_range_covers_nine_of_ten():
  ratios = [1.01, 0.98, 1.1, 1 / 1.2, 1.05, 1.0, 1.03, 0.97, 1.3, 2.0]
  assert bound(ratios) == pytest.approx(1.0)  # of ten runs the tenth
  assert bound([*ratios, *[1.0] * 20]) == pytest.approx(0.2)  # of thirty the 28th


@pytest.mark.parametrize(
  ("overrides", "platform", "compiled", "name"),
  [
    ({}, "tpu", True, "TPU, compiled"),
    ({}, "tpu", False, "TPU, dense"),
    ({"model.experts": 4}, "gpu", False, "GPU, experts"),
    ({"training.matmul_dtype": "float8"}, "gpu", False, "GPU, 8 bits"),
    ({"mesh.stage": 4}, "gpu", False, "GPU, stages"),
  ],
)
def test_the_class_of_a_run(overrides, platform, compiled, name):
  config = single.get_config()
  config.update_from_flattened_dict(overrides)
  assert prediction.class_of(platform, config, compiled=compiled) == name
  record = prediction.RECORDS[name]
  said = prediction.accuracy_of_times(name)
  assert said.startswith(f"of {record.runs} published runs ({name}")
  low, _, high = prediction.range_of(2.0, name, 0.0)
  assert (low * (1 + record.range), high / (1 + record.range)) == pytest.approx((2.0, 2.0))
  assert prediction.range_of(2.0, name, 0.25) == pytest.approx((1.6, 2.0, 2.5))  # as asked for


def test_what_has_no_record_says_so():
  assert "simulated devices" in prediction.accuracy_of_times("CPU, compiled")
  assert "unknown" in prediction.accuracy_of_times("TPU, stages")


def test_memory_is_that_of_the_page():
  [rows] = tables(MEMORY, "model")
  ratios = [float(row[3]) for row in rows]
  close, every = prediction.MEMORY
  assert (sum(abs(ratio - 1) <= 0.1 for ratio in ratios), len(ratios)) == (close, every)
  assert f"{close} of {every} are within 10 %" in section(PAGE, MEMORY)
