"""The verb `sweep`: which runs it has, what it skips, stops and lists; its exit codes."""

import csv
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from commands import sweep, sweep_axes
from tests.helpers.cli import TINY_MLP

ROOT = pathlib.Path(__file__).parents[2]

# ------------------------------ which runs ------------------------------


def test_a_grid_has_every_combination_and_a_tuple_is_one_value():
  text = "optimizer.learning_rate=0.001, 2e-3; seed=0,1 ;data.files=(a,b),c"
  found = sweep_axes.read(text)
  assert len(found) == 8
  assert found[0] == {"optimizer.learning_rate": "0.001", "seed": "0", "data.files": "(a,b)"}
  assert found[-1] == {"optimizer.learning_rate": "2e-3", "seed": "1", "data.files": "c"}
  names = sweep_axes.names(found)
  assert len({*names}) == 8
  assert names[1] == "learning_rate-0.001_seed-0_files-c"
  assert re.fullmatch(r"learning_rate-0.001_seed-0_files--a-b-_[0-9a-f]{8}", names[0])
  assert sweep_axes.names(sweep_axes.read("a.size=1;b.size=2")) == ["a.size-1_b.size-2"]


def test_settings_are_drawn_by_a_seed_and_each_is_taken_with_every_seed_of_the_runs():
  text = "optimizer.learning_rate=1e-4..1e-2;model.layers=1..8;model.size=16,32;seed=0,1"
  found = sweep_axes.read(text, draw=20, seed=3)
  assert found == sweep_axes.read(text, draw=20, seed=3) != sweep_axes.read(text, draw=20, seed=4)
  assert [one["seed"] for one in found] == ["0", "1"] * 20
  rates = [float(one["optimizer.learning_rate"]) for one in found[::2]]
  assert all(1e-4 <= rate <= 1e-2 for rate in rates)
  assert 5 <= sum(rate < 1e-3 for rate in rates) <= 15  # evenly in the logarithm
  assert {one["model.layers"] for one in found} <= {*map(str, range(1, 9))}
  whole = sweep_axes.read("a=1,2,3;b=1,2,3", draw=9)
  assert sorted(map(sweep_axes.text_of, whole)) == sorted(
    map(sweep_axes.text_of, sweep_axes.read("a=1,2,3;b=1,2,3"))
  )


def test_runs_are_listed_in_a_file_of_lines_or_of_python(tmp_path):
  lines, module = tmp_path / "runs.txt", tmp_path / "runs_of_mine.py"
  lines.write_text("# two\nseed=1 model.layers=2\n\nseed=2 model.layers=4  # deep\n")
  module.write_text("def runs():\n  return [{'seed': n, 'model.layers': 2 * n} for n in (1, 2)]\n")
  wanted = [{"seed": "1", "model.layers": "2"}, {"seed": "2", "model.layers": "4"}]
  assert sweep_axes.read(str(lines)) == sweep_axes.read(str(module)) == wanted


@pytest.mark.parametrize(
  ("text", "draw", "why"),
  [
    ("nothing", 0, "no KEY=VALUE,VALUE, and no file"),
    ("a=1;a=2", 0, "an axis or a value is there twice"),
    ("a=1,1", 0, "an axis or a value is there twice"),
    ("a=1,,2", 0, "or is empty"),
    ("a=1;2b=3", 0, "'2b=3' is not KEY=VALUE"),
    ("a=1..2", 0, "1..2 is a range; give values, or draw from it"),
    ("a=0..2", 1, "LOW..HIGH, two numbers above 0"),
    ("a=1,2", 3, "--random=3: the axes have 2 different settings"),
    ("a=1..2", 3, "--random=3: the axes have 2 different settings"),
    (";".join(f"k{n}={','.join(map(str, range(10)))}" for n in range(5)), 0, "100,000 runs"),
    ("absent.py", 0, "there is no such file"),
  ],
)
def test_axes_that_cannot_be_meant_are_refused(text, draw, why):
  with pytest.raises(ValueError, match=re.escape(why)):
    sweep_axes.read(text, draw=draw)


@pytest.mark.parametrize(
  ("content", "why"),
  [
    ("seed=1\nmodel.layers=1\n", "one run sets seed and another model.layers"),
    ("seed=1\nseed=1\n", "seed=1 is there twice"),
    ("seed=1 fast\n", "line 1: 'fast' is not KEY=VALUE"),
    ("# none\n", "it has no run"),
  ],
)
def test_a_list_that_is_none_is_refused(tmp_path, content, why):
  (tmp_path / "runs").write_text(content)
  with pytest.raises(ValueError, match=re.escape(why)):
    sweep_axes.read(str(tmp_path / "runs"))


# ------------------------------ real runs ------------------------------

SMALL = ["configs/single:mlp", "training.steps=6", *TINY_MLP]


def rows(folder):
  """Returns the lines of a sweep's table."""
  with open(folder / "sweep.csv", newline="") as file:
    return [*csv.DictReader(file)]


def command_line(*arguments):
  """Returns (exit code, standard output, standard error) of the application."""
  done = subprocess.run(
    [sys.executable, "main.py", *arguments], cwd=ROOT, capture_output=True, text=True
  )
  return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_a_sweep_of_runs_of_which_one_is_refused(tmp_path):
  folder = tmp_path / "sweep"
  axes = "--axes=optimizer.learning_rate=0.001,0.01,-1"
  command = ("sweep", *SMALL, axes, f"--workdir={folder}")
  code, out, err = command_line(*command, "--parallel=3")
  assert code == 3, out + err
  found = rows(folder)
  assert [one["state"] for one in found] == ["done", "done", "failed"]
  assert float(found[1]["eval_loss"]) < float(found[0]["eval_loss"])
  assert found[2]["reason"].startswith("exit code 2: refused: ")
  assert "optimizer.learning_rate=-1.0: at least 0" in found[2]["reason"]
  assert "best: optimizer.learning_rate=0.01: " in out
  assert "failed: 1 of 3\n  learning_rate--1: exit code 2" in out
  page = (folder / "sweep.html").read_text()
  assert 'id="sweep"' in page
  assert page.count("learning_rate-0.001") >= 2
  assert "optimizer.learning_rate=-1.0: at least 0" in page

  # What is done is not run again; a run of another config is.
  metrics = folder / "learning_rate-0.01" / "metrics.jsonl"
  before = metrics.stat().st_mtime_ns
  command = ("sweep", *SMALL, "--axes=optimizer.learning_rate=0.01", f"--workdir={folder}")
  code, out, err = command_line(*command)
  assert (code, metrics.stat().st_mtime_ns) == (0, before), out + err
  code, out, err = command_line(*command, "training.steps=8")
  assert code == 0, out + err
  assert rows(folder)[0]["step"] == "8"
  printed = (folder / "logs/learning_rate-0.01.txt").read_text()
  assert "resumes from the checkpoint of step 6" in printed

  code, out, err = command_line("sweep", *SMALL, axes, f"--workdir={folder / 'learning_rate-0.01'}")
  assert code == 2
  assert "is the workdir of a run" in err


@pytest.mark.parametrize(
  ("words", "why"),
  [
    ([], "what differs between the runs?"),
    (["--axes=optimizer.learning_rat=1"], "did you mean 'optimizer.learning_rate'?"),
    (["--axes=seed=1", "--launcher=absent -n 1 --"], "there is no program absent"),
    (["--axes=seed=1", "--launcher='env"], "--launcher='env: No closing quotation"),
    (["--axes=seed=1", "--launcher=env", "--slurm"], "--slurm starts no run"),
    (["--axes=training.steps=1,2", "--halving"], "--halving compares runs at the same evaluations"),
  ],
)
def test_a_sweep_that_cannot_begin_is_refused(parse, words, why):
  parse("sweep", "configs/single:mlp", *words)
  with pytest.raises(ValueError, match=re.escape(why)):
    sweep._asked()


# ------------------------------ played runs ------------------------------

# `sweep` is the real one; each of its runs evaluates every 10 steps to a loss that the rate gives,
# stops on SIGTERM with 75, and goes on from there.
PLAYED = """
import json, os, pathlib, signal, sys, time
if sys.argv[1] == "sweep":
  from absl import app
  from commands import flags, session
  app.run(session.main, flags_parser=flags.parse_flags)
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder, rate = pathlib.Path(given["--workdir"]), float(given["--config.optimizer.learning_rate"])
if rate > 1:
  sys.exit("error: it diverged")
folder.mkdir(parents=True, exist_ok=True)
file = folder / "metrics.jsonl"
lines = file.read_text().splitlines() if file.exists() else []
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
for step in range(10 * len(lines) + 10, 101, 10):
  time.sleep(PAUSE)
  line = {"step": step, "eval_loss": abs(rate - 0.4) + 1 / step, "eval_examples": 8}
  lines.append(json.dumps(line))
  whole = folder / "part"  # SIGTERM may come while it is written
  whole.write_text("\\n".join(lines) + "\\n")
  os.replace(whole, file)
"""


class Played:
  """A sweep whose runs are played."""

  def __init__(self, folder, pause=0.02):
    """Writes the program."""
    self.folder, self.script = folder, folder / "main.py"
    self.script.write_text(PLAYED.replace("PAUSE", str(pause)))

  def start(self, *flags):
    """Starts it, 100 steps of each run."""
    common = ("configs/single:mlp", "training.steps=100", "evaluation.every_steps=10")
    return subprocess.Popen(
      [sys.executable, self.script, "sweep", *common, f"--workdir={self.folder / 'out'}", *flags],
      cwd=ROOT,
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def run(self, *flags):
    """Runs it to its end; returns (exit code, output, rows of the table)."""
    process = self.start(*flags)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out, rows(self.folder / "out")


@pytest.fixture
def played(tmp_path):
  """Returns a sweep whose runs are played."""
  return Played(tmp_path)


RATES = "--axes=optimizer.learning_rate=0.1,0.2,0.31,0.4,0.5,2"


def test_halving_stops_the_worse_half_at_each_rung(played):
  launcher = f"--launcher={sys.executable} -m processes.launch --processes=1 --"
  code, out, found = played.run(RATES, "--halving", "--parallel=6", launcher)
  assert code == 1, out  # one has failed, with 1
  lost = "stopped by halving"
  assert [one["state"] for one in found] == [lost, lost, lost, "done", lost, "failed"], out
  rungs = re.findall(r"after step (\d+): (\d) of (\d) settings go on", out)
  assert rungs == [("20", "3", "5"), ("30", "2", "3"), ("50", "1", "2")]
  reasons = {one["optimizer.learning_rate"]: one["reason"] for one in found}
  assert reasons["0.1"] == "not among the best 3 of 5 after step 20"
  assert reasons["2"] == "exit code 1: error: it diverged"
  # The same again: the same end, and nothing is run but what has failed.
  before = (played.folder / "out/learning_rate-0.1/metrics.jsonl").stat().st_mtime_ns
  code, out, again = played.run(RATES, "--halving", "--parallel=6")
  assert [one["state"] for one in again][:3] == [lost] * 3
  assert (played.folder / "out/learning_rate-0.1/metrics.jsonl").stat().st_mtime_ns == before


def test_a_stop_saves_the_runs_and_the_same_command_goes_on(tmp_path):
  played = Played(tmp_path, pause=0.3)
  axes = "--axes=optimizer.learning_rate=0.1,0.2,0.3"
  process = played.start(axes, "--parallel=2")
  first = tmp_path / "out/learning_rate-0.1/metrics.jsonl"
  deadline = time.monotonic() + 60
  while not first.exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 75, out
  assert "SIGINT: stopping 2 runs, which save" in out
  assert "stopped: 3 left; the same command resumes" in out
  assert not (tmp_path / "out/learning_rate-0.3").exists()
  played.script.write_text(PLAYED.replace("PAUSE", "0"))
  code, out, found = played.run(axes)
  assert code == 0
  assert [one["step"] for one in found] == ["100"] * 3
  assert json.loads(first.read_text().splitlines()[0])["step"] == 10


def test_time_that_is_over_stops_the_runs(tmp_path):
  played = Played(tmp_path, pause=1)
  code, out, found = played.run("--axes=optimizer.learning_rate=0.1,0.2", f"--hours={1 / 3600}")
  assert code == 75
  assert "are over: stopping 1 runs, which save" in out
  assert [one["state"] for one in found] == ["left", "left"]
  assert "left: 2 of 2" in out


def test_an_array_of_slurm_has_the_runs_that_are_left(parse, tmp_path, capsys):
  axes = "--axes=optimizer.learning_rate=0.1,0.2"
  parse("sweep", *SMALL[:2], f"--workdir={tmp_path}", axes, "--slurm", "--parallel=4")
  assert sweep.run() == 0
  out = capsys.readouterr().out
  lines = (tmp_path / "runs.txt").read_text().splitlines()
  assert lines[1] == f"--config.optimizer.learning_rate=0.2 --workdir={tmp_path}/learning_rate-0.2"
  assert f"RUNS={tmp_path}/runs.txt sbatch --array=1,2%4 " in out
  assert out.rstrip().endswith("processes/launch/slurm.sh configs/single:mlp training.steps=6")
