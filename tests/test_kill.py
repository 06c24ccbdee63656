"""A run that is killed again and again gives the losses of one that never was, to the last bit.

The kills are SIGKILLs from another process: at random moments, and in the middle of a save, told
by the temporary folder that a save makes. Nothing in the application takes part.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

from tests.compiling import FAST

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 40
COMMAND = [
  sys.executable,
  "main.py",
  "--config=configs/dp4_tp2.py",
  "--config.model.layers=1",
  "--config.model.model_size=32",
  "--config.model.feedforward_size=48",
  "--config.data.sequence_length=16",
  "--config.data.evaluation_split=test[:1]",
  "--config.evaluation.every_steps=0",
  "--config.evaluation.sample_tokens=0",
  "--config.metrics.every_steps=1",
  "--config.metrics.tensorboard=false",
  f"--config.training.steps={STEPS}",
  "--config.checkpoint.every_steps=5",
  f"--config.compiler_options={FAST}",
]
TIMEOUT_SECONDS = 120


def start(workdir: pathlib.Path) -> subprocess.Popen:
  """Starts the run, or lets it go on."""
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  return subprocess.Popen(
    [*COMMAND, f"--workdir={workdir}"],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def losses(workdir: pathlib.Path) -> dict[int, tuple[str, str]]:
  """Returns step -> (loss, gradient norm) as written: the same text is the same bits."""
  found = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    values = json.loads(line)
    if "loss" in values:
      assert values["step"] not in found, "a step stands once"
      found[values["step"]] = (repr(values["loss"]), repr(values["grad_norm"]))
  return found


def wait_for(condition, process: subprocess.Popen) -> bool:
  """Waits until the condition holds (True) or the process has ended (False)."""
  began = time.monotonic()
  while time.monotonic() - began < TIMEOUT_SECONDS:
    if condition():
      return True
    if process.poll() is not None:
      return False
    time.sleep(0.002)
  raise AssertionError("neither happened in time")


def kill_at_a_random_moment(workdir: pathlib.Path, process: subprocess.Popen) -> bool:
  """Kills within a second of the first line that this start writes."""
  lines = workdir / "metrics.jsonl"
  size = lines.stat().st_size if lines.exists() else 0
  if not wait_for(lambda: lines.exists() and lines.stat().st_size > size, process):
    return False
  time.sleep(random.uniform(0, 1))
  return True


def kill_during_a_save(workdir: pathlib.Path, process: subprocess.Popen) -> bool:
  """Kills while a save's temporary folder stands there."""
  folder = workdir / "checkpoints"

  def saving() -> bool:
    return folder.is_dir() and any(
      "orbax-checkpoint-tmp" in child.name for child in folder.iterdir()
    )

  if not wait_for(saving, process):
    return False
  time.sleep(random.uniform(0, 0.05))
  return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, tuple[str, str]]:
  """Returns the losses of a run that nothing disturbs."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  process = start(workdir)
  out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
  assert process.returncode == 0, out
  found = losses(workdir)
  assert sorted(found) == list(range(1, STEPS + 1))
  return found


# Kills at each stage of a save are sampled in tests/checkpointing/test_faults.py.
@pytest.mark.parametrize(
  "moment", [kill_at_a_random_moment, pytest.param(kill_during_a_save, marks=pytest.mark.faults)]
)
def test_a_killed_run_gives_the_losses_of_one_never_killed(undisturbed, tmp_path, moment):
  kills, began = 0, time.time()
  for _ in range(2):
    process = start(tmp_path)
    if moment(tmp_path, process):
      process.kill()
      kills += process.wait() == -9
    process.communicate()
  assert kills, "the run ended before it could be killed"
  process = start(tmp_path)
  out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
  assert process.returncode == 0, out
  assert losses(tmp_path) == undisturbed
  assert not list((tmp_path / "checkpoints").glob("*tmp*"))
  lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  *_, last = (line for line in lines if "goodput" in line)
  assert sum(last["seconds"].values()) == pytest.approx(last["time"] - began, rel=0.01)
  assert last["seconds"]["lost_to_restart"] > 0


def test_sigterm_saves_and_exits_with_75(undisturbed, tmp_path):
  process = start(tmp_path)
  lines = tmp_path / "metrics.jsonl"
  assert wait_for(lambda: lines.exists() and len(lines.read_text().splitlines()) > 2, process)
  process.terminate()
  out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
  assert process.returncode == 75, out
  assert "stopped as asked, after saving" in out
  done = max(losses(tmp_path))
  assert done < STEPS
  assert (tmp_path / "checkpoints" / str(done)).is_dir(), "no step is lost"
  process = start(tmp_path)
  out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
  assert process.returncode == 0, out
  assert losses(tmp_path) == undisturbed
