"""Several processes: what is said of runs that end in other ways."""

import dataclasses
import json
import sys

import pytest

from reports import run_files
from reports.tour import launching, processes
from tests.reports import runs

SAVED = launching.Ended(75, {0: 75, 1: 75}, "[0] step 3/9\n", 12.0, ())


@pytest.fixture
def said(tmp_path):
  """Returns what is said of a run that ended in another way."""

  def of(saved=(3,), logged=(1, 2, 3), **changes):
    run = None
    if logged is not None:
      runs.write(tmp_path, metrics=[{"step": step, "loss": 1.0} for step in logged])
      run = dataclasses.replace(run_files.read(tmp_path), on_disk=list(saved))
    shown = processes._run((dataclasses.replace(SAVED, **changes), run))
    return "\n".join([*shown.findings, shown.text, *shown.measured])

  return of


def test_runs_that_end_well(said):
  text = said()
  assert "Nothing hangs" in text
  assert "Process 1: exit code 75 (stopped, after saving)." in text
  assert "Both leave after the same step: one step is saved, the last one made." in text
  assert "It took 12 s; steps made: 3." in text


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"hung": (0, 1)}, "Hangs, and has to be killed: process 0 and process 1."),
    ({"hung": (0,)}, "Hangs, and has to be killed: process 0.\nProcess 1: exit code 75"),
    ({"codes": {1: 134}}, "Process 0: exit code 0 (done).\nProcess 1: exit code 134 (failed)."),
    ({"saved": (2,)}, "Steps logged: 3; steps saved: 1."),
    ({"saved": (2, 3)}, "Steps logged: 3; steps saved: 2."),
    ({"logged": None}, "No step was made, and no workdir."),
    ({"code": 2, "out": "[0] refused: a\n[0]   b\nlaunch: c\n"}, "\nrefused: a\n  b\n"),
  ],
)
def test_runs_that_end_otherwise(said, changes, text):
  assert text in said(**changes)
  assert text not in said()


def members(rows):
  """Returns what two processes of two devices print: device -> its rows."""
  places = [[0, 1], [2048, 2049]]
  lines = [
    {"process": p, "local": local, "global": [0, 1, 2048, 2049], "shape": [4], "rows": dict(held)}
    for p, (local, held) in enumerate(zip(places, rows, strict=True))
  ]
  out = "".join(f"[{line['process']}] {json.dumps(line)}\n" for line in reversed(lines))
  return {"data": 4}, dataclasses.replace(SAVED, out="launch: started\n" + out)


def test_who_feeds_what():
  split = members([{"0": [0], "1": [1]}, {"2048": [2], "2049": [3]}])
  shown = processes._who_feeds_what(split)
  assert shown.findings == [
    "Process 0 has devices 0 to 1; there are 4 in all. Its batch has shape [4], and it feeds rows "
    "0 to 1.",
    "Process 1 has devices 2 to 3; there are 4 in all. Its batch has shape [4], and it feeds rows "
    "2 to 3.",
    "Each row is fed by one process.",
  ]
  both = members([{"0": [0, 1], "1": [2, 3]}, {"2048": [0, 1], "2049": [2, 3]}])
  assert processes._who_feeds_what(both).findings[-1] == "Each row is fed by 2 processes."
  none = {"data": 4}, dataclasses.replace(SAVED, out="launch: no such command\n")
  with pytest.raises(RuntimeError, match="0 answered:\nlaunch: no such command"):
    processes._who_feeds_what(none)


# ------------------------------ real processes ------------------------------


def python(script):
  """Returns a command that starts faster without the installed packages."""
  return [sys.executable, "-S", "-c", script]


def test_an_argument_of_process_1_alone():
  command = [*python("import sys; print(sys.argv[1:])"), "--rows=1"]
  ended = launching.start(command, second="--rows=2")
  assert sorted(line for line in ended.out.splitlines() if line.startswith("[")) == [
    "[0] ['--rows=1']",
    "[1] ['--rows=1', '--rows=2']",
  ]
  assert (ended.code, ended.codes, ended.hung) == (0, {}, ())


@pytest.mark.long
def test_one_is_asked_to_stop_and_the_other_hangs(tmp_path):
  script = f"""
import os, pathlib, signal, time
index = os.environ["JAX_PROCESS_ID"]
if index == "1":
  signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
pathlib.Path({str(tmp_path)!r}, index).touch()
while len(os.listdir({str(tmp_path)!r})) < 2:
  time.sleep(0.01)
if index == "0":
  print("step 1/9", flush=True)
time.sleep(60)
"""
  ended = launching.start(python(script), stopped=1)
  assert ended.codes == {1: 1}
  assert ended.hung == (0,)


@pytest.mark.long
def test_what_hangs_is_ended():
  script = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
  # In 3 s both are up also on a busy machine; a launcher stopped while it starts them has no run.
  ended = launching.start(python(script), limit_seconds=3, grace_seconds=1)
  assert ended.hung == (0, 1)
