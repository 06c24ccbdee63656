"""The simulation of `plan --nodes` beside a real run that is killed again and again."""

import json
import random
import re
import signal
import time

import numpy as np
import pytest

from planning import goodput
from planning.goodput import DAY, Faults
from tests.faults.harness import CLASSIFIER, Run

BETWEEN_SECONDS, KILLS = 12.0, 8
STEPS, EVERY = 90_000, 1500
JOB = (
  "--config.metrics.every_steps=100",
  "--config.evaluation.every_steps=0",
  f"--config.checkpoint.every_steps={EVERY}",
)
FIRST = "first step finished"


class Recorded:
  """In place of random numbers the lives that a run has had, and then one without an end."""

  def __init__(self, lives):
    """Takes the seconds of each."""
    self._lives = iter([*lives, np.inf])

  def exponential(self, mean, count):
    """Returns the next life, the same of all runs."""
    return np.full(count, next(self._lives))


def started(folder, forks):
  """Returns the run, started or started again."""
  return Run(folder, count=1, steps=STEPS, flags=JOB, common=CLASSIFIER, forks=forks)


def kept(text):
  """Returns the first step that a start has printed at which the run saves; 0: none yet."""
  steps = (int(step) for step in re.findall(rf"step (\d+)/{STEPS}\b", text))
  return next((step for step in steps if step % EVERY == 0), 0)


def killed_run(folder, forks):
  """Returns seconds from the first step to the last kill, the lives, and those of each restart."""
  chance = random.Random(40)
  lives, restarts, began, killed = [], [], 0.0, 0.0
  while len(lives) < KILLS:
    with started(folder, forks) as run:
      if not lives:
        run.wait_for(FIRST)
        began = killed = time.monotonic()
      until, first = killed + chance.expovariate(1 / BETWEEN_SECONDS), 0.0
      while time.monotonic() < until:
        assert not run.poll(), run.text()
        if not first and run.text().count(FIRST):
          first = time.monotonic()
        time.sleep(0.01)
      now = run.signal(0, signal.SIGKILL)
      if first and lives:
        restarts.append(first - killed)
      lives.append(now - killed)
      killed = now
  return killed - began, lives, restarts


@pytest.mark.faults
def test_the_simulation_has_the_goodput_of_a_real_run(forks, tmp_path, monkeypatch):
  whole, lives, restarts = killed_run(tmp_path / "run", forks)
  killed = time.monotonic()
  with started(tmp_path / "run", forks) as run:  # until it has saved once more
    run.wait_until(lambda: kept(run.text()), "a save")
    whole += time.monotonic() - killed
    run.popens[0].send_signal(signal.SIGTERM)
    run.end()
    steps = kept(run.text())
  lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
  *_, last = (line for line in lines if "goodput" in line)
  seconds = last["seconds"]
  step = (seconds["step"] + seconds["input_wait"]) / last["step"]
  block = seconds["save"] / (last["step"] // EVERY)
  faults = Faults(1, DAY * KILLS / whole, block, block, float(np.mean(restarts)))
  monkeypatch.setattr(goodput.np.random, "default_rng", lambda seed: Recorded(lives))
  found, measured = goodput.simulate(steps * step, EVERY * step, faults), steps * step / whole
  told = f"goodput {measured:.3f}, simulated {found.share:.3f}: {faults}, lives {lives}, {found}"
  print(told)
  assert measured < 0.9, told
  assert found.share == pytest.approx(measured, abs=0.1), told
