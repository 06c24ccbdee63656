"""A run that is killed again and again gives the losses of one that never was, to the last bit.

The kills are SIGKILLs from another process: at random moments, and in the middle of a save, told
by the temporary folder that a save makes. Nothing in the application takes part.
"""

import json
import os
import pathlib
import random
import time

import pytest

from tests.helpers.compiling import FAST
from tests.helpers.forks import Fork, Forks
from tests.input_pipeline.text.corpora import mixture

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 40
TEXTS = (
  "--config=configs/dp4_tp2.py:model=lm,data=text",
  "--config.data.sequence_length=16",
  "--config.evaluation.sample_tokens=0",
)
SHARED = (
  "--config.model.layers=1",
  "--config.model.model_size=32",
  "--config.model.feedforward_size=48",
  "--config.evaluation.every_steps=0",
  "--config.metrics.every_steps=1",
  "--config.metrics.report=False",
  "--config.metrics.tensorboard=false",
  f"--config.training.steps={STEPS}",
  "--config.checkpoint.every_steps=5",
  f"--config.compiler_options={FAST}",
)
# Their biases move in each step, outside of the optimizer.
EXPERTS = (
  "--config.mesh.data=2",
  "--config.mesh.expert=2",
  "--config.model.experts=4",
  "--config.model.expert_feedforward_size=24",
  "--config.model.router_correction=True",
  "--config.training.router_bias_rate=0.05",
)
# Images over data, fsdp and tensor, with dropout.
IMAGES = (
  "--config=configs/experiments/vit.py",
  "--config.model.heads=4",
  "--config.model.dropout_rate=0.2",
)
TIMEOUT_SECONDS = 120


@pytest.fixture(
  scope="module",
  params=[(), *(pytest.param(more, marks=pytest.mark.long) for more in (EXPERTS, IMAGES))],
  ids=["dense", "experts", "images"],
)
def command(request, tmp_path_factory) -> list[str]:
  """Returns the command of a run on images, or on two sources of texts in packed rows.

  The weights of the sources change halfway.
  """
  if request.param is IMAGES:
    return ["main.py", *IMAGES, *SHARED]
  return [
    *("main.py", *TEXTS, *SHARED),
    *request.param,
    *mixture(tmp_path_factory.mktemp("corpus")),
    f"--config.data.stages=(({STEPS // 2}, {{'code': 1.0, 'web': 0.5}}),)",
  ]


class Start:
  """A process that runs it, or lets it go on."""

  def __init__(self, forks: Forks, command: list[str], workdir: pathlib.Path):
    """Starts it."""
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    self.out = workdir.with_name(f"{workdir.name}.out")
    self.out.unlink(missing_ok=True)
    command = [*command, f"--workdir={workdir}"]
    self.process = forks.start(command, out=self.out, environment=environment)

  def end(self) -> tuple[int, str]:
    """Waits for its end; returns its code and what it has printed."""
    code = self.process.wait(TIMEOUT_SECONDS)
    return code, self.out.read_text()


def losses(workdir: pathlib.Path) -> dict[int, tuple[str, str]]:
  """Returns step -> (loss, gradient norm) as written: the same text is the same bits."""
  found = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    values = json.loads(line)
    if "loss" in values:
      assert values["step"] not in found, "a step stands once"
      found[values["step"]] = (repr(values["loss"]), repr(values["grad_norm"]))
  return found


def wait_for(condition, process: Fork) -> bool:
  """Waits until the condition holds (True) or the process has ended (False)."""
  began = time.monotonic()
  while time.monotonic() - began < TIMEOUT_SECONDS:
    if condition():
      return True
    if process.poll() is not None:
      return False
    time.sleep(0.002)
  raise AssertionError("neither happened in time")


def kill_at_a_random_moment(workdir: pathlib.Path, process: Fork) -> bool:
  """Kills within half a second of the first line that this start writes."""
  lines = workdir / "metrics.jsonl"
  size = lines.stat().st_size if lines.exists() else 0
  if not wait_for(lambda: lines.exists() and lines.stat().st_size > size, process):
    return False
  time.sleep(random.uniform(0, 0.5))
  return True


def kill_during_a_save(workdir: pathlib.Path, process: Fork) -> bool:
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
def undisturbed(forks, command, tmp_path_factory) -> dict[int, tuple[str, str]]:
  """Returns the losses of a run that nothing disturbs."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  code, out = Start(forks, command, workdir).end()
  assert code == 0, out
  found = losses(workdir)
  assert sorted(found) == list(range(1, STEPS + 1))
  return found


# Kills at each stage of a save are sampled in tests/training/checkpointing/test_faults.py.
@pytest.mark.parametrize(
  "moment", [kill_at_a_random_moment, pytest.param(kill_during_a_save, marks=pytest.mark.faults)]
)
def test_a_run_that_is_stopped_and_killed_gives_the_losses_of_one_that_is_not(
  undisturbed, forks, command, tmp_path, moment
):
  began = time.time()
  started = Start(forks, command, tmp_path)
  lines = tmp_path / "metrics.jsonl"
  assert wait_for(
    lambda: lines.exists() and len(lines.read_text().splitlines()) > 2, started.process
  )
  started.process.terminate()
  code, out = started.end()
  assert code == 75, out
  assert "stopped as requested, after saving" in out
  done = max(losses(tmp_path))
  assert done < STEPS
  assert (tmp_path / "checkpoints" / str(done)).is_dir(), "no step is lost"

  started = Start(forks, command, tmp_path)
  assert moment(tmp_path, started.process)
  started.process.kill()
  assert started.end()[0] == -9, "the run ended before it could be killed"

  code, out = Start(forks, command, tmp_path).end()
  assert code == 0, out
  assert losses(tmp_path) == undisturbed
  assert not list((tmp_path / "checkpoints").glob("*tmp*"))
  *_, last = (line for line in map(json.loads, lines.read_text().splitlines()) if "goodput" in line)
  assert sum(last["seconds"].values()) == pytest.approx(last["time"] - began, rel=0.01)
  assert last["seconds"]["lost_to_restart"] > 0
