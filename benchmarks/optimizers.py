r"""Compares optimizers on the recipe `lm`: steps and seconds to AdamW's final loss.

  python -m benchmarks.optimizers [--optimizers=adamw,muon] [--write_page]

Each optimizer has as many trials to find its learning rate, then three seeds at the best one for
each budget of steps. Every run has its schedule to its own end, so that the loss of a budget is
that of a run of so many steps; between budgets, losses are interpolated over the logarithm of the
steps. One device. A finished run is kept in docs/optimizers.json, and a later call goes on from
there. `--write_page` writes the section of docs/optimizers.md and its picture from what is there.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks import loss_curve, timing
from configs import base
from configs.schema import finalize
from input_pipeline.batches import TrainingBatches
from runtime import devices
from tests.docs.pages import write_section
from training import setup, splits
from training.optimizers.build import make_optimizer
from training.optimizers.spec import OptimizerSpec
from training.schedules import learning_rate_schedule
from training.specs import resolve
from training.state import State
from training.step import Program

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


@dataclasses.dataclass(frozen=True)
class Setting:
  """How an optimizer is used.

  Attributes:
    prior: the learning rate that the trials begin around.
    overrides: keys of the config's section `optimizer` that are not the recipe's.
  """

  prior: float
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


SETTINGS = {
  "adamw": Setting(8e-3),
  "adafactor": Setting(4e-2, {"weight_decay": 0.0}),  # its rate is relative to the parameter's RMS
  # Its update has three to ten times the RMS of AdamW's. Source: arXiv:2302.06675, section 5.
  "lion": Setting(1e-3, {"weight_decay": 0.8}),
  "muon": Setting(8e-3),
  "soap": Setting(8e-3),
  "schedule_free_adamw": Setting(8e-3),
}


_OPTIMIZERS = flags.DEFINE_list(
  "optimizers", list(SETTINGS), "Optimizers; adamw must be among them."
)
_WRITE_PAGE = flags.DEFINE_bool(
  "write_page", False, "Write the pages from the runs that are there."
)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that was, or is to be, made.

  Attributes:
    optimizer: its name.
    learning_rate: at its peak.
    steps: in all.
    seed: of parameters and of the data's order.
  """

  optimizer: str
  learning_rate: float
  steps: int
  seed: int

  def key(self) -> str:
    """Returns its name in the results."""
    return f"{self.optimizer}, {self.learning_rate:.3g}, {self.steps} steps, seed {self.seed}"


class Results:
  """Finished runs and the times of steps, in a file of JSON.

  Attributes:
    runs: key of a run -> `validation`, its loss after the last step, infinite if it diverged; and
      `training`, the mean loss of each MEAN_OF steps.
    times: optimizer -> seconds of a step over those of AdamW's, a number for each round.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
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

  def last(self, run: Run) -> float:
    """Returns the validation loss after a run's last step."""
    return self.runs[run.key()]["validation"]


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


def trials(name: str, results: Results) -> tuple[dict[float, float], Run | None]:
  """Returns the finished trials of an optimizer, learning rate -> validation loss, and the next."""
  losses: dict[float, float] = {}
  while len(losses) < TRIALS or (at_border(losses) and len(losses) < MOST_TRIALS):
    rate = next_rate(SETTINGS[name].prior, losses)
    run = Run(name, rate, TRIAL, SEEDS[0])
    if run.key() not in results.runs:
      return losses, run
    losses[rate] = results.last(run)
  return losses, None


def at_border(losses: Mapping[float, float]) -> bool:
  """Returns whether the best learning rate is the smallest or the largest of those tried."""
  return min(losses, key=losses.get) in (min(losses), max(losses))


def missing(names: Sequence[str], results: Results) -> Run | None:
  """Returns the next run, None where all are made: all optimizers are kept equally far."""
  tried = [trials(name, results) for name in names]
  if any(run for _, run in tried):
    return min(((len(losses), run) for losses, run in tried if run), key=lambda pair: pair[0])[1]
  made = itertools.zip_longest(*(finals(name, results) for name in names))
  runs = (run for of_all in made for run in of_all if run)
  return next((run for run in runs if run.key() not in results.runs), None)


def finals(name: str, results: Results) -> list[Run]:
  """Returns the runs at the best learning rate of the trials."""
  losses, _ = trials(name, results)
  rate = min(losses, key=losses.get)
  budgets = (*BUDGETS, FEWEST) if name == "adamw" else BUDGETS
  return [Run(name, rate, steps, seed) for steps in budgets for seed in SEEDS]


# ---- A run ----


def config_of(
  recipe: str, name: str, rate: float, steps: int, overrides: Mapping[str, Any]
) -> ConfigDict:
  """Returns the finalized config of a recipe on one device."""
  config = base.get_config(recipe)
  config.optimizer.update({"name": name, "learning_rate": rate, **SETTINGS[name].overrides})
  config.training.steps = steps
  config.update_from_flattened_dict(dict(overrides))
  return finalize.finalize(config, "cpu")


def step_at(
  program: Program,
  spec: OptimizerSpec,
  state: State,
  batch: Mapping[str, jax.Array],
  rate: jax.Array,
) -> tuple[State, dict[str, jax.Array]]:
  """Takes a train step at a learning rate that is no constant of the program."""
  spec = dataclasses.replace(spec, learning_rate=rate)
  optimizer = make_optimizer(spec, program.split(program.params)[0])

  def update(grads, moments, params):
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments

  schedule = learning_rate_schedule(spec, spec.steps)
  return dataclasses.replace(program, update=update, schedule=schedule).train_step(state, batch)


class Bench:
  """Makes runs; of programs that all optimizers share, compiles one.

  Attributes:
    recipe: what is trained.
    overrides: dotted keys of the config that replace the recipe's.
  """

  def __init__(self, where: devices.Devices, recipe: str = "lm", **overrides: Any):
    self.recipe, self.overrides, self._where = recipe, overrides, where
    self._compiled: dict[tuple[str, int], tuple[setup.Job, Callable]] = {}
    self._initial: Callable | None = None
    self._evaluate: Callable | None = None
    self._data: splits.Data | None = None

  def compiled(self, name: str, steps: int) -> tuple[setup.Job, Callable]:
    """Returns a job, and its train step as a function of state, batch and learning rate."""
    key = name, steps
    if key not in self._compiled:
      config = config_of(self.recipe, name, SETTINGS[name].prior, steps, self.overrides)
      job = setup.prepare(config, self._where)
      rate = jax.ShapeDtypeStruct((), jnp.float32)
      step = functools.partial(step_at, job.program, resolve(job.config).optimizer)
      given = job.state, job.batch, rate
      self._compiled[key] = job, job.compile(step, *given, donate_argnums=0).function
      self._initial = self._initial or job.compile_init().function
      self._evaluate = self._evaluate or job.compile_eval_step().function
      self._data = self._data or splits.open_data(job)
    return self._compiled[key]

  def initial_state(self, optimizer: Any, seed: int) -> State:
    """Returns the initial state, its parameters being the same for all optimizers."""
    params = self._initial(jax.random.key(seed)).params
    return State(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params), {})

  def make(self, run: Run) -> dict[str, Any]:
    """Returns the losses of a run, as `Results` keeps them."""
    job, step = self.compiled(run.optimizer, run.steps)
    batches = self.batches(job.config.data.global_batch_size, run.seed)
    state, losses = timing.trained(
      step,
      self.initial_state(job.program.optimizer, run.seed),
      lambda number: batches.batch(number, job.batch_shardings),
      run.steps,
      np.float32(run.learning_rate),
    )
    if not math.isfinite(losses[-1]):
      return {"validation": math.inf, "training": []}
    means = [
      round(statistics.fmean(losses[first : first + MEAN_OF]), 5)
      for first in range(0, run.steps, MEAN_OF)
    ]
    held_out, places = self._data.evaluation, job.batch_shardings
    loss = timing.held_out(self._evaluate, state, held_out, places, EVALUATION_BATCHES)
    return {"validation": round(loss, 5), "training": means}

  def batches(self, size: int, seed: int) -> TrainingBatches:
    """Returns the training batches of `size` rows, in the order of a seed."""
    return TrainingBatches(self._data.train.source, global_batch_size=size, seed=seed)

  def step_times(self, rates: Mapping[str, float], rounds: int, steps: int) -> dict[str, list]:
    """Returns optimizer -> seconds of a step over AdamW's, for each round.

    In a round all optimizers take their turns, so that a slow minute of the machine is one of all.

    Args:
      rates: optimizer -> learning rate.
      rounds: how many.
      steps: of each optimizer in a round.
    """

    def turn(name: str, rate: float) -> Callable[[], None]:
      job, step = self.compiled(name, TRIAL)
      batch = self.batches(job.config.data.global_batch_size, 0).batch(0, job.batch_shardings)
      state = self.initial_state(job.program.optimizer, 0)

      def take() -> None:
        nonlocal state
        for _ in range(steps):
          state, _ = jax.block_until_ready(step(state, batch, np.float32(rate)))

      return take

    turns = {name: turn(name, rate) for name, rate in rates.items()}
    seconds = timing.in_turns(turns, rounds, time.monotonic)
    return {
      name: [ours / its for ours, its in zip(own, seconds["adamw"], strict=True)]
      for name, own in seconds.items()
    }


def make_all(bench: Bench, names: Sequence[str], results: Results) -> None:
  """Makes the runs that are missing, and keeps each as soon as it is made."""
  while run := missing(names, results):
    began = time.monotonic()
    results.runs[run.key()] = bench.make(run)
    results.save()
    loss, seconds = results.last(run), time.monotonic() - began
    print(f"{run.key()}: validation loss {loss:.4f}, {seconds:.0f} s", flush=True)


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

{left}![Losses of the optimizers](images/optimizers.svg)

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

Losses = Mapping[int, Mapping[int, float]]  # steps of a run -> seed -> validation loss


@dataclasses.dataclass(frozen=True)
class Found:
  """What was found of an optimizer.

  Attributes:
    trials: learning rate -> validation loss.
    rate: the best of them.
    losses: of the runs at that rate.
    curves: steps of a run -> the training losses of each seed, each of so many steps.
    times: seconds of a step over those of AdamW's, a number for each round.
  """

  trials: Mapping[float, float]
  rate: float
  losses: Losses
  curves: Mapping[int, Sequence[Sequence[float]]]
  times: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Steps:
  """The steps of the run that ends at a loss.

  Attributes:
    value: the steps.
    side: "" where two budgets enclose the loss; "fewer" or "more" than this one, where none does.
  """

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
  both = adamw.losses.get(budget, {}).keys() & _seeds(found)
  every = [steps_to(adamw.losses[budget][n], of_seed(found.losses, n)) for n in sorted(both)]
  other = {"": "", "fewer": "more", "more": "fewer"}
  return [Steps(budget / one.value, other[one.side]) for one in every]


def from_adamw(found: Found, adamw: Found, budget: int) -> list[Steps]:
  """Returns, for each seed, AdamW's steps to the optimizer's loss after `budget` over these."""
  both = found.losses.get(budget, {}).keys() & _seeds(adamw)
  every = [steps_to(found.losses[budget][n], of_seed(adamw.losses, n)) for n in sorted(both)]
  return [Steps(one.value / budget, one.side) for one in every]


def _seeds(found: Found) -> set[int]:
  return {seed for by_seed in found.losses.values() for seed in by_seed}


def of_seed(losses: Losses, seed: int) -> dict[int, float]:
  """Returns steps -> loss of one seed."""
  return {steps: by_seed[seed] for steps, by_seed in losses.items() if seed in by_seed}


def page_text(
  results: Mapping[str, Found], trial: int, budgets: Sequence[int], batches: int, left: str = ""
) -> str:
  """Returns the page.

  Args:
    results: optimizer -> what was found, `adamw` among them.
    trial: steps of a trial.
    budgets: steps of the other runs.
    batches: of an evaluation.
    left: what is still to be measured.
  """
  rows = [
    [f"`{name}`", ", ".join(_trial(rate, found) for rate in sorted(found.trials))]
    for name, found in results.items()
  ]
  return PAGE.format(
    trial=trial,
    batches=batches,
    left=f"**Not all is measured yet**: {left}.\n\n" if left else "",
    losses=_losses(results, budgets),
    ratios=_ratios(results, results["adamw"], sorted(budgets)),
    rates=timing.table(("optimizer", "learning rate: loss"), rows),
  )


def _ratios(results: Mapping[str, Found], adamw: Found, budgets: Sequence[int]) -> str:
  columns = {}
  for function, title in ((to_adamw, "AdamW's"), (from_adamw, "its own")):
    for budget in budgets:
      cells = {name: function(found, adamw, budget) for name, found in results.items()}
      if any(one.side == "" for name, of in cells.items() if name != "adamw" for one in of):
        columns[f"to {title} loss after {budget}"] = cells
  if any(found.times for found in results.values()):
    columns["time of a step"] = {
      name: [Steps(time) for time in found.times] for name, found in results.items()
    }
  rows = [[f"`{name}`", *(_ratio(of[name]) for of in columns.values())] for name in results]
  return timing.table(["optimizer", *columns], rows)


def _losses(results: Mapping[str, Found], budgets: Sequence[int]) -> str:
  made = sorted({b for b in budgets for found in results.values() if found.losses.get(b)})
  rows = []
  for name, found in results.items():
    cells = [
      timing.spread(found.losses.get(budget, {}).values(), 3, statistics.fmean) for budget in made
    ]
    rows.append([f"`{name}`", f"{found.rate:.3g}", *cells])
  return timing.table(["optimizer", "learning rate", *(f"{budget} steps" for budget in made)], rows)


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


def picture(results: Mapping[str, Found], mean_of: int) -> str:
  """Returns an SVG: the training losses of the longest runs that all have, and how runs end.

  Args:
    results: optimizer -> what was found.
    mean_of: steps whose mean is a point of a curve.
  """
  common = set.intersection(
    *({b for b, c in found.curves.items() if c} for found in results.values())
  )
  longest = max(common)
  title = f"Training loss of runs of {longest} steps; dots: validation loss at the end of a run"
  with loss_curve.chart(title) as (axes, file):
    for (name, found), color in zip(results.items(), COLORS, strict=False):
      means = [statistics.fmean(losses) for losses in zip(*found.curves[longest], strict=True)]
      middles = [(number + 0.5) * mean_of for number in range(len(means))]
      axes.plot(middles[1:], means[1:], color=color, label=name)
      ends = {b: statistics.fmean(one.values()) for b, one in found.losses.items() if one}
      axes.plot([*ends], [*ends.values()], "o", color=color)
  return file.getvalue()


# ---- What is written ----


def found_of(name: str, results: Results) -> Found:
  """Returns what the results say of an optimizer whose trials are made."""
  losses, _ = trials(name, results)
  made = [run for run in finals(name, results) if run.key() in results.runs]
  by_budget: dict[int, dict[int, float]] = {}
  curves: dict[int, list[Sequence[float]]] = {}
  for run in made:
    by_budget.setdefault(run.steps, {})[run.seed] = results.last(run)
    if training := results.runs[run.key()]["training"]:
      curves.setdefault(run.steps, []).append(training)
  rate = min(losses, key=losses.get)
  return Found(losses, rate, by_budget, curves, results.times.get(name, []))


def write(names: Sequence[str], results: Results, docs: pathlib.Path) -> None:
  """Writes the page and the picture into a folder."""
  found = {name: found_of(name, results) for name in names if trials(name, results)[0]}
  budgets = (FEWEST, *BUDGETS)
  page = page_text(found, TRIAL, budgets, EVALUATION_BATCHES, left(names, results))
  write_section(docs / "optimizers.md", page)
  file = docs / PICTURE
  file.parent.mkdir(exist_ok=True)
  file.write_text(picture(found, MEAN_OF))


def left(names: Sequence[str], results: Results) -> str:
  """Returns what is still to be measured; "" where that is nothing."""
  tried = {name: trials(name, results) for name in names}
  untuned = [f"`{name}`" for name, (_, run) in tried.items() if run]
  runs = [
    run.key()
    for name, (losses, _) in tried.items()
    for run in (finals(name, results) if losses else [])
    if run.key() not in results.runs
  ]
  parts = [f"trials of {', '.join(untuned)}"] if untuned else []
  parts += [f"{len(runs)} runs at the best learning rates"] if runs else []
  parts += [] if results.times else ["the time of a step"]
  return ", ".join(parts) and f"{', '.join(parts)} (the command without `--write_page` goes on)"


def main(_: Sequence[str]) -> None:
  """Makes the runs that are missing; or writes the pages from those that are there."""
  results = Results(DOCS / "optimizers.json")
  if _WRITE_PAGE.value:
    return write(_OPTIMIZERS.value, results, DOCS)
  [where] = devices.start({"data": 1}, simulate=True)
  bench = Bench(where)
  make_all(bench, _OPTIMIZERS.value, results)
  best = {name: found_of(name, results).rate for name in _OPTIMIZERS.value}
  results.times |= bench.step_times(best, ROUNDS, STEPS_OF_A_TURN)
  results.save()


if __name__ == "__main__":
  app.run(main)
