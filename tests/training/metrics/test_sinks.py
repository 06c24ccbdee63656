"""training/metrics/sinks.py: what a sink is given, and that one that fails ends nothing."""

import types

import pytest

from training.metrics import sinks
from training.metrics.log_lines import MetricsWriter
from training.metrics.sinks import Sinks


class Kept:
  """A sink that keeps what it is given, and fails where it is told to."""

  def __init__(self, fails=""):
    self.got, self.closed, self.fails = [], 0, fails

  def write(self, step, values):
    if self.fails == "write":
      raise OSError("no connection")
    self.got.append((step, values))

  def close(self):
    self.closed += 1
    if self.fails == "close":
      raise OSError("no connection")


@pytest.fixture
def table(monkeypatch):
  """Returns the table of sinks, with what a test adds to it."""
  monkeypatch.setattr(sinks, "SINKS", {})
  return sinks.SINKS


def opened(table, kept, said, workdir="w", step=3):
  """Returns the sinks of a run, each opened by a function that notes its arguments."""
  calls = []
  for name, sink in kept.items():
    table[name] = lambda *arguments, sink=sink: calls.append(arguments) or sink
  config = types.SimpleNamespace(metrics=types.SimpleNamespace(sinks=tuple(kept)))
  made = Sinks(config, workdir, step, said.append)
  assert calls == [(config, workdir, step)] * len(kept)
  return made


def test_a_sink_gets_the_lines_of_steps_and_evaluations(table, tmp_path):
  kept, said = Kept(), []
  with MetricsWriter(
    tmp_path, step=0, tensorboard=False, sinks=lambda: opened(table, {"kept": kept}, said)
  ) as writer:
    writer.write(1, {"loss": 2.0})
    writer.write_times(1, {"goodput": 0.5, "done": False})
    writer.write(2, {"eval_loss": 1.5})
  assert kept.got == [(1, {"loss": 2.0}), (2, {"eval_loss": 1.5})]
  assert (kept.closed, said) == (1, [])


def test_a_sink_that_raises_is_reported_once_and_dropped(table):
  bad, good, said = Kept("write"), Kept(), []
  made = opened(table, {"bad": bad, "good": good}, said)
  made.write(1, {"loss": 2.0})
  made.write(2, {"loss": 1.0})
  [line] = said
  assert line.startswith("the sink 'bad' is dropped, training continues: ")
  assert f"{__file__}:" in line
  assert line.endswith("OSError: no connection")
  assert [step for step, _ in good.got] == [1, 2]
  made.close()
  assert (bad.closed, good.closed) == (0, 1)


def test_one_that_cannot_be_opened_or_closed_is_reported_too(table):
  said = []
  table["closed"] = lambda *_: 1 / 0
  config = types.SimpleNamespace(metrics=types.SimpleNamespace(sinks=("closed",)))
  Sinks(config, "w", 0, said.append).write(1, {})
  opened(table, {"late": Kept("close")}, said).close()
  assert [line.partition(": ")[0] for line in said] == [
    "the sink 'closed' is dropped, training continues",
    "the sink 'late' is dropped, training continues",
  ]


def test_only_a_sink_that_has_on_rollback_is_notified_of_one(table):
  told, other, wrong, said = Kept(), Kept(), Kept(), []
  told.on_rollback = lambda step: told.got.append(f"back to {step}")
  wrong.on_rollback = lambda step: 1 / 0
  made = opened(table, {"told": told, "other": other, "wrong": wrong}, said)
  made.write(5, {"loss": 2.0})
  made.on_rollback(4)
  made.write(5, {"loss": 1.0})
  assert told.got == [(5, {"loss": 2.0}), "back to 4", (5, {"loss": 1.0})]
  assert other.got == [(5, {"loss": 2.0}), (5, {"loss": 1.0})]
  [line] = said
  assert line.startswith("the sink 'wrong' is dropped, training continues: ")


def test_a_line_that_a_sink_changes_stays_for_the_others(table):
  kept, said = Kept(), []
  changing = Kept()
  changing.write = lambda step, values: values.clear()
  opened(table, {"changing": changing, "kept": kept}, said).write(1, {"loss": 2.0})
  assert kept.got == [(1, {"loss": 2.0})]
