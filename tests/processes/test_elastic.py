"""A run that goes on with other numbers of processes sees what one run would have seen."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.compiling import FAST
from tests.processes.command_lines import losses
from tests.processes.starting import ROOT

STEPS, DIES, GROWS, SECONDS = 24, 8, 15, 240
TINY = [
  "--config=configs/dp8.py",
  "--config.mesh.data=4",
  "--config.model.layers=1",
  "--config.model.model_size=24",
  "--config.model.feedforward_size=40",
  "--config.data.sequence_length=16",
  "--config.data.evaluation_split=test[:1]",
  "--config.data.global_batch_size=12",
  "--config.evaluation.sample_tokens=0",
  "--config.evaluation.steps=2",
  "--config.evaluation.final_steps=2",
  "--config.metrics.every_steps=1",
  "--config.metrics.report=False",
  "--config.metrics.tensorboard=False",
  "--config.checkpoint.every_steps=5",
  "--config.processes.heartbeat_seconds=60",
  "--config.training.parameter_dtype=float64",
  f"--config.training.steps={STEPS}",
  f"--config.compiler_options={FAST}",
]


def trained(folder: pathlib.Path) -> dict[int, list[str]]:
  """Returns step -> its rows, of the last start that made it, in no order."""
  starts: dict[str, dict[int, list[str]]] = {}
  for log in sorted(folder.glob("*.*"), key=lambda path: path.stat().st_mtime):
    rows = starts.setdefault(log.name.partition(".")[0], {})
    for step, digests in map(json.loads, log.read_text().splitlines()):
      rows[step] = sorted([*rows.get(step, []), *digests])
  found = {}
  for rows in starts.values():
    found.update(rows)
  return found


@contextlib.contextmanager
def launched(arguments: list[str], out: pathlib.Path):
  """Gives a launcher with output in a file, and a function that waits for a text in some logs."""
  with open(out, "w") as file:
    launcher = subprocess.Popen(
      [sys.executable, "-m", "processes.launch", *arguments],
      cwd=ROOT,
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=file,
      stderr=subprocess.STDOUT,
    )

  def wait_for(text: str, count: int, *folders: pathlib.Path) -> None:
    until, logs = time.monotonic() + SECONDS, [out]
    while sum(text in log.read_text() for log in logs) < count:
      assert time.monotonic() < until, out.read_text()
      assert launcher.poll() is None, out.read_text()
      time.sleep(0.02)
      logs = [out, *(log for folder in folders for log in folder.glob("*.*"))]

  try:
    yield launcher, wait_for
  finally:
    if launcher.poll() is None:
      for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
        process.kill()


@pytest.mark.long
def test_three_of_four_processes_go_on_until_the_fourth_is_back(well, tmp_path):
  rows, fixed, out = (tmp_path / name for name in ("rows", "fixed", "out"))
  rows.mkdir()
  fixed.mkdir()
  script = pathlib.Path(__file__).with_name("logged_rows.py")
  main = [sys.executable, str(script), str(rows), f"{DIES}=died,{GROWS}=back", *TINY]
  main += ["--config.training.elastic=True", f"--workdir={tmp_path / 'elastic'}"]
  options = ["--processes=4", "--return_seconds=0", "--", *main]
  with launched(options, out) as (launcher, wait_for):
    wait_for(f"[{DIES}, ", 4, rows)
    [pids] = re.findall(r"started 4 processes \(pid ([0-9, ]*)\)", out.read_text())
    psutil.Process(int(pids.split(", ")[1])).kill()
    (rows / "died").touch()
    wait_for(f"[{GROWS}, ", 3, rows)
    launcher.send_signal(signal.SIGUSR2)
    wait_for("stopping after this step and saving", 1)
    (rows / "back").touch()
    assert launcher.wait(SECONDS) == 0, out.read_text()
  said = out.read_text()
  assert "elastic: 3 of 4 data replicas, data=3; the batches are those of the whole" in said
  assert said.count("elastic: the whole mesh, data=4") == 3  # two starts, and the summary
  assert "starts from the first step" in said
  assert [*map(int, re.findall(r"resumes from the checkpoint of step (\d+)", said))] == [5, GROWS]
  given = json.loads((tmp_path / "elastic" / "config.json").read_text())
  assert given["mesh"]["data"] == 4
  assert given["training"]["gradient_accumulation_steps"] == 1

  well(1, str(fixed), "", *TINY, f"--workdir={tmp_path / 'alone'}", script=script)
  found, expected = losses(tmp_path / "elastic"), losses(tmp_path / "alone")
  assert list(found) == [*range(1, STEPS + 1)]
  assert found == pytest.approx(expected, rel=1e-12, abs=0)
  assert len({*expected.values()}) == STEPS
  assert trained(rows) == trained(fixed)
  assert {*map(len, trained(fixed).values())} == {12}
