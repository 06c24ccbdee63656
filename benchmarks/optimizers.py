r"""Compares optimizers on the recipe `lm`: steps and seconds to AdamW's final loss.

  python -m benchmarks.optimizers [--optimizers=adamw,muon] [--write_page]

Each optimizer has as many trials to find its learning rate, then three seeds at the best one for
each budget of steps. Every run has its schedule to its own end, so that the loss of a budget is
that of a run of so many steps; between budgets, losses are interpolated over the logarithm of the
steps. One device. A finished run is kept in docs/optimizers.json, and a later call goes on from
there. `--write_page` writes the section of docs/optimizers.md and its picture from these.
"""

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import matplotlib
from absl import app, flags
from matplotlib.figure import Figure

from benchmarks import timing
from input_pipeline.batches import TrainingBatches
from runtime import devices
from tests.docs.pages import write_section
from training import splits

TRIAL = 50  # steps of a trial
TRIALS = 4  # learning rates per optimizer; more only while the best is at the border
MOST_TRIALS = 6
BUDGETS = (50, 100, 200)  # steps; 200 are the recipe's own
FEWEST = 25  # steps of AdamW's shortest runs, which others may end above
SEEDS = (0, 1, 2)
ROUNDS, STEPS_OF_A_TURN = 8, 4  # of the times of steps
MEAN_OF = 10  # steps whose training losses are a point of the picture
EVALUATION_BATCHES = 8  # of the recipe's periodic evaluation: 256 rows, the same ones for all

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# Optimizer -> the learning rate that the trials begin around, and keys that are not the recipe's.
SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
  "adamw": (8e-3, {}),
  "adafactor": (4e-2, {"weight_decay": 0.0}),  # its rate is relative to the parameter's RMS
  # Its update has three to ten times the RMS of AdamW's. Source: arXiv:2302.06675, section 5.
  "lion": (1e-3, {"weight_decay": 0.8}),
  "muon": (8e-3, {}),
  "soap": (8e-3, {}),
  "schedule_free_adamw": (8e-3, {}),
}
_OPTIMIZERS = flags.DEFINE_list(
  "optimizers", list(SETTINGS), "Optimizers; adamw must be among them."
)
_WRITE_PAGE = flags.DEFINE_bool("write_page", False, "Write the page from the runs that are made.")


class Run(NamedTuple):
  """A run, made or not; the seed is that of parameters and of the data's order."""

  optimizer: str
  learning_rate: float
  steps: int
  seed: int

  def key(self) -> str:
    """Returns its name in the results."""
    return f"{self.optimizer}, {self.learning_rate:.3g}, {self.steps} steps, seed {self.seed}"


# ---- A run ----


def trainer_of(run: Run, recipe: str = "lm", **overrides: Any) -> timing.Trainer:
  """Returns what makes a run of a recipe on one device."""
  keys = {"name": run.optimizer, "learning_rate": run.learning_rate, **SETTINGS[run.optimizer][1]}
  keys = {f"optimizer.{key}": value for key, value in keys.items()}
  job = timing.job_of(recipe, {**keys, "training.steps": run.steps, **overrides})
  return timing.Trainer(job)


def losses_of(run: Run, recipe: str = "lm", **overrides: Any) -> dict[str, Any]:
  """Returns `validation`, the loss after the last step, and `training`, means of MEAN_OF steps.

  Of a run that diverged, infinity and [].
  """
  trainer = trainer_of(run, recipe, **overrides)
  data, size = splits.open_data(trainer.job), trainer.job.config.data.global_batch_size
  batches = TrainingBatches(data.train.source, global_batch_size=size, seed=run.seed)
  state, losses = trainer.run(run.seed, batches, run.steps)
  if not math.isfinite(losses[-1]):
    return {"validation": math.inf, "training": []}
  firsts = range(0, run.steps, MEAN_OF)
  means = [statistics.fmean(losses[first : first + MEAN_OF]) for first in firsts]
  loss = trainer.held_out(state, data.evaluation, EVALUATION_BATCHES)
  return {"validation": round(loss, 5), "training": [round(mean, 5) for mean in means]}


class Results:
  """Finished runs and the times of steps, in a file of JSON.

  Attributes:
    runs: key of a run -> what `losses_of` returns.
    times: optimizer -> seconds of a step over those of AdamW's, a number for each round.
  """

  def __init__(self, path: pathlib.Path, make: Callable[[Run], dict[str, Any]] | None = None):
    """Takes what makes a run that is missing; without it, that is an error."""
    self._path, self._make = path, make
    there = json.loads(path.read_text()) if path.exists() else {}
    self.runs: dict[str, dict[str, Any]] = there.get("runs", {})
    self.times: dict[str, list[float]] = there.get("times", {})

  def save(self) -> None:
    """Writes the file, whole or not at all."""
    runs = sorted(self.runs.items())
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(losses)}" for key, losses in runs)
    text = f'{{"runs": {{\n{lines}\n}},\n"times": {json.dumps(self.times)}}}\n'
    beside = self._path.with_suffix(".part")
    beside.write_text(text)
    os.replace(beside, self._path)

  def of(self, run: Run) -> dict[str, Any]:
    """Returns the losses of a run, which is made and kept if it is not there."""
    if (key := run.key()) not in self.runs:
      if self._make is None:
        raise app.UsageError(f"--write_page: {key} is not made; run the command without it first")
      began = time.monotonic()
      self.runs[key] = self._make(run)
      self.save()
      loss, seconds = self.runs[key]["validation"], time.monotonic() - began
      print(f"{key}: validation loss {loss:.4f}, {seconds:.0f} s", flush=True)
    return self.runs[key]


# ---- Which runs ----


def next_rate(prior: float, losses: Mapping[float, float]) -> float:
  """Returns the learning rate of the next trial.

  The first three are the prior, half and double of it. Then the grid goes on by a factor of 2 where
  the best is at its border; else the next one is between the best and the better of its neighbours.

  Args:
    prior: the learning rate to begin with.
    losses: learning rate -> validation loss, of the trials so far.
  """
  for rate in (prior, prior / 2, prior * 2):
    if rate not in losses:
      return rate
  rates = sorted(losses)
  place = rates.index(min(losses, key=losses.get))
  if place == 0:
    return rates[0] / 2
  if place == len(rates) - 1:
    return rates[-1] * 2
  other = min(rates[place - 1], rates[place + 1], key=losses.get)
  return math.sqrt(rates[place] * other)


def at_border(losses: Mapping[float, float]) -> bool:
  """Returns whether the best learning rate is the smallest or the largest of those tried."""
  return min(losses, key=losses.get) in (min(losses), max(losses))


Losses = Mapping[int, Mapping[int, float]]  # steps of a run -> seed -> validation loss


@dataclasses.dataclass(frozen=True)
class Found:
  """What was found of an optimizer.

  Attributes:
    trials: learning rate -> validation loss.
    losses: of the runs at the best rate.
    curves: steps of a run -> the training losses of each seed, each of so many steps.
    times: seconds of a step over those of AdamW's, a number for each round.
  """

  trials: Mapping[float, float]
  losses: Losses
  curves: Mapping[int, Sequence[Sequence[float]]]
  times: Sequence[float]

  @property
  def rate(self) -> float:
    """Returns the best learning rate."""
    return min(self.trials, key=self.trials.get)

  def of_seed(self, seed: int) -> dict[int, float]:
    """Returns steps -> loss of one seed."""
    return {steps: by_seed[seed] for steps, by_seed in self.losses.items()}


def found_of(name: str, results: Results) -> Found:
  """Returns the trials of an optimizer, and its runs at the best learning rate of them."""
  trials: dict[float, float] = {}
  while len(trials) < TRIALS or (at_border(trials) and len(trials) < MOST_TRIALS):
    rate = next_rate(SETTINGS[name][0], trials)
    trials[rate] = results.of(Run(name, rate, TRIAL, SEEDS[0]))["validation"]
  best = min(trials, key=trials.get)
  budgets = (*([FEWEST] if name == "adamw" else []), *BUDGETS)
  made = {n: {seed: results.of(Run(name, best, n, seed)) for seed in SEEDS} for n in budgets}
  losses = {n: {seed: one["validation"] for seed, one in of.items()} for n, of in made.items()}
  curves = {
    n: [one["training"] for one in of.values() if one["training"]] for n, of in made.items()
  }
  return Found(trials, losses, curves, results.times.get(name, []))


def step_times(rates: Mapping[str, float]) -> dict[str, list[float]]:
  """Returns optimizer -> seconds of a step over AdamW's, for each round.

  In a round all optimizers take their turns, so that a slow minute of the machine is one of all.
  """

  def turn(trainer: timing.Trainer) -> Callable[[], None]:
    job, state = trainer.job, trainer.initial_state(jax.random.key(0))
    batch = splits.training_batches(job.config).batch(0, job.batch_shardings)

    def take() -> None:
      nonlocal state
      for _ in range(STEPS_OF_A_TURN):
        state, _ = jax.block_until_ready(trainer.step(state, batch))

    return take

  turns = {name: turn(trainer_of(Run(name, rate, TRIAL, 0))) for name, rate in rates.items()}
  seconds = timing.in_turns(turns, ROUNDS, time.monotonic)
  return {
    name: [ours / its for ours, its in zip(own, seconds["adamw"], strict=True)]
    for name, own in seconds.items()
  }


# ---- The page ----

PICTURE = "images/optimizers.svg"  # beside the page
PAGE = """## Optimizers beside AdamW

Written by `python -m benchmarks.optimizers --write_page`; do not edit.

The recipe `lm` on one CPU device. Each optimizer has the same number of trials, runs of {trial}
steps with learning rates around a prior: it, half and double of it, then by factors of 2 beyond
the best where that is at the border (more trials only while it is), else between the best and the
better of its neighbours. At the best one there are runs of each budget of steps. **Every run has
its schedule to its own end** (cosine; constant for `schedule_free_adamw`): the loss at some step
of a longer run is not that of a run which ends there. The loss is that of {batches} batches of the
evaluation split, the same ones for all, in nats per byte: the mean, and in parentheses the lowest
and the highest where there are several seeds. A seed draws the parameters and the order of the
data.

![Losses of the optimizers](images/optimizers.svg)

{losses}

### Steps

How many times fewer steps an optimizer takes to a loss, seed by seed: AdamW's steps over its own.
The loss is the one that AdamW ends at after so many steps, or the one that the optimizer ends at.
Between budgets a loss is interpolated over the logarithm of the steps; beyond them nothing is
assumed. The last column is the time of a step over AdamW's, measured in turns on the same CPU; on
accelerators it is another.

{ratios}

### Learning rates

Validation loss after {trial} steps, seed 0, the best in bold.

{rates}
"""
COLORS = ("#57606a", "#0969da", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#9a6700")


class Steps(NamedTuple):
  """Steps to a loss, or a ratio of them; `side`: "fewer" or "more" than these, or "" exactly."""

  value: float
  side: str = ""


def steps_to(target: float, losses: Mapping[int, float]) -> Steps:
  """Returns the steps of the run that ends at a loss.

  Args:
    target: a validation loss.
    losses: steps of a run -> its validation loss. In between, the loss is linear in the logarithm
      of the steps.
  """
  budgets = sorted(losses)
  for budget in budgets:
    if losses[budget] == target:
      return Steps(budget)
  for fewer, more in itertools.pairwise(budgets):
    high, low = losses[fewer], losses[more]
    if low < target < high:
      return Steps(fewer * (more / fewer) ** ((high - target) / (high - low)))
  return Steps(budgets[0], "fewer") if target > losses[budgets[0]] else Steps(budgets[-1], "more")


def to_adamw(found: Found, adamw: Found, budget: int) -> list[Steps]:
  """Returns, for each seed, AdamW's steps over the optimizer's to AdamW's loss after `budget`.

  A seed is of the same parameters and data for both. "more" and "fewer" are of the ratio.
  """
  goals = adamw.losses[budget].items()
  every = [steps_to(loss, found.of_seed(seed)) for seed, loss in goals]
  other = {"": "", "fewer": "more", "more": "fewer"}
  return [Steps(budget / one.value, other[one.side]) for one in every]


def from_adamw(found: Found, adamw: Found, budget: int) -> list[Steps]:
  """Returns, for each seed, AdamW's steps to the optimizer's loss after `budget` over these."""
  goals = found.losses[budget].items()
  every = [steps_to(loss, adamw.of_seed(seed)) for seed, loss in goals]
  return [Steps(one.value / budget, one.side) for one in every]


def page_text(results: Mapping[str, Found]) -> str:
  """Returns the page of optimizer -> what was found, `adamw` among them."""
  mean = functools.partial(timing.spread, middle=statistics.fmean)
  steps = [*results["adamw"].losses]
  head = ("optimizer", "learning rate", *(f"{budget} steps" for budget in steps))
  losses, rates = [], []
  for name, found in results.items():
    cells = [mean(found.losses[n].values(), 3) if n in found.losses else "" for n in steps]
    losses.append([f"`{name}`", f"{found.rate:.3g}", *cells])
    rates.append([f"`{name}`", ", ".join(_trial(rate, found) for rate in sorted(found.trials))])
  return PAGE.format(
    trial=TRIAL,
    batches=EVALUATION_BATCHES,
    losses=timing.table(head, losses),
    ratios=_ratios(results, results["adamw"]),
    rates=timing.table(("optimizer", "learning rate: loss"), rates),
  )


def _ratios(results: Mapping[str, Found], adamw: Found) -> str:
  """Returns the table of steps; a column in which all others are beyond the budgets is left out."""
  columns = {}
  for function, title, budgets in (
    (to_adamw, "AdamW's", adamw.losses),
    (from_adamw, "its own", BUDGETS),
  ):
    for budget in budgets:
      cells = {name: function(found, adamw, budget) for name, found in results.items()}
      if any(one.side == "" for name, some in cells.items() if name != "adamw" for one in some):
        columns[f"to {title} loss after {budget}"] = cells
  columns["time of a step"] = {n: [Steps(x) for x in found.times] for n, found in results.items()}
  rows = [[f"`{name}`", *(_ratio(of[name]) for of in columns.values())] for name in results]
  return timing.table(["optimizer", *columns], rows)


def _ratio(every: Sequence[Steps]) -> str:
  values = [one.value for one in every]
  if any(one.side == "more" for one in every):
    return f"more than {min(values):.2f}"
  if any(one.side == "fewer" for one in every):
    return f"less than {max(values):.2f}"
  return timing.spread(values, 2, statistics.fmean)


def _trial(rate: float, found: Found) -> str:
  loss = found.trials[rate]
  text = f"{rate:.3g}: {loss:.3f}" if math.isfinite(loss) else f"{rate:.3g}: diverged"
  return f"**{text}**" if rate == found.rate else text


# The card is white with dark ink, so that it is legible on light and dark pages.
STYLE = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "meshwright",  # ids are the same each time
  "font.family": "sans-serif",
  "axes.edgecolor": "#d0d7de",
  "axes.titlesize": 12,
  "axes.titlelocation": "left",
  "text.color": "#24292f",
}


def picture(results: Mapping[str, Found]) -> str:
  """Returns an SVG: the training losses of the longest runs, and how runs end."""
  longest, file = max(results["adamw"].losses), io.StringIO()
  title = f"Training loss of runs of {longest} steps; dots: validation loss at the end of a run"
  with matplotlib.rc_context(STYLE):
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, weight="bold")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#d0d7de", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    for (name, found), color in zip(results.items(), COLORS, strict=False):
      means = [statistics.fmean(losses) for losses in zip(*found.curves[longest], strict=True)]
      middles = [(number + 0.5) * MEAN_OF for number in range(len(means))]
      axes.plot(middles[1:], means[1:], color=color, label=name)
      ends = {budget: statistics.fmean(one.values()) for budget, one in found.losses.items()}
      axes.plot([*ends], [*ends.values()], "o", color=color)
    axes.legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
  return file.getvalue()


def main(_: Sequence[str]) -> None:
  """Makes the runs that are missing; or writes the page from those that are made."""
  results = Results(DOCS / "optimizers.json", None if _WRITE_PAGE.value else losses_of)
  if not _WRITE_PAGE.value:
    devices.start({"data": 1}, simulate=True)
  found = {name: found_of(name, results) for name in _OPTIMIZERS.value}
  if _WRITE_PAGE.value:
    write_section(DOCS / "optimizers.md", page_text(found))
    (DOCS / PICTURE).write_text(picture(found))
    return
  results.times |= step_times({name: one.rate for name, one in found.items()})
  results.save()


if __name__ == "__main__":
  app.run(main)
