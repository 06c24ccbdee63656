"""The page and the picture of `python -m benchmarks.optimizers`, from its results."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, svg, text, ticks

PICTURE = "images/optimizers.svg"  # beside the page
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


def steps_to(target: float, losses: Mapping[int, float]) -> float | None:
  """Returns the steps of the run that ends at a loss; None where no two budgets enclose it.

  Args:
    target: a validation loss.
    losses: steps of a run -> its validation loss. In between, the loss is linear in the logarithm
      of the steps.
  """
  budgets = sorted(losses)
  for fewer, more in itertools.pairwise(budgets):
    high, low = losses[fewer], losses[more]
    if low <= target <= high:
      share = (high - target) / (high - low) if high > low else 0.0
      return fewer * (more / fewer) ** share
  return None


def ratios(found: Found, adamw: Found, budget: int) -> list[float]:
  """Returns AdamW's steps over the optimizer's to AdamW's loss, for each seed where both have runs.

  A seed is of the same parameters and data for both. Where the optimizer's loss after `budget`
  steps is the higher one, its steps are these, and AdamW's are interpolated.
  """
  found_ratios = []
  for seed, target in adamw.losses.get(budget, {}).items():
    ours, theirs = (of_seed(one.losses, seed) for one in (found, adamw))
    if budget in ours and ours[budget] > target:
      steps = steps_to(ours[budget], theirs)
      ratio = steps / budget if steps else None
    else:
      steps = steps_to(target, ours)
      ratio = budget / steps if steps else None
    if ratio:
      found_ratios.append(ratio)
  return found_ratios


def least_ratio(found: Found, adamw: Found, budget: int) -> float | None:
  """Returns what AdamW's steps over the optimizer's exceed: its shortest runs end below AdamW's."""
  targets = adamw.losses.get(budget, {})
  shortest = min(found.losses, default=budget)
  ends = found.losses.get(shortest, {})
  both = targets.keys() & ends.keys()
  if shortest < budget and both and all(ends[seed] < targets[seed] for seed in both):
    return budget / shortest
  return None


def of_seed(losses: Losses, seed: int) -> dict[int, float]:
  """Returns steps -> loss of one seed."""
  return {steps: by_seed[seed] for steps, by_seed in losses.items() if seed in by_seed}


# ---- The page ----


def page(results: Mapping[str, Found], trial: int, budgets: Sequence[int], batches: int) -> str:
  """Returns the page.

  Args:
    results: optimizer -> what was found, `adamw` among them.
    trial: steps of a trial.
    budgets: steps of the other runs.
    batches: of an evaluation.
  """
  adamw = results["adamw"]
  lines = [
    "# Optimizers beside AdamW",
    "",
    "Written by `python -m benchmarks.optimizers --write_page`; do not edit.",
    "",
    "The recipe `lm` on one CPU device. Each optimizer has the same number of trials, runs of "
    f"{trial} steps with",
    "learning rates around a prior: it, half and double of it, then by factors of 2 beyond the "
    "best where that is at the",
    "border (more trials only while it is), else between the best and the better of its "
    "neighbours. At the best one",
    "there are runs of each budget of steps. **Every run has its schedule to its own end** "
    "(cosine; constant for",
    "`schedule_free_adamw`): the loss at some step of a longer run is not that of a run which ends "
    "there. The loss is",
    f"that of {batches} batches of the evaluation split, the same ones for all, in nats per byte: "
    "the mean, and in parentheses",
    "the lowest and the highest of the seeds. A seed draws the parameters and the order of the "
    "data.",
    "",
    f"![Losses of the optimizers]({PICTURE})",
    "",
    *_losses(results, budgets),
    "",
    "## To AdamW's loss",
    "",
    "How many times fewer steps an optimizer takes to the loss that AdamW ends at after so many, "
    "seed by seed. Between",
    "budgets a loss is interpolated over the logarithm of the steps. Where an optimizer ends "
    "above AdamW, it is the",
    "number of steps after which AdamW ends at that loss, over those of the optimizer: below 1. "
    "The last column is the",
    "time of a step over AdamW's, measured in turns on the same CPU; on accelerators it is "
    "another.",
    "",
  ]
  shown = [budget for budget in sorted(budgets) if any(_shown(results, adamw, budget))]
  head = [f"steps to AdamW's after {budget}" for budget in shown]
  lines += [_row("optimizer", *head, "time of a step"), _row(*["---"] * (len(head) + 2))]
  for name, found in results.items():
    cells = [_ratio(found, adamw, budget) for budget in shown]
    lines.append(_row(f"`{name}`", *cells, _spread(found.times, "x")))
  lines += ["", "## Learning rates", ""]
  lines += [f"Validation loss after {trial} steps, seed 0, the best in bold.", ""]
  lines += [_row("optimizer", "learning rate: loss"), _row("---", "---")]
  for name, found in results.items():
    cells = [_trial(rate, found) for rate in sorted(found.trials)]
    lines.append(_row(f"`{name}`", ", ".join(cells)))
  return "\n".join(lines) + "\n"


def _shown(results: Mapping[str, Found], adamw: Found, budget: int) -> list[float]:
  others = (found for name, found in results.items() if name != "adamw")
  return [ratio for found in others for ratio in ratios(found, adamw, budget)]


def _losses(results: Mapping[str, Found], budgets: Sequence[int]) -> list[str]:
  made = sorted({b for b in budgets for found in results.values() if found.losses.get(b)})
  lines = [_row("optimizer", "learning rate", *(f"{budget} steps" for budget in made))]
  lines.append(_row(*["---"] * (len(made) + 2)))
  for name, found in results.items():
    cells = [_spread(found.losses.get(budget, {}).values()) for budget in made]
    lines.append(_row(f"`{name}`", f"{found.rate:.3g}", *cells))
  return lines


def _ratio(found: Found, adamw: Found, budget: int) -> str:
  if least := least_ratio(found, adamw, budget):
    return f"more than {least:.2f}x"
  return _spread(ratios(found, adamw, budget), "x")


def _trial(rate: float, found: Found) -> str:
  loss = found.trials[rate]
  text = f"{rate:.3g}: {loss:.3f}" if math.isfinite(loss) else f"{rate:.3g}: diverged"
  return f"**{text}**" if rate == found.rate else text


def _spread(values: Sequence[float], unit: str = "") -> str:
  """Returns the mean, lowest and highest; "" of nothing."""
  values = list(values)
  if not values:
    return ""
  digits = 2 if unit else 3
  mean = f"{statistics.fmean(values):.{digits}f}{unit}"
  if len(values) == 1:
    return f"{mean} (one seed)" if not unit else mean
  return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _row(*cells: str) -> str:
  return "| " + " | ".join(cells) + " |"


# ---- The picture ----


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
  curves = {
    name: [statistics.fmean(losses) for losses in zip(*found.curves[longest], strict=True)]
    for name, found in results.items()
  }
  ends = {
    name: {b: statistics.fmean(by_seed.values()) for b, by_seed in found.losses.items() if by_seed}
    for name, found in results.items()
  }
  every = [*(x for curve in curves.values() for x in curve[1:])]
  every += [loss for by_steps in ends.values() for loss in by_steps.values()]
  across = ticks(0, max([longest, *(b for by_steps in ends.values() for b in by_steps)]))
  up = ticks(min(every), max(every))

  def x(step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / across[-1]

  def y(loss: float) -> float:
    share = (min(loss, up[-1]) - up[0]) / (up[-1] - up[0])
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

  title = f"Training loss of runs of {longest} steps; dots: validation loss at the end of a run"
  parts = axes(title, across, up, x, y)
  for row, (name, color) in enumerate(zip(results, COLORS, strict=False)):
    middles = [(number + 0.5) * mean_of for number in range(len(curves[name]))]
    points = zip(middles[1:], curves[name][1:], strict=True)
    line = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in points)
    parts.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="2"/>')
    parts += [
      f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{color}"/>'
      for step, loss in ends[name].items()
    ]
    place = f'text-anchor="end" fill="{color}"'
    parts.append(text(WIDTH - RIGHT - 8, TOP + 18 + 18 * row, name, place))
  return svg(title, parts)
