"""What `python -m benchmarks.optimizers` writes of its results: a section of a page, a picture."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, svg, text, ticks

HEADING = "## Optimizers beside AdamW"
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


# ---- The page ----


def page(
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
  adamw = results["adamw"]
  lines = [
    HEADING,
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
    "the lowest and the highest where there are several seeds. A seed draws the parameters and the "
    "order of the data.",
    "",
    *([f"**Not all is measured yet**: {left}.", ""] if left else []),
    f"![Losses of the optimizers]({PICTURE})",
    "",
    *_losses(results, budgets),
    "",
    "### Steps",
    "",
    "How many times fewer steps an optimizer takes to a loss, seed by seed: AdamW's steps over "
    "its own. The loss is the",
    "one that AdamW ends at after so many steps, or the one that the optimizer ends at. Between "
    "budgets a loss is",
    "interpolated over the logarithm of the steps; beyond them nothing is assumed. The last column "
    "is the time of a step",
    "over AdamW's, measured in turns on the same CPU; on accelerators it is another.",
    "",
    *_ratios(results, adamw, sorted(budgets)),
  ]
  lines += ["", "### Learning rates", ""]
  lines += [f"Validation loss after {trial} steps, seed 0, the best in bold.", ""]
  lines += [_row("optimizer", "learning rate: loss"), _row("---", "---")]
  for name, found in results.items():
    cells = [_trial(rate, found) for rate in sorted(found.trials)]
    lines.append(_row(f"`{name}`", ", ".join(cells)))
  return "\n".join(lines) + "\n"


def _ratios(results: Mapping[str, Found], adamw: Found, budgets: Sequence[int]) -> list[str]:
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
  head = ["optimizer", *columns]
  lines = [_row(*head), _row(*["---"] * len(head))]
  for name in results:
    lines.append(_row(f"`{name}`", *(_ratio(cells[name]) for cells in columns.values())))
  return lines


def _losses(results: Mapping[str, Found], budgets: Sequence[int]) -> list[str]:
  made = sorted({b for b in budgets for found in results.values() if found.losses.get(b)})
  lines = [_row("optimizer", "learning rate", *(f"{budget} steps" for budget in made))]
  lines.append(_row(*["---"] * (len(made) + 2)))
  for name, found in results.items():
    cells = [_spread(found.losses.get(budget, {}).values()) for budget in made]
    lines.append(_row(f"`{name}`", f"{found.rate:.3g}", *cells))
  return lines


def _ratio(every: Sequence[Steps]) -> str:
  values = [one.value for one in every]
  if any(one.side == "more" for one in every):
    return f"more than {min(values):.2f}"
  if any(one.side == "fewer" for one in every):
    return f"less than {max(values):.2f}"
  return _spread(values, 2)


def _trial(rate: float, found: Found) -> str:
  loss = found.trials[rate]
  text = f"{rate:.3g}: {loss:.3f}" if math.isfinite(loss) else f"{rate:.3g}: diverged"
  return f"**{text}**" if rate == found.rate else text


def _spread(values: Sequence[float], digits: int = 3) -> str:
  """Returns the mean, and of several the lowest and the highest; "" of nothing."""
  values = list(values)
  if not values:
    return ""
  mean = f"{statistics.fmean(values):.{digits}f}"
  if len(values) == 1:
    return mean
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
