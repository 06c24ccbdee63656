"""CsvSink: the rows and columns of metrics.csv."""

import csv
import json

import pytest
from etils import epath

from configs import base
from tests.training.metrics.test_append_log import full_disk
from training.metrics.built_in_sinks import CsvSink
from training.metrics.log_lines import MetricsWriter
from training.metrics.sinks import Sinks


@pytest.fixture
def csv_config():
  """Returns a config with this sink."""
  config = base.get_config("mlp", mesh={})
  config.metrics.sinks = ("csv",)
  return config


def rows(folder):
  """Returns the rows of metrics.csv, without their empty cells."""
  with (folder / "metrics.csv").open(newline="") as file:
    return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def opened(folder, step, config):
  """Returns the writer of a run from a step, with the sink."""

  def sinks():
    return Sinks(config, epath.Path(folder), step, lambda text: 1 / 0)

  return MetricsWriter(epath.Path(folder), step=step, tensorboard=False, sinks=sinks)


def test_rows_are_those_of_metrics_jsonl_after_a_resume_and_a_rollback(tmp_path, csv_config):
  with opened(tmp_path, 0, csv_config) as writer:
    writer.write(1, {"loss": 2.5, "lr": 0.1})
    writer.write(2, {"loss": 2.0, "lr": 0.2, "mfu": 0.25})  # a new column
    writer.write_times(2, {"goodput": 0.5, "done": False, "seconds": {}, "time": 1.0})
    writer.write(2, {"eval_loss": 1 / 3, "eval_accuracy/a,b": 0.5})
    writer.write(3, {"loss": 9.0, "lr": 0.3})
  with opened(tmp_path, 2, csv_config) as writer:
    writer.write(3, {"loss": 1.5, "lr": 0.3})
    writer.write(4, {"loss": float("nan"), "lr": 0.4})
    writer.roll_back(3, 1, {"rolled_back": 4, "why": "loss is nan"})
    writer.write(4, {"loss": 1.0, "lr": 0.4})
  assert rows(tmp_path) == [
    {"step": 1, "loss": 2.5, "lr": 0.1},
    {"step": 2, "loss": 2.0, "lr": 0.2, "mfu": 0.25},
    {"step": 2, "eval_loss": 1 / 3, "eval_accuracy/a,b": 0.5},
    {"step": 3, "loss": 1.5, "lr": 0.3},
    {"step": 4, "loss": 1.0, "lr": 0.4},
  ]
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert rows(tmp_path) == [x for x in lines if "goodput" not in x and "rolled_back" not in x]


def test_a_full_disk_is_waited_for_and_reported_if_it_stays_full(tmp_path, csv_config):
  sink, said = CsvSink(epath.Path(tmp_path), 0), []
  sink.write(1, {"loss": 2.5})
  with full_disk(12):
    sink.write(2, {"loss": 2.0})
    assert rows(tmp_path) == [{"step": 1, "loss": 2.5}]
  sink.write(3, {"loss": 1.5})
  assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
  with full_disk(12):
    full = Sinks(csv_config, epath.Path(tmp_path), 0, said.append)
    for step in range(1, 9):
      full.write(step, {"loss": 2.5})
    full.close()
  [line] = said
  assert "the sink 'csv' is dropped, training continues" in line
  assert "metrics.csv cannot be written: File too large" in line
