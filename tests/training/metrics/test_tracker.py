"""Experiment trackers by their real packages, offline: `make test-sinks`.

SINKS_PYTHON names another Python that has them than that of .venv-sinks.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from etils import epath

from configs import base
from training.metrics.built_in_sinks import SinkError, TrackerSink
from training.metrics.sinks import TRACKERS

pytestmark = pytest.mark.sinks
ROOT = pathlib.Path(__file__).parents[3]
PYTHON = os.environ.get("SINKS_PYTHON", str(ROOT / ".venv-sinks/bin/python"))
FIND = "import importlib.util as u, sys; print(*filter(u.find_spec, sys.argv[1:]))"
# Opens every tracker, writes metrics.jsonl and to them as a run does, and is killed.
KILLED = """
import json, os, signal, sys, time
from etils import epath
from tests.training.metrics.test_tracker import config_of
from training.metrics.built_in_sinks import TrackerSink
workdir = epath.Path(sys.argv[1])
sinks = [TrackerSink(name, config_of(), workdir, 0) for name in json.loads(sys.argv[2])]
print(*(sink._process.pid for sink in sinks), flush=True)
for step, loss in enumerate((4.0, 3.0, 2.5, 2.25), 1):
  values = {"loss": loss, "learning_rate": 0.125}
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": step, **values}) + "\\n")
  for sink in sinks:
    sink.write(step, values)
while any(sink._messages.empty() for sink in sinks):
  time.sleep(0.1)
for sink in sinks:
  sink._take(sink._messages.get())
os.kill(os.getpid(), signal.SIGKILL)
"""


def config_of(**keys):
  """Returns a config with keys of its section `metrics` replaced."""
  config = base.get_config("mlp", mesh={})
  config.metrics.update({"sinks_python": PYTHON, "sink_wait_seconds": 120.0, **keys})
  return config


@pytest.fixture
def installed(monkeypatch):
  """Returns the trackers that the environment has; without settings and keys of this machine's."""
  for name in os.environ:
    if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "AIM_")):
      monkeypatch.delenv(name)
  monkeypatch.setenv("NETRC", os.devnull)
  found = subprocess.run(
    [PYTHON, "-c", FIND, *TRACKERS],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout.split()
  assert {"wandb", "mlflow", "trackio"} <= {*found}, f"{PYTHON}: run `make test-sinks`"
  return found


def kept(folder):
  """Returns tracker -> run -> metric -> points, as its package reads them."""
  reader = pathlib.Path(__file__).with_name("read_trackers.py")
  out = subprocess.run([PYTHON, "-P", reader, folder], stdout=subprocess.PIPE, check=True).stdout
  return json.loads(out.splitlines()[-1])


def ended(pid):
  """Returns whether a process that is not ours has ended."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
  except FileNotFoundError:
    return True


def test_a_killed_run_is_continued_and_a_step_that_differs_is_the_newer_one(installed, tmp_path):
  workdir = epath.Path(tmp_path / "first run")
  workdir.mkdir()
  command = [sys.executable, "-c", KILLED, workdir, json.dumps(installed)]
  killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  assert killed.returncode == -9
  until = time.monotonic() + 120
  while not all(map(ended, killed.stdout.split())):  # they deliver what they have been sent
    assert time.monotonic() < until
    time.sleep(0.1)
  sinks = {name: TrackerSink(name, config_of(), workdir, 2) for name in installed}
  notes = {}
  for name, sink in sinks.items():
    for step, loss in ((3, 2.5), (4, 2.0), (5, 1.75)):
      sink.write(step, {"loss": loss, "learning_rate": 0.125})
    sink.write(5, {"eval_loss": 1.5})
    sink.on_rollback(4)
    sink.write(5, {"loss": 1.25})
    sink.close()
    [notes[name]] = sink.news()
  found = kept(tmp_path)
  for name in installed:
    [(run, metrics)] = found[name].items()
    if name == "aim":  # a step that comes again replaces the earlier one
      losses = [[1, 4.0], [2, 3.0], [3, 2.5], [4, 2.0], [5, 1.25]]
    else:  # step 3 was the same, and is not sent again
      losses = [[1, 4.0], [2, 3.0], [3, 2.5], [4, 2.25], [4, 2.0], [5, 1.75], [5, 1.25]]
    assert metrics["loss"] == losses, name
    assert metrics["eval_loss"] == [[5, 1.5]], name
    assert metrics["rolled_back"] == [[4, 1.0]], name
    assert run in (workdir / "sinks.json").read_text()
  assert "wandb sync" in notes["wandb"]
  assert "mlflow ui" in notes["mlflow"]


@pytest.mark.parametrize(
  ("name", "variables"),
  [
    ("wandb", {"WANDB_BASE_URL": "http://{}", "WANDB_API_KEY": "0" * 40}),
    ("mlflow", {"MLFLOW_TRACKING_URI": "http://{}"}),
    ("trackio", {"TRACKIO_SERVER_URL": "http://{}", "TRACKIO_WRITE_TOKEN": "token"}),
  ],
)
def test_a_server_that_never_answers_is_not_waited_for(
  installed, monkeypatch, tmp_path, name, variables
):
  with socket.create_server(("127.0.0.1", 0)) as server:
    for key, value in variables.items():
      monkeypatch.setenv(key, value.format(f"127.0.0.1:{server.getsockname()[1]}"))
    sink = TrackerSink(name, config_of(sink_wait_seconds=4.0), epath.Path(tmp_path), 0)
    began = time.monotonic()
    for step in range(1, 1000):
      sink.write(step, {"loss": 1.0 / step})
    assert time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(SinkError, match=r"it has not delivered all lines within 4 s|Timeout"):
      sink.close()
    assert time.monotonic() - began < 8
    assert sink._process.poll() is not None


def test_a_run_of_the_application_is_kept_by_all_of_them(installed, tmp_path):
  command = [sys.executable, "main.py", "--config=configs/single.py:mlp"]
  command += [f"--workdir={tmp_path / 'runs' / 'digits'}", "--config.metrics.every_steps=1"]
  command += ["--config.metrics.tensorboard=false", f"--config.metrics.sinks_python={PYTHON}"]
  command += ["--config.metrics.sink_wait_seconds=120.0"]
  command += [
    f"--config.metrics.sinks=csv,{','.join(installed)}",
    "--config.checkpoint.every_steps=2",
  ]
  for steps in (2, 4):
    more = [f"--config.training.steps={steps}"]
    done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dropped" not in done.stderr
    assert "to open: mlflow ui" in done.stdout
  lines = map(json.loads, (tmp_path / "runs/digits/metrics.jsonl").read_text().splitlines())
  losses = [[line["step"], line["loss"]] for line in lines if "loss" in line]
  assert [step for step, _ in losses] == [1, 2, 3, 4]
  found = kept(tmp_path / "runs")
  for name in installed:
    [metrics] = found[name].values()
    assert metrics["loss"] == losses, name
