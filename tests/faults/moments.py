"""Moments of a run, as seen from outside: each waits for one, and a little longer by chance."""

import random
import time
from collections.abc import Callable

from tests.faults.harness import EVALUATE_EVERY, SAVE_EVERY, Run

Moment = Callable[[Run, random.Random], None]


def start(run: Run, chance: random.Random) -> None:
  """Before the processes have found one another: imports, roll call, connecting."""
  run.wait_until(run.pids, "the processes")
  time.sleep(chance.uniform(0.5, 5))


def preflight(run: Run, chance: random.Random) -> None:
  """While the processes compare what they are about to do."""
  run.wait_until(
    lambda: any(run.workdir.glob(".preflight-*")) or "devices:" in run.text(),
    "preflight",
  )


def compiling(run: Run, chance: random.Random) -> None:
  """While the train step is compiled: `flags` sees to it that it is."""
  run.wait_for("workdir:")
  time.sleep(chance.uniform(0, 3))


def first_step(run: Run, chance: random.Random) -> None:
  """Between compiling and the first step."""
  run.wait_for("compiled the train step")
  time.sleep(chance.uniform(0, 2))


def step(run: Run, chance: random.Random) -> None:
  """In a step."""
  run.wait_for(f"step {chance.randint(2, run.steps - 5)}/")
  time.sleep(chance.uniform(0, 0.2))


def evaluation(run: Run, chance: random.Random) -> None:
  """In an evaluation; not the first, whose batches have no limit yet that is learned."""
  run.wait_for(f"step {EVALUATE_EVERY * 2}/")
  time.sleep(chance.uniform(0, 0.1))


def save(run: Run, chance: random.Random) -> None:
  """In a save."""
  folder = run.workdir / "checkpoints"
  number = SAVE_EVERY * chance.randint(1, 3)

  def saving() -> bool:
    return folder.is_dir() and any(path.name.startswith(f"{number}") for path in folder.iterdir())

  run.wait_until(saving, f"the save of step {number}")
  time.sleep(chance.uniform(0, 0.05))


def last_evaluation(run: Run, chance: random.Random) -> None:
  """In the last evaluation, which is of the whole split."""
  run.wait_for(f"step {run.steps}/")
  time.sleep(chance.uniform(0, 1))


def last_save(run: Run, chance: random.Random) -> None:
  """In the last save."""
  run.wait_for(f"evaluation after step {run.steps}")
  time.sleep(chance.uniform(0, 0.1))


def sampling(run: Run, chance: random.Random) -> None:
  """While a sample is drawn from the model, at the end."""
  run.wait_for("metrics in")
  time.sleep(chance.uniform(0, 3))


WORKING = (step, evaluation)
LAST = (last_evaluation, last_save, sampling)
# From where each process hears of the end of another by itself.
RUNNING = (preflight, compiling, first_step, *WORKING, save, *LAST)


def title(moment: Moment) -> str:
  """Returns the name of a moment, for people."""
  return moment.__name__.replace("_", " ").strip()


def flags(moment: Moment, others: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the flags of a run that is to have a moment: no compiling without an empty cache."""
  return (*others, "--config.compilation_cache_dir=") if moment is compiling else others
