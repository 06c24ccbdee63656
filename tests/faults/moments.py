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


def _after(name: str, text: str, seconds: float) -> Moment:
  """Returns the moment after a line of the run's output: `{steps}` in it are the run's."""

  def moment(run: Run, chance: random.Random) -> None:
    run.wait_for(text.format(steps=run.steps))
    time.sleep(chance.uniform(0, seconds))

  moment.__name__ = name
  return moment


compiling = _after("compiling", "workdir:", 3)  # `flags` sees to it that it compiles
first_step = _after("first_step", "compiled the train step", 2)
# Not the first one, whose batches have no limit yet that is learned.
evaluation = _after("evaluation", f"step {EVALUATE_EVERY * 2}/", 0.1)
last_evaluation = _after("last_evaluation", "step {steps}/", 1)  # of the whole split
last_save = _after("last_save", "evaluation after step {steps}", 0.1)
sampling = _after("sampling", "metrics in", 3)  # a sample is drawn from the model, at the end


def step(run: Run, chance: random.Random) -> None:
  """In a step."""
  run.wait_for(f"step {chance.randint(2, run.steps - 5)}/")
  time.sleep(chance.uniform(0, 0.2))


def save(run: Run, chance: random.Random) -> None:
  """In a save."""
  folder = run.workdir / "checkpoints"
  number = SAVE_EVERY * chance.randint(1, 3)

  def saving() -> bool:
    return folder.is_dir() and any(path.name.startswith(f"{number}") for path in folder.iterdir())

  run.wait_until(saving, f"the save of step {number}")
  time.sleep(chance.uniform(0, 0.05))


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
