"""training/metrics/built_in_sinks.py: whatever a tracker's package does, the run goes its way.

The package is one of this test, in the process that the real ones have (test_tracker.py).
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from etils import epath

from configs import base
from training.metrics import built_in_sinks, sinks
from training.metrics.built_in_sinks import SinkError, TrackerSink
from training.metrics.sinks import Sinks

# Appends what it is given to a file, and does what BEHAVIOR says.
PACKAGE = """
import atexit, json, os, time
behavior = os.environ["BEHAVIOR"]
print("printed by the package")
def keep(*what):
  with open(os.environ["KEPT"], "a") as file:
    file.write(json.dumps(what) + "\\n")
def act(where):
  if behavior == f"raise in {where}":
    raise OSError("no connection")
  if behavior == f"hang in {where}":
    open(os.environ["KEPT"] + ".hangs", "w").close()
    time.sleep(1000)
  if behavior == f"die in {where}":
    os._exit(7)
act("import")
class Run:
  def log(self, values, step):
    act("log")
    keep(step, values)
  def finish(self):
    act("finish")
    keep("finished")
    atexit.register(act, "exit")
def init(**arguments):
  act("init")
  keep("init", arguments["project"], arguments["name"], arguments["config"]["seed"])
  return Run()
"""


@pytest.fixture
def behave(monkeypatch, tmp_path):
  """Returns a function that sets how the package behaves, and returns the file that it keeps."""
  (tmp_path / "package").mkdir()
  for name in sinks.TRACKERS:
    (tmp_path / "package" / f"{name}.py").write_text(PACKAGE)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))
  monkeypatch.setenv("KEPT", str(tmp_path / "kept"))

  def set_to(behavior=""):
    monkeypatch.setenv("BEHAVIOR", behavior)
    return tmp_path / "kept"

  return set_to


class Clock:
  """In place of the module `time`: a tenth of a second passes at each look, once `passes()`."""

  sleep = staticmethod(time.sleep)

  def __init__(self, passes):
    """Starts at 0 s."""
    self.now, self._passes = 0.0, passes

  def monotonic(self):
    """Returns the seconds so far."""
    self.now += 0.1 * self._passes()
    return self.now


@pytest.fixture
def clock(monkeypatch, tmp_path):
  """Returns the clock of the sinks, which stands still until the package hangs."""
  made = Clock((tmp_path / "kept.hangs").exists)
  monkeypatch.setattr(built_in_sinks, "time", made)
  return made


def config_of(seconds=60.0):
  """Returns a config with the tracker, for whose end a run waits so long."""
  config = base.get_config("mlp", mesh={})
  config.metrics.update({"sinks": ("trackio",), "sink_wait_seconds": seconds})
  config.metrics.update({"project": "digits", "run_name": "first"})
  return config


def kept(file):
  """Returns what the package has kept."""
  return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_arrive_in_order_and_a_resumed_run_sends_what_differs(behave, tmp_path):
  file, workdir = behave(), epath.Path(tmp_path)
  sink = TrackerSink("trackio", config_of(), workdir, 0)
  for step in range(1, 301):
    sink.write(step, {"loss": 1 / step, "nan": float("nan")})
  sink.close()
  [[_, project, name, seed], *lines, end] = kept(file)
  assert (project, seed, end) == ("digits", 0, ["finished"])
  assert name.startswith("first-")
  assert [(step, values["loss"]) for step, values in lines] == [(s, 1 / s) for s in range(1, 301)]
  [note] = sink.news()
  assert note.startswith("trackio: to open: TRACKIO_DIR=")
  assert "printed by the package" in (workdir / "sink_trackio.log").read_text()

  losses = [{"step": 300, "loss": 1 / 300}, {"step": 301, "loss": 2.0}, {"step": 302, "loss": 3.0}]
  content = [*losses, {"step": 302, "eval_loss": 5.0}]
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in content))
  file.unlink()
  sink = TrackerSink("trackio", config_of(), workdir, 300)
  for step, loss in ((301, 2.0), (302, 3.5), (303, 4.0)):
    sink.write(step, {"loss": loss})
    sink.write(step, {"eval_loss": 5.0})
  sink.on_rollback(302)
  sink.write(303, {"loss": 4.5})
  sink.close()
  assert kept(file)[1:] == [
    [301, {"eval_loss": 5.0}],
    [302, {"loss": 3.5}],
    [303, {"loss": 4.0}],
    [303, {"eval_loss": 5.0}],
    [302, {"rolled_back": 1.0}],
    [303, {"loss": 4.5}],
    ["finished"],
  ]
  assert kept(file)[0][2] == name

  file.unlink()
  (workdir / "sinks.json").write_text('{"trackio": {"name": "an older run"}}')
  TrackerSink("trackio", config_of(), workdir, 0).close()  # a run from scratch is another one
  assert kept(file)[0][2] != "an older run"


@pytest.mark.parametrize(
  ("how", "where"), [("raise", "init"), ("hang", "log"), ("die", "finish"), ("die", "init")]
)
def test_whatever_fails_is_reported_once_and_leaves_no_process(behave, clock, tmp_path, how, where):
  behave(f"{how} in {where}")
  said = []
  made = Sinks(config_of(0.7), epath.Path(tmp_path), 0, said.append)
  [sink] = made._open.values()
  for step in range(1, 4):
    made.write(step, {"loss": 1.0})
  made.close()
  assert clock.now < 1
  [line] = said
  why = {
    "raise": "OSError: no connection",
    "hang": "it has not delivered all lines within 0.7 s",
    "die": "its process has ended with code 7",
  }[how]
  see = tmp_path / "sink_trackio.log"
  assert line == f"the sink 'trackio' is dropped, training continues: {why} (see {see})"
  assert sink._process.poll() is not None
  made.write(4, {"loss": 1.0})
  assert len(said) == 1


def test_a_package_that_hangs_at_the_exit_has_delivered_all_and_is_ended(behave, clock, tmp_path):
  file = behave("hang in exit")
  sink = TrackerSink("trackio", config_of(2.0), epath.Path(tmp_path), 0)
  sink.write(1, {"loss": 1.0})
  sink.close()
  assert 1.9 < clock.now < 2.2
  assert sink._process.poll() is not None
  assert kept(file)[-1] == ["finished"]


def test_a_process_that_is_suspended_does_not_block_the_run(behave, monkeypatch, tmp_path):
  behave()
  monkeypatch.setattr(built_in_sinks, "time", Clock(lambda: True))
  sink = TrackerSink("trackio", config_of(0.5), epath.Path(tmp_path), 0)
  os.kill(sink._process.pid, signal.SIGSTOP)
  sink.write(1, dict.fromkeys(map(str, range(10_000)), 1.0))  # more than a pipe holds
  sink.write(2, {"loss": 1.0})
  with pytest.raises(SinkError, match=r"it has not delivered all lines within 0\.5 s"):
    sink.close()
  assert sink._process.poll() is not None


def test_a_stop_during_the_wait_shortens_it(behave, clock, tmp_path, monkeypatch):
  behave("hang in log")
  monkeypatch.setattr(built_in_sinks, "_STOPPING_SECONDS", 0.5)
  monkeypatch.setattr(built_in_sinks.preemption, "current", lambda: clock.now > 1.0)
  sink = TrackerSink("trackio", config_of(60.0), epath.Path(tmp_path), 0)
  sink.write(1, {"loss": 1.0})
  with pytest.raises(SinkError, match=r"within 0\.5 s"):
    sink.close()
  assert clock.now < 1.5


def test_trackers_that_hang_are_waited_for_together(behave, clock, tmp_path):
  behave("hang in import")
  said, config = [], config_of(1.5)
  config.metrics.sinks = sinks.TRACKERS
  made = Sinks(config, epath.Path(tmp_path), 0, said.append)
  made.write(1, {"loss": 1.0})
  made.close()
  assert clock.now < 2 * 1.5  # not four times
  assert sum("within 1.5 s" in line for line in said) == len(said) == 4


@pytest.mark.parametrize(
  ("behavior", "code", "last"),
  [("", 0, ["finished"]), ("hang in finish", -signal.SIGKILL, [1, {"loss": 1.0}])],
)
def test_after_a_kill_of_the_run_it_delivers_what_it_was_sent_and_ends(
  behave, tmp_path, behavior, code, last
):
  file = behave(behavior)
  start = {"project": "digits", "name": "first", "folder": str(tmp_path), "config": {"seed": 0}}
  lines = [{**start, "state": None, "wait_seconds": 0.5 if code else 60.0}, [1, {"loss": 1.0}]]
  process = subprocess.Popen(
    [sys.executable, "-P", built_in_sinks.SCRIPT, "trackio"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
  process.stdin.flush()
  assert "state" in json.loads(process.stdout.readline())
  process.stdin.close()
  process.stdout.close()
  assert process.wait(60) == code
  assert kept(file)[-1] == last


def test_a_package_that_is_missing_is_refused_before_the_run(monkeypatch):
  config = config_of()
  monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"not installed: trackio; run `make sinks`, and add --conf"):
    sinks.require_packages(config.metrics)
  config.metrics.sinks_python = "/nowhere/python"
  with pytest.raises(ValueError, match="there is no such program"):
    sinks.require_packages(config.metrics)
  config.metrics.sinks = ("csv",)
  sinks.require_packages(config.metrics)


def test_a_python_without_the_package_is_reported(tmp_path, monkeypatch):
  said = []
  monkeypatch.setenv("PYTHONPATH", "")
  made = Sinks(config_of(), epath.Path(tmp_path), 0, said.append)
  made.close()
  [line] = said
  assert "ModuleNotFoundError: No module named 'trackio'" in line
  assert pathlib.Path(tmp_path / "sink_trackio.log").exists()
