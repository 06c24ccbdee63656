"""Row 20: kills without end, each some minutes after the last, and where the time goes."""

import pathlib
import random
import signal
import time
from collections.abc import Iterator

from tests.faults.frame import Trial, row
from tests.faults.harness import Run, lines_of

INTERVAL_SECONDS = 180  # between two kills, on average
LEAST_GOODPUT, PRECISION = 0.9, 0.01
STOPPED = 75
COUNT = 2
# A decoder whose steps take longer than those of the other rows, where saving would take more time
# than computing; and there are as many steps as the kills leave time for.
JOB = (
  "--config.model.layers=2",
  "--config.model.model_size=96",
  "--config.model.feedforward_size=256",
  "--config.data.sequence_length=96",
  "--config.optimizer.schedule=constant",
  "--config.evaluation.every_steps=0",
  "--config.metrics.every_steps=20",
  "--config.checkpoint.every_steps=20",
)
STEPS = 10**6
MEASURED = (20, 100)  # steps of the run that nothing disturbs


@row(
  20,
  fault="an hour of Poisson kills, one per 180 s on average",
  passes="goodput at least 90 %; the bins of lost time add up to the total within 1 %",
  trials=20,
  seconds=190,
  note="A trial is a kill; the last one is the check of the whole run.",
)
def kills_without_end(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Kills a random process again and again; then asks the run to stop, and adds up."""
  chance = random.Random(f"row 20, {seed}")
  seconds_per_step = _undisturbed(folder)
  workdir, began = folder / "run", time.time()
  settings = {"count": COUNT, "launcher": True, "restarts": trials + 1, "steps": STEPS}
  with Run(workdir, **settings, flags=JOB) as run:
    run.wait_for("launch: started")
    last = time.monotonic()
    for number in range(1, trials + 1):
      pause, killed = chance.expovariate(1 / INTERVAL_SECONDS), chance.randrange(COUNT)
      name = f"seed {seed}: kill {number}, process {killed} {pause:.0f} s after the last"
      failure, seen = _killed(run, number, killed, last + pause)
      yield Trial(name, not failure, failure or seen, time.monotonic() - last)
      if failure:  # nothing runs that could be killed
        return
      last = time.monotonic()
    since = time.monotonic()
    failure = _stopped(run, last + chance.expovariate(1 / INTERVAL_SECONDS))
  failure, seen = (failure, "") if failure else _verdict(workdir, began, seconds_per_step)
  note = "; ".join(filter(None, [failure, seen]))
  yield Trial(f"seed {seed}: the whole", not failure, note, time.monotonic() - since)


def _undisturbed(folder: pathlib.Path) -> float:
  """Returns the seconds that a step takes where nobody kills, saving included, from outside."""
  workdir = folder / "undisturbed"
  with Run(workdir, count=COUNT, launcher=True, steps=STEPS, flags=JOB) as run:
    run.wait_for(f"step {MEASURED[0]}/")
    began = time.monotonic()
    run.wait_for(f"step {MEASURED[1]}/")
    return (time.monotonic() - began) / (MEASURED[1] - MEASURED[0])


def _killed(run: Run, number: int, killed: int, when: float) -> tuple[str, str]:
  """Kills a process at a time, by the monotonic clock; returns (what failed, what was seen)."""
  if not run.sleep(when - time.monotonic()):
    return f"the run has ended before: {run.codes}", ""
  where, at = run.last_line(), run.signal(killed, signal.SIGKILL)
  if not run.said("launch: started", times=number + 1):
    return f"the run was not started again: {run.codes}", ""
  now, ended = time.monotonic(), run.text().split("launch: started")[number]
  if f"process {killed} failed first: signal SIGKILL (9)" not in ended:
    return f"process {killed} is not named", ""
  return "", f"killed at: {where}; started again after {now - at:.1f} s"


def _stopped(run: Run, when: float) -> str:
  """Asks the run to stop at a time, or once it makes steps again; returns what failed."""
  first = "first step finished"
  while run.sleep(when - time.monotonic()):
    if first in run.text().rpartition("launch: started")[2]:
      break
    when = time.monotonic() + 0.5
  if run.poll():
    return f"the run has ended before: {run.codes}"
  run.popens[0].send_signal(signal.SIGTERM)
  if run.end() != [STOPPED]:
    return f"ended with {run.codes} instead of {STOPPED}"
  return "a process is left behind" if run.left_behind() else ""


def _verdict(workdir: pathlib.Path, began: float, seconds_per_step: float) -> tuple[str, str]:
  """Compares where the run says that its time went with the clock here.

  Args:
    workdir: of the run.
    began: when it was started, in seconds since the epoch.
    seconds_per_step: of a run that nothing disturbs.

  Returns:
    What failed, and what was seen.
  """
  *_, last = (line for line in lines_of(workdir) if "goodput" in line)
  whole, parts = last["time"] - began, last["seconds"]
  goodput, off = parts["step"] / whole, abs(sum(parts.values()) - whole) / whole
  shares = ", ".join(f"{name} {100 * seconds / whole:.2f} %" for name, seconds in parts.items())
  outside = last["step"] * seconds_per_step / whole
  seen = (
    f"goodput {100 * goodput:.1f} % of {whole:.0f} s; {shares}; the sum is off by {100 * off:.2f} "
    f"%; {last['step']} steps, which alone would take {100 * outside:.1f} % of the time"
  )
  if off > PRECISION:
    return "the parts do not add up", seen
  return "" if goodput >= LEAST_GOODPUT else "the goodput is too low", seen
