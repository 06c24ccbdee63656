"""Traces: of the steps that are asked for, and no part of a step for the watchdog."""

import jax
import pytest
from etils import epath
from ml_collections import ConfigDict

from processes.coordination import Group
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from training.metrics.profiler import Profile


@pytest.fixture
def traced(monkeypatch, tmp_path):
  """Returns a function that traces steps 4 and 5 of eight; its argument takes a trace's time."""

  def run(stop_trace) -> list[str]:
    watch = Watchdog(Group(), StopRequest(), deadline_seconds=7, start_timeout_seconds=300)
    done = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: done.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: stop_trace(watch, done))
    keys = ConfigDict({"start_step": 4, "steps": 2})
    with Profile(keys, epath.Path(tmp_path), watch) as profile:
      for step in range(8):
        profile.before(step)
        watch.at(f"step {step + 1}: waiting for its batch", begins=True)
        watch.at(f"step {step + 1}: computing")
        done.append(step)
    assert watch.limit() == 7, "of a step"
    return done

  return run


def test_writing_a_trace_is_no_part_of_a_step(traced):
  limits = []

  def stop_trace(watch: Watchdog, done: list) -> None:
    limits.append(watch.limit())
    done.append("stop")

  assert traced(stop_trace) == [0, 1, 2, 3, "start", 4, 5, "stop", 6, 7]
  assert limits == [300]


def test_a_trace_that_cannot_be_written_costs_no_step(traced, capsys):
  def stop_trace(watch: Watchdog, done: list) -> None:
    raise RuntimeError("No space left on device")

  assert traced(stop_trace) == [0, 1, 2, 3, "start", 4, 5, 6, 7]
  assert "WARNING: no trace could be written" in capsys.readouterr().out


def test_a_trace_that_is_written_makes_progress(tmp_path):
  watch = Watchdog(Group(), StopRequest())
  profile = Profile(ConfigDict({"start_step": 0, "steps": 0}), epath.Path(tmp_path), watch)
  before = profile._progress()
  (tmp_path / "plugins").mkdir()
  (tmp_path / "plugins" / "trace").write_bytes(bytes(100))
  assert profile._progress()[0] == before[0] + 100
