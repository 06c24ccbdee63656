"""Every second of a run is in one bin, over all its starts."""

import json
import time

import psutil
import pytest

from processes import preemption
from tests.training import runs
from tests.training.runs import ROLL_BACK, source, train
from tests.training.test_bad_steps import NAN, KilledError, dying
from training.metrics import goodput
from training.metrics.goodput import Goodput, began, process_started


class Clock:
  """A clock that is set by hand, and a wall clock that is 1,000 s ahead of it."""

  def __init__(self):
    """Starts at 100 s."""
    self.now = 100.0

  def monotonic(self):
    """Returns the seconds of the clock."""
    return self.now

  def time(self):
    """Returns those of the wall."""
    return 1000.0 + self.now


@pytest.fixture
def clock(monkeypatch):
  """Returns the clock that the bins are filled by."""
  made = Clock()
  monkeypatch.setattr(goodput, "time", made)
  return made


def seconds(**bins):
  """Returns all bins."""
  return {**dict.fromkeys(goodput.BINS, 0.0), **bins}


def test_one_clock_runs_in_one_bin_at_a_time(clock):
  bins = Goodput(90.0, None)
  clock.now = 105.0
  bins.switch("compile")
  clock.now = 110.0
  bins.switch("step")
  clock.now = 113.0
  with bins.within("evaluation"):
    clock.now = 114.0
    with bins.within("save"):
      clock.now = 120.0
    clock.now = 122.0
  clock.now = 123.0
  line = bins.line()
  assert line["seconds"] == seconds(start=15.0, compile=5.0, step=4.0, evaluation=3.0, save=6.0)
  assert line["time"] == 1123.0
  assert line["goodput"] == pytest.approx(4 / 33, abs=1e-6)
  assert bins.text() == ""  # of less than a minute
  clock.now = 156.0
  assert "goodput 56.1 % of 1:06: start 22.7 %, compile 7.6 %, step 56.1 %" in bins.text()


def test_what_came_after_the_line_of_the_checkpoint_is_lost(clock):
  last = {"seconds": seconds(start=10.0, step=50.0, lost_to_restart=1.0), "time": 1060.0}
  bins = Goodput(90.0, {**last, "done": False})
  assert bins.line()["seconds"] == seconds(start=20.0, step=50.0, lost_to_restart=31.0)
  bins = Goodput(90.0, {**last, "done": True})  # nobody had asked for more
  assert bins.line()["seconds"] == seconds(start=20.0, step=50.0, lost_to_restart=1.0)


def test_steps_that_are_undone_are_lost_and_starting_is_not(clock):
  bins = Goodput(100.0, None)
  bins.switch("step")
  clock.now = 110.0
  line = bins.line()
  clock.now = 115.0
  bins.switch("input_wait")
  clock.now = 117.0
  bins.switch("compile")
  clock.now = 118.0
  bins.undo(line)
  expected = seconds(step=10.0, compile=1.0, lost_to_restart=7.0)
  assert bins.line()["seconds"] == expected
  bins.undo(None)
  assert bins.line()["seconds"] == seconds(compile=1.0, lost_to_restart=17.0)


def last_times(workdir):
  """Returns the last line about where the time went."""
  found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in found if "goodput" in line][-1]


def test_the_bins_of_a_killed_run_that_went_back_add_up_to_its_wall_time(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(goodput, "LEAST_SECONDS", 0.0)
  rows = source({7: NAN})
  mortal = dying(rows, 14)
  began = time.time()
  with pytest.raises(KilledError):
    train(tmp_path, mortal, **ROLL_BACK)
  time.sleep(0.5)
  train(tmp_path, rows, **ROLL_BACK)
  whole, line = time.time() - began, last_times(tmp_path)
  total = sum(line["seconds"].values())
  assert line["step"] == runs.STEPS
  assert line["done"]
  assert total == pytest.approx(line["time"] - began, rel=0.01)
  assert total <= whole
  assert line["seconds"]["lost_to_restart"] > 0.5
  assert all(value > 0 for value in line["seconds"].values())
  assert "lost to restarts" in capsys.readouterr().out


def test_the_age_of_this_process():
  # Between its readings of two clocks the process may be suspended; hardly so each time.
  started = min(process_started() for _ in range(20))
  age = time.time() - psutil.Process().create_time()
  assert time.monotonic() - started == pytest.approx(age, abs=2)
  time.sleep(0.1)
  assert min(process_started() for _ in range(20)) == pytest.approx(started, abs=0.02)


def test_a_process_that_has_joined_later_counts_from_then(monkeypatch):
  assert began() == pytest.approx(process_started(), abs=0.02)
  monkeypatch.setattr(preemption, "joined", time.monotonic() - 5)
  assert time.monotonic() - began() == pytest.approx(5, abs=0.1)


# ------------------------------ clocks that jump ------------------------------

HOUR, YEAR = 3600.0, 365 * 24 * 3600.0


class BootClock(Clock):
  """A clock with one that runs since the machine was started, and a wall clock that may jump."""

  CLOCK_BOOTTIME = 7

  def __init__(self):
    """Starts at 100 s, 5,000 s after the machine."""
    super().__init__()
    self.jump = 0.0

  def time(self):
    """Returns the seconds of the wall clock."""
    return super().time() + self.jump

  def clock_gettime(self, which):
    """Returns the seconds since the machine was started."""
    assert which == self.CLOCK_BOOTTIME
    return 5000.0 + self.now


@pytest.mark.parametrize("jump", [-HOUR, YEAR])
def test_a_wall_clock_that_jumps_on_one_machine_changes_no_bin(jump, monkeypatch):
  clock = BootClock()
  monkeypatch.setattr(goodput, "time", clock)
  bins = Goodput(100.0, None)
  clock.now = 110.0
  bins.switch("step")
  clock.jump = jump  # in a step
  clock.now = 150.0
  last = bins.line()
  assert last["seconds"] == seconds(start=10.0, step=40.0)
  clock.jump = 0.0  # and back, before the next process
  clock.now = 180.0
  bins = Goodput(170.0, last)
  assert not bins.doubt
  clock.jump = jump  # in its start
  assert bins.line()["seconds"] == seconds(start=20.0, step=40.0, lost_to_restart=20.0)


@pytest.mark.parametrize("jump", [-HOUR, YEAR])
def test_an_impossible_pause_is_not_counted_if_another_machine_resumes(jump, monkeypatch):
  clock = BootClock()
  monkeypatch.setattr(goodput, "time", clock)
  last = {**Goodput(90.0, None).line(), "boot": "another machine's"}
  clock.now, clock.jump = 120.0, jump
  bins = Goodput(120.0, last)
  assert bins.line()["seconds"] == seconds(start=10.0)
  assert "that is not counted as lost to the restart" in bins.doubt
  clock.jump = 30.0
  assert Goodput(120.0, last).line()["seconds"] == seconds(start=10.0, lost_to_restart=50.0)
