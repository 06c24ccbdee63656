"""Moments of a run, as seen from outside: each waits for one, and a little longer by chance."""

import time
from collections.abc import Callable
from typing import Any

from tests.faults.frame import Attempt
from tests.faults.harness import EVALUATE_EVERY, SAVE_EVERY, STEPS

# Takes what runs in the attempt's workdir: a `Run`, or a `Terminal`.
Moment = Callable[[Any, Attempt], None]


def after(name: str, text: str, seconds: float) -> Moment:
  """Returns the moment up to so many seconds after a text was printed ("": after the start)."""

  def moment(run: Any, attempt: Attempt) -> None:
    run.wait_for(text)
    time.sleep(attempt.chance.uniform(0, seconds))

  moment.__name__ = name
  return moment


compiling = after("compiling", "workdir:", 3)  # `flags` sees to it that it compiles
first_step = after("first step", "compiled the train step", 2)
# Not the first one, whose batches have no limit yet that is learned.
evaluation = after("evaluation", f"step {EVALUATE_EVERY * 2}/", 0.1)
last_evaluation = after("last evaluation", f"step {STEPS}/", 1)  # of the whole split
last_save = after("last save", f"evaluation after step {STEPS}", 0.1)
sampling = after("sampling", "metrics in", 3)  # a sample is drawn from the model, at the end


def preflight(run: Any, attempt: Attempt) -> None:
  """While the processes compare what they are about to do."""
  left = attempt.workdir.glob
  run.wait_until(lambda: any(left(".preflight-*")) or "devices:" in run.text(), "preflight")


def step(run: Any, attempt: Attempt) -> None:
  """In a step."""
  run.wait_for(f"step {attempt.chance.randint(2, STEPS - 5)}/")
  time.sleep(attempt.chance.uniform(0, 0.2))


def save(run: Any, attempt: Attempt) -> None:
  """In a save."""
  folder, number = attempt.workdir / "checkpoints", SAVE_EVERY * attempt.chance.randint(1, 3)
  run.wait_until(lambda: any(folder.glob(f"{number}*")), f"the save of step {number}")
  time.sleep(attempt.chance.uniform(0, 0.05))


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
