"""Which charts the page of a run has, or one that compares runs."""

import statistics
from collections.abc import Iterable, Sequence

from reports import charts
from reports.charts import Chart, Line, Mark
from reports.run_files import Points, Run
from training import history

# Metric -> title, in the order of the charts. Metrics that are not here follow under their names.
TITLES = {
  "loss": "training loss",
  "eval_loss": "evaluation loss",
  "eval_bits_per_byte": "evaluation, bits per byte",
  "eval_accuracy": "evaluation accuracy",
  "grad_norm": "gradient norm",
  "learning_rate": "learning rate",
  "tokens_per_second": "tokens per second",
  "examples_per_second": "examples per second",
  "mfu": "model FLOPs utilization (MFU)",
  "peak_gib": "peak memory of a device, GiB",
  "step_seconds": "time of a step, seconds",
  "input_wait": "input wait, share of a step",
  "fullest_expert": "tokens of the fullest expert, over the mean",
  "expert_share": "share of tokens of each expert",
}
PERCENT = ("eval_accuracy", "mfu", "input_wait", "expert_share")
FROM_ZERO = ("tokens_per_second", "examples_per_second", "mfu", "peak_gib", "step_seconds")
FROM_ZERO += ("input_wait", "expert_share")
LOGARITHMIC = ("grad_norm",)
_NOT_DRAWN = ("eval_examples", "data_wait_seconds", "peak_bytes")
MOST_LINES = len(charts.SERIES)
MOST_CHARTS = 24
MOST_MARKS = 100  # checkpoints of a chart


def points_of(run: Run, key: str) -> Points:
  """Returns (step, value) of a metric, or of one that follows from others."""
  if key == "peak_gib":
    return [(step, value / 2**30) for step, value in run.points("peak_bytes")]
  if key == "input_wait":
    seconds = dict(run.points("step_seconds"))
    waits = run.points("data_wait_seconds")
    return [(step, wait / seconds[step]) for step, wait in waits if seconds.get(step)]
  return run.points(key)


def of_run(run: Run) -> list[tuple[str, Chart]]:
  """Returns (name, chart): the first one is the loss of training and evaluation."""
  found = []
  marks = marks_of(run)
  without_saves = [mark for mark in marks if mark.kind != "checkpoint"]
  losses = [Line("training", points_of(run, "loss"), 0, faint=True)]
  losses.append(Line("evaluation", points_of(run, "eval_loss"), 1, dotted=True))
  losses = [line for line in losses if line.points]
  if losses:
    unit = ", nats per token" if run.unit == "tokens" else ""
    found.append(("loss", Chart(f"loss{unit}", losses, marks)))
  for name, keys in _groups([run]):
    if name not in ("loss", "eval_loss") or any("/" in key for key in keys):
      lines = _lines(run, keys)
      if lines:
        found.append((name, _chart(name, lines, without_saves)))
  return found[:MOST_CHARTS]


def of_runs(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, Chart]]:
  """Returns (name, chart) of what several runs have; a line for each run, and no marks."""
  found = []
  for name, keys in _groups(runs):
    for key in keys[:MOST_LINES]:
      lines = [
        Line(names[number], points, number, dotted=key.startswith("eval_"))
        for number, run in enumerate(runs)
        if (points := points_of(run, key))
      ]
      if lines:
        chart = _chart(name, lines)
        part = key.partition("/")[2]
        title = f"{chart.title}: {part}" if part else chart.title
        found.append((key, Chart(**{**vars(chart), "title": title})))
  return found[:MOST_CHARTS]


def _groups(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
  """Yields (chart, its metrics): those with the same name before a slash."""
  keys = dict.fromkeys(key for run in runs for key in run.keys)
  for key, derived in (("peak_bytes", "peak_gib"), ("data_wait_seconds", "input_wait")):
    if key in keys:
      keys[derived] = None
  groups: dict[str, list[str]] = {}
  for key in keys:
    if key not in _NOT_DRAWN:
      groups.setdefault(key.partition("/")[0], []).append(key)
  order = [*TITLES, *groups]
  return sorted(groups.items(), key=lambda item: order.index(item[0]))


def _lines(run: Run, keys: Sequence[str]) -> list[Line]:
  """Returns a line for each metric of a chart; of too many, their median and extremes."""
  lines = [(key.partition("/")[2] or "all", points_of(run, key)) for key in keys]
  lines = [(label, points) for label, points in lines if points]
  if len(lines) > MOST_LINES:
    lines = _extremes([points for _, points in lines])
  dotted = keys[0].startswith("eval_")
  return [
    Line(label, points, number, dotted=dotted) for number, (label, points) in enumerate(lines)
  ]


def _extremes(lines: Sequence[Points]) -> list[tuple[str, Points]]:
  """Returns the smallest, the median and the largest value of each step."""
  values: dict[float, list[float]] = {}
  for points in lines:
    for step, value in points:
      values.setdefault(step, []).append(value)
  ways = (("largest", max), ("median", statistics.median), ("smallest", min))
  return [(name, [(step, way(some)) for step, some in values.items()]) for name, way in ways]


def _chart(name: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> Chart:
  return Chart(
    TITLES.get(name, name.replace("_", " ")),
    lines,
    marks,
    percent=name in PERCENT,
    from_zero=name in FROM_ZERO,
    logarithmic=name in LOGARITHMIC,
  )


def marks_of(run: Run) -> list[Mark]:
  """Returns what happened to a run: restarts, bad steps, rollbacks, checkpoints."""
  marks = [
    Mark("restart", one["step"], f"start {number} from step {one['step']:,}")
    for number, one in enumerate(run.starts[1:], 2)
  ]
  for step, why in bad_steps(run):
    marks.append(Mark("bad", step, f"bad step {step:,}: {why}"))
  for one in run.rollbacks:
    text = f"rolled back from step {one['rolled_back']:,} to step {one['step']:,}"
    marks.append(Mark("rollback", one["step"], text))
  saved = run.saved
  kept = saved[:: -(-len(saved) // MOST_MARKS) or 1]
  return marks + [Mark("checkpoint", step, f"checkpoint of step {step:,}") for step in kept]


def bad_steps(run: Run) -> list[tuple[int, str]]:
  """Returns (step, what was bad) of rollbacks, and of bad steps that have ended a start."""
  found = {one["rolled_back"]: str(one.get("why", "")) for one in run.rollbacks}
  for one in run.events(history.END):
    if isinstance(one.get("bad_step"), int):
      found[one["bad_step"]] = str(one.get("why", ""))
  return sorted(found.items())
