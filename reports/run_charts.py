"""Which charts the page of a run has, or one that compares runs."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from reports import charts
from reports.charts import Chart, Line, Mark
from reports.run_files import Points, Run
from runtime.forms import is_number
from training import history
from training.metrics import log_lines

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
_NOT_DRAWN = (log_lines.EXAMPLES, log_lines.SHARE, "data_wait_seconds", "peak_bytes")
MOST_LINES = len(charts.SERIES)
MOST_CHARTS = 24
MOST_MARKS = 100  # checkpoints of a chart


def curves_of(run: Run, key: str) -> list[tuple[str, Points]]:
  """Returns `Run.curves` of a metric, or of one that follows from others."""
  if key == "peak_gib":
    points = [(step, value / 2**30) for step, value in run.points("peak_bytes")]
  elif key == "input_wait":
    seconds = dict(run.points("step_seconds"))
    waits = run.points("data_wait_seconds")
    points = [(step, wait / seconds[step]) for step, wait in waits if seconds.get(step)]
  else:
    return run.curves(key)
  return [("", points)] if points else []


def of_run(run: Run) -> list[tuple[str, Chart]]:
  """Returns (name, chart): the first one is the loss of training and evaluation."""
  found = []
  marks = marks_of(run)
  without_saves = [mark for mark in marks if mark.kind != "checkpoint"]
  losses = [Line("training", points, 0, faint=True) for _, points in run.curves("loss")]
  losses += _evaluations("evaluation", run.curves("eval_loss"), 1)
  if losses:
    unit = ", nats per token" if run.unit == "tokens" else ""
    found.append(("loss", Chart(f"loss{unit}", losses, marks)))
  for name, keys in _groups([run]):
    if name not in ("loss", "eval_loss") or any("/" in key for key in keys):
      lines = _lines(run, keys)
      if lines:
        found.append((name, _chart(name, lines, without_saves)))
  return found[:MOST_CHARTS]


def of_runs(
  runs: Sequence[Run], names: Sequence[str], *, unlike: bool = False
) -> list[tuple[str, Chart]]:
  """Returns (name, chart) of what several runs have; a line for each run, and no marks.

  Args:
    runs: at most MOST_LINES.
    names: of the runs.
    unlike: whether they have different tokenizers: losses are in bits per byte.
  """
  found = []
  for name, keys in _groups(runs):
    if unlike and name == "eval_loss":  # is in eval_bits_per_byte
      continue
    for key in keys[:MOST_LINES]:
      found += [(key, chart) for chart in _of_metric(key, runs, names, unlike=unlike)]
  return found[:MOST_CHARTS]


def _of_metric(
  key: str, runs: Sequence[Run], names: Sequence[str], *, unlike: bool
) -> Iterable[Chart]:
  """Yields the chart of a metric of several runs; none where no run has it."""
  name, _, part = key.partition("/")
  curves = [curves_of(run, key) for run in runs]
  title = TITLES.get(name, name.replace("_", " "))
  if unlike and key == "loss":
    curves = [_in_bits_per_byte(run, one) for run, one in zip(runs, curves, strict=True)]
    title += ", bits per byte"
  joined = {one[0][0] for one in curves if one}
  if len(joined) == 1 and (over := joined.pop()):  # in the title in place of each label
    title += f", {over}"
    curves = [[("", points) for _, points in one[:1]] + one[1:] for one in curves]
  lines = []
  for number, (label, one) in enumerate(zip(names, curves, strict=True)):
    if key.startswith("eval_"):
      lines += _evaluations(label, one, number)
    else:
      lines += [Line(label, points, number) for _, points in one]
  if lines:
    title += f": {part}" if part else ""
    yield dataclasses.replace(_chart(name, lines), title=title)


def _in_bits_per_byte(run: Run, curves: Sequence[tuple[str, Points]]) -> list[tuple[str, Points]]:
  """Returns losses per token by the bytes of a token in the run's newest evaluation, if any."""
  newest = run.evaluations[-1] if run.evaluations else {}
  nats, bits = newest.get("eval_loss"), newest.get("eval_bits_per_byte")
  if not is_number(nats) or not is_number(bits) or not nats:
    return []
  return [
    (name, [(step, value * bits / nats) for step, value in points]) for name, points in curves
  ]


def sentence(chart: Chart) -> str:
  """Returns what a chart says that has no curve to draw; "" of any other.

  That is one point of each line, or nothing but zero, as which shares below a hundredth are drawn.
  """
  shown = charts.percent_text if chart.percent else charts.number_text
  happened = any(mark.kind != "checkpoint" for mark in chart.marks)
  if all(len(line.points) == 1 for line in chart.lines) and not happened:
    ends = [(line.label, *line.points[0]) for line in chart.lines]
    texts = [
      f"{shown(value)} after step {step:,}" + (f" ({label})" if label else "")
      for label, step, value in ends
    ]
    return f"{chart.title}: {', '.join(texts)}"
  largest = max(abs(value) for line in chart.lines for _, value in line.points)
  if largest == 0:
    return f"{chart.title}: 0 throughout"
  if chart.percent and largest < charts.SMALLEST_SHARE:
    return f"{chart.title}: at most {shown(largest)}"
  return ""


def _groups(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
  """Yields (chart, its metrics): those with the same name before a slash."""
  keys = dict.fromkeys(key for run in runs for key in run.keys)
  for key, derived in (("peak_bytes", "peak_gib"), ("data_wait_seconds", "input_wait")):
    if key in keys:
      keys[derived] = None
  errors = {log_lines.standard_error(key) for key in keys}
  groups: dict[str, list[str]] = {}
  for key in keys:
    if key not in _NOT_DRAWN and key not in errors:
      groups.setdefault(key.partition("/")[0], []).append(key)
  order = [*TITLES, *groups]
  return sorted(groups.items(), key=lambda item: order.index(item[0]))


def _lines(run: Run, keys: Sequence[str]) -> list[Line]:
  """Returns a line for each metric of a chart; of too many, their median and extremes."""
  found = {key.partition("/")[2] or "all": curves_of(run, key) for key in keys}
  found = {label: curves for label, curves in found.items() if curves}
  if len(found) > MOST_LINES:
    extremes = _extremes([curves[0][1] for curves in found.values()])
    found = {label: [("", points)] for label, points in extremes}
  if not keys[0].startswith("eval_"):
    return [Line(label, curves[0][1], n) for n, (label, curves) in enumerate(found.items())]
  return [
    line
    for number, (label, curves) in enumerate(found.items())
    for line in _evaluations("" if len(found) == 1 else label, curves, number)
  ]


def _evaluations(name: str, curves: Sequence[tuple[str, Points]], color: int) -> list[Line]:
  """Returns the lines of an evaluation's metric, of which only the first joins its points.

  Args:
    name: before what each is over.
    curves: of `Run.curves`.
    color: of all of them.
  """
  return [
    Line(", ".join(filter(None, (name, over))), points, color, dotted=True, joined=not number)
    for number, (over, points) in enumerate(curves)
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
