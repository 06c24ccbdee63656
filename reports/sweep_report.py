"""What the runs of a sweep show together: the best, the effect of each axis, a page and a table.

The effect of an axis is the range of the means of its values, over runs that are alike but for it
and their seeds. It is within the spread of seeds where Tukey's studentized range does not tell it
from zero with 95 % confidence, by the standard deviation among runs that differ only in the seed.
"""

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Mapping, Sequence

import matplotlib
from etils import epath
from markupsafe import Markup
from matplotlib.figure import Figure
from scipy import stats

from reports import charts, run_index
from reports.run_files import Run
from runtime import units

SEED = "seed"
DONE, FAILED, LEFT, RUNNING, LOST = "done", "failed", "left", "running", "stopped by halving"
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Entry:
  """A run of a sweep.

  Attributes:
    name: of its folder.
    setting: key of an axis -> its value, as on a command line.
    state: of those above.
    run: its files, where there are any.
    code: exit code of its process, once it has ended.
    reason: why it has failed, or was stopped.
  """

  name: str
  setting: Mapping[str, str]
  state: str = LEFT
  run: Run | None = None
  code: int | None = None
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Metric:
  """By what runs are compared: key, title, and 1 or -1 where the smallest or largest is best."""

  key: str
  title: str
  sign: int


@dataclasses.dataclass(frozen=True)
class Effect:
  """What an axis does.

  Attributes:
    key: of the config.
    means: value -> mean of the metric over matched runs, the best first.
    runs: of each value, as a harmonic mean.
    limit: a range of means up to which it is within the spread of seeds; None without seeds.
  """

  key: str
  means: Mapping[str, float]
  runs: float
  limit: float | None

  @property
  def size(self) -> float:
    """Returns the range of the means."""
    return max(self.means.values()) - min(self.means.values())

  @property
  def within(self) -> bool:
    """Returns whether it is within the spread of seeds."""
    return self.limit is not None and self.size <= self.limit


class Result:
  """The runs of a sweep, and what follows from them.

  Attributes:
    title: of the sweep.
    entries: its runs.
    axes: the keys that differ, the seed last.
    runs: the files of those that have any.
    metric: by which they are compared.
  """

  def __init__(self, title: str, entries: Sequence[Entry]):
    self.title, self.entries = title, entries
    keys = [key for key in entries[0].setting if len({one.setting[key] for one in entries}) > 1]
    self.axes = sorted(keys, key=lambda key: key == SEED)
    self.runs = [one.run for one in entries if one.run is not None]
    self.metric = metric_of(self.runs)

  def value(self, entry: Entry) -> float | None:
    """Returns the last value of a run that is done; None of any other."""
    points = entry.run.points(self.metric.key) if entry.run and entry.state == DONE else []
    return points[-1][1] if points else None

  def groups(self) -> dict[tuple[str, ...], list[float]]:
    """Returns setting without its seed -> values of its runs."""
    found: dict[tuple[str, ...], list[float]] = {}
    for one in self.entries:
      if (value := self.value(one)) is not None:
        key = tuple(one.setting[axis] for axis in self.axes if axis != SEED)
        found.setdefault(key, []).append(value)
    return found

  def spread(self) -> tuple[float, int]:
    """Returns (standard deviation among runs that differ only in the seed, degrees of freedom)."""
    many = [values for values in self.groups().values() if len(values) > 1]
    free = sum(len(values) - 1 for values in many)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in many)
    return (math.sqrt(squares / free) if free else 0.0), free

  def ranked(self) -> list[tuple[tuple[str, ...], list[float]]]:
    """Returns `groups`, the best mean first."""
    return sorted(
      self.groups().items(), key=lambda one: self.metric.sign * statistics.fmean(one[1])
    )

  def effects(self) -> list[Effect]:
    """Returns the effect of each axis besides the seed that has matched runs, the largest first."""
    found = [self._effect(place) for place in range(len(self.axes) - (SEED in self.axes))]
    return sorted(filter(None, found), key=lambda one: -one.size)

  def _effect(self, place: int) -> Effect | None:
    """Returns the effect of an axis by blocks of runs that are alike but for it and their seeds."""
    groups = self.groups()
    values = [*dict.fromkeys(key[place] for key in groups)]
    blocks = {(*key[:place], *key[place + 1 :]) for key in groups}

    def cell(block: tuple, value: str) -> list[float]:
      return groups.get((*block[:place], value, *block[place:]), [])

    complete = [one for one in blocks if all(cell(one, value) for value in values)]
    if len(values) < 2 or not complete:
      return None
    means = {
      value: statistics.fmean(statistics.fmean(cell(block, value)) for block in complete)
      for value in values
    }
    counts = [sum(len(cell(block, value)) for block in complete) for value in values]
    runs = statistics.harmonic_mean(counts)
    deviation, free = self.spread()
    limit = None
    if free:
      factor = stats.studentized_range.ppf(CONFIDENCE, len(values), free)
      limit = float(factor) * deviation / math.sqrt(runs)
    best_first = sorted(means, key=lambda value: self.metric.sign * means[value])
    return Effect(self.axes[place], {one: means[one] for one in best_first}, runs, limit)


def metric_of(runs: Sequence[Run]) -> Metric:
  """Returns the first metric of `run_index` that runs have."""
  found = [key for key in run_index.METRICS if any(run.points(key) for run in runs)]
  if run_index.unlike_tokenizers(runs):
    found = [key for key in found if key != "eval_loss"]
  elif "eval_loss" in found:
    found = [key for key in found if key != "eval_bits_per_byte"]
  key = found[0] if found else "loss"
  return Metric(key, run_index.METRICS[key], -1 if key in run_index.LARGEST else 1)


def value_at(run: Run | None, metric: Metric, step: int) -> float | None:
  """Returns the value of a run's last evaluation up to a step; None without one at it or later."""
  points = run.points(metric.key) if run else []
  upto = [value for at, value in points if at <= step]
  return upto[-1] if upto and points[-1][0] >= step else None


# ------------------------------ as text ------------------------------


def text(result: Result, width: int) -> str:
  """Returns the runs, the best setting, the effect of each axis, and what has failed."""
  lines = [run_index.terminal(result.runs, width), ""] if result.runs else []
  lines += sentences(result)
  for state in (FAILED, LOST):
    some = [one for one in result.entries if one.state == state]
    lines += [f"{state}: {len(some)} of {len(result.entries)}"] if some else []
    lines += [f"  {one.name}: {one.reason}" for one in some]
  if left := [one.name for one in result.entries if one.state in (LEFT, RUNNING)]:
    lines += [f"left: {len(left)} of {len(result.entries)}", *(f"  {name}" for name in left)]
  return "\n".join(lines)


def sentences(result: Result) -> list[str]:
  """Returns the best setting, how far seeds spread, and a sentence for each axis."""
  ranked, title = result.ranked(), result.metric.title
  if not ranked:
    return [f"no run is done, so none is the best by its {title}"]
  (best, values), names = ranked[0], [axis for axis in result.axes if axis != SEED]
  named = " ".join(f"{key}={value}" for key, value in zip(names, best, strict=True))
  count = f", the mean of {len(values)} seeds" if len(values) > 1 else ""
  lines = [f"best: {named or 'the config'}: {title} {statistics.fmean(values):.4f}{count}"]
  deviation, free = result.spread()
  if free:
    lines.append(f"seeds: a standard deviation of {deviation:.4f} between runs that are alike")
  else:
    lines.append("seeds: none are varied, so nothing says which effects are chance; add seed=0,1,2")
  effects = result.effects()
  lines += [effect_text(one) for one in effects]
  lines += [_rank_text(result, key) for key in names if key not in {one.key for one in effects}]
  return lines


def effect_text(effect: Effect) -> str:
  """Returns what an axis does, and whether that is within the spread of seeds."""
  (best, least), *others = effect.means.items()
  values = ", ".join(f"{value} {mean - least:+.4f}" for value, mean in others)
  line = f"{effect.key}: {best} is best ({least:.4f}); {values}"
  if effect.limit is None:
    return line
  if effect.within:
    return (
      f"{line}: the effect of {effect.key} is within the spread of seeds ({effect.size:.4f}; above "
      f"{effect.limit:.4f} it would be beyond it)"
    )
  return f"{line}: beyond the spread of seeds, {effect.limit:.4f}"


def _rank_text(result: Result, key: str) -> str:
  """Returns what can be said of an axis where no two settings differ in it alone."""
  place = [axis for axis in result.axes if axis != SEED].index(key)
  pairs = [(group[place], statistics.fmean(values)) for group, values in result.groups().items()]
  numbers = [charts.number_order(value)[0] for value, _ in pairs]
  if math.inf in numbers or len({*numbers}) < 3:
    return f"{key}: no runs differ in it alone, so its effect is not known"
  found = stats.spearmanr(numbers, [mean for _, mean in pairs])
  return (
    f"{key}: rank correlation with {result.metric.title} {found.statistic:+.2f} over {len(pairs)} "
    f"settings (p = {found.pvalue:.2g}); no runs differ in it alone"
  )


# ------------------------------ as CSV and HTML ------------------------------


def table(result: Result) -> str:
  """Returns a line of CSV for each run: its setting, state, last metrics, steps and seconds."""
  keys = [key for key in run_index.METRICS if any(run.points(key) for run in result.runs)]
  file = io.StringIO()
  rows = csv.writer(file, lineterminator="\n")
  rows.writerow(["run", *result.entries[0].setting, "state", *keys, "step", "seconds", "reason"])
  for one in result.entries:
    points = [one.run.points(key) if one.run else [] for key in keys]
    last = [repr(some[-1][1]) if some else "" for some in points]
    times = sum(one.run.times["seconds"].values()) if one.run and one.run.times else ""
    done = one.run.done if one.run else 0
    rows.writerow([one.name, *one.setting.values(), one.state, *last, done, times, one.reason])
  return file.getvalue()


def html(result: Result, *, page: epath.Path, command: str) -> str:
  """Returns the page: that of its runs, above which is what they show together."""
  states = [one.state for one in result.entries]
  return run_index.html(
    result.runs,
    page=page,
    command=command,
    template="sweep.html.j2",
    title=f"Sweep: {result.title}",
    states=", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states)),
    found=sentences(result),
    effects=[
      {
        "key": one.key,
        "values": [[value, f"{mean:.4f}"] for value, mean in one.means.items()],
        "size": f"{one.size:.4f}",
        "limit": "" if one.limit is None else f"{one.limit:.4f}",
        "within": one.within,
      }
      for one in result.effects()
    ],
    metric=result.metric.title,
    parallel=parallel_coordinates(result),
    problems=[[one.name, one.state, one.reason] for one in result.entries if one.reason],
  )


def parallel_coordinates(result: Result) -> Markup:
  """Returns a drawing with a line for each run through its values, the best in color."""
  lines = [(one, value) for one in result.entries if (value := result.value(one)) is not None]
  if len(lines) < 2 or not result.axes:
    return Markup("")
  lines.sort(key=lambda line: -result.metric.sign * line[1])  # the best is drawn last
  heights, low = [], min(value for _, value in lines)
  for key in result.axes:
    values = sorted({one.setting[key] for one, _ in lines}, key=charts.number_order)
    heights.append({value: _share(place, len(values) - 1) for place, value in enumerate(values)})
  range_ = max(value for _, value in lines) - low
  places = range(len(result.axes) + 1)
  with matplotlib.rc_context(charts.SETTINGS):
    figure = Figure(figsize=(charts.WIDE, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for rank, (one, value) in enumerate(lines):
      best = rank == len(lines) - 1
      ys = [of[one.setting[key]] for key, of in zip(result.axes, heights, strict=True)]
      axes.plot(
        places,
        [*ys, _share(value - low, range_)],
        color=charts.ACCENT if best else charts.INK,
        linewidth=2.5 if best else 1.2,
        alpha=1.0 if best else 0.15 + 0.6 * rank / len(lines),
        gid=f"line{rank}",
      )
    for place, of in enumerate(heights):
      for value, height in of.items():
        axes.annotate(value, (place, height), xytext=(4, 2), textcoords="offset points")
    for height, value in ((0, low), (1, low + range_)):
      axes.annotate(f"{value:.4g}", (places[-1], height), xytext=(4, 2), textcoords="offset points")
    charts.plain_axes(axes, grid="x")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xticks(places, [*result.axes, result.metric.title])
    axes.set_xlim(-0.1, places[-1] + 0.4)
  titles = {
    f"line{rank}": f"{one.name}: {units.plain(value)}" for rank, (one, value) in enumerate(lines)
  }
  return charts.for_page(figure, "parallel coordinates", "parallel", titles)


def _share(part: float, whole: float) -> float:
  return part / whole if whole else 0.5
