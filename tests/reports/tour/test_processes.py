"""Several processes and what they cost: what is said of runs that end in other ways."""

import dataclasses
import json
import subprocess
import sys

import pytest

from reports.tour import cost, launching, processes

SAVED = launching.Ended(
  code=75,
  codes={0: 75, 1: 75},
  out="[0] step 3/9\n",
  seconds=12.0,
  stopped=1,
  hung=(),
  made=True,
  saved=(3,),
  logged=(1, 2, 3),
)


def said(**changes):
  """Returns what is said of a run that ended in another way."""
  shown = processes._run(dataclasses.replace(SAVED, **changes))
  return "\n".join([*shown.findings, shown.text, *shown.measured])


def test_runs_that_end_well():
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
    ({"made": False, "saved": (), "logged": ()}, "No step was made, and no workdir."),
    ({"code": 2, "out": "[0] refused: a\n[0]   b\nlaunch: c\n"}, "\nrefused: a\n  b\n"),
  ],
)
def test_runs_that_end_otherwise(changes, text):
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
  ended = launching.start(["sh", "-c", launching.with_second("--rows=2"), "sh", *command])
  assert sorted(line for line in ended.out.splitlines() if line.startswith("[")) == [
    "[0] ['--rows=1']",
    "[1] ['--rows=1', '--rows=2']",
  ]
  assert (ended.code, ended.codes, ended.hung, ended.made) == (0, {}, (), False)


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


# ------------------------------ cost ------------------------------


def products(code, out="", err=""):
  """Returns what is said of an end of the benchmark."""
  return cost._products((64, subprocess.CompletedProcess([], code, out, err)))


def test_products():
  shown = products(0, "a table")
  assert shown.findings == [
    "64 x 64 matrices on one device and on all: the products and NumPy's are the same, to rounding."
  ]
  assert shown.measured_text == "a table"
  [finding] = products(1, err="one device: differs from NumPy's product by 1e-2 of it").findings
  assert "NOT the same: one device: differs" in finding
  assert "did not run here" in products(1, err="RuntimeError: no TPU").findings[0]


def test_gather_and_reduce():
  results = cost.gather_and_reduce(lengths=(64, 256))
  shown = cost._gather_and_reduce(results)
  assert shown.findings == [
    "all-gather: the program sends all-gather, from 256 Bytes to 1.0 KiB a device.",
    "all-reduce: the program sends all-reduce, from 256 Bytes to 1.0 KiB a device.",
  ]
  assert len(shown.measured_text.splitlines()) == 4
  assert "all-gather: 4 times the bytes take" in shown.measured[0]
  nothing = cost.gather_and_reduce(lengths=(64, 256), axis=())
  assert "all-reduce: the program sends nothing" in cost._gather_and_reduce(nothing).findings[1]
