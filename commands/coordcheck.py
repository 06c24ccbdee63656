"""The verb `coordcheck`: whether activations are as large at every width of the model."""

import io
import itertools
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from commands import build, flags, preflight_facts
from configs.schema import finalize, validate
from partitioning.mesh_sizes import mesh_text
from processes.watchdog import STARTING, Watchdog
from reports.drawings import plain
from reports.layout_text import plain_table
from runtime import exit_codes
from runtime.devices import Devices
from training import coordinate_check, splits
from training.coordinate_check import BOUND, Point, Slope
from training.metrics.console import say
from training.setup import Job


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Trains the config's model at several widths, and reports how activations depend on them."""
  config, steps = flags.CONFIG.value, flags.STEPS.value
  [its_devices] = build.start_devices(config)
  resolved = finalize.finalize(config, its_devices.platform, its_devices.sizes)
  validate.check(resolved, its_devices.sizes)
  sections = resolved.model, resolved.lora, resolved.task
  coordinate_check.check(*sections, steps=steps, sizes=its_devices.sizes)
  at = coordinate_check.widths(resolved.model, flags.WIDTHS.value)
  jobs = [_job(config, resolved, width, its_devices) for width in at]
  shared = splits.sharing(jobs[0].config.processes.start_timeout_seconds)
  batches = splits.training_batches(jobs[0].config, shared)
  file = flags.output_file(flags.SVG)
  preflight_facts.about_to_run(jobs[0], {"train": batches.source}, flags.workdir(), writes=False)

  def run() -> int:
    trained = []
    for width, job in zip(at, jobs, strict=True):

      def said(what: str, width: int = width) -> None:
        watch.at(f"width {width}: {what}", STARTING)

      placed = job.batch_shardings
      one = coordinate_check.train(
        job, lambda step, placed=placed: batches.batch(step, placed), steps, said=said
      )
      trained.append(one)
    found = coordinate_check.slopes(coordinate_check.points(trained), at)
    say(text(jobs, found))
    if file and not flags.write_output(flags.SVG, svg(jobs, found)):
      return exit_codes.FAILED
    flat = all(one.flat for one in found)
    return exit_codes.DONE if flat else exit_codes.CHECK_FAILED

  return run


def _job(config: ConfigDict, resolved: ConfigDict, width: int, its_devices: Devices) -> Job:
  """Returns the job of a width; its refusals say which width it is."""
  try:
    return build.job(coordinate_check.of_width(config, resolved, width), its_devices)
  except ValueError as error:
    raise ValueError(f"at width {width}: {error}") from error


# ------------------------------ as text ------------------------------

# key of `model` -> how it is called, in the line of a width.
_SIZES = {"feedforward_size": "feed-forward {}", "heads": "{} heads", "head_size": "of {}"}


def text(jobs: Sequence[Job], found: Sequence[Slope], bound: float = BOUND) -> str:
  """Returns what was trained, the two tables, and the verdict.

  Args:
    jobs: of each width.
    found: of `coordinate_check.slopes`.
    bound: of a slope that counts as flat.
  """
  config, point = jobs[0].config, found[0].point
  widths, steps, seeds = width_texts(jobs), len(point.sizes) - 1, point.sizes.shape[2]
  lines = [
    mesh_text(jobs[0].devices.sizes, jobs[0].devices.slices),
    f"{parametrization(config.model)}; {steps} steps of {config.optimizer.name} at "
    f"{config.optimizer.learning_rate:g} from {seeds} initializations",
    *(
      f"width {width}: {_sizes(job.config.model)}" for width, job in zip(widths, jobs, strict=True)
    ),
  ]
  titles = {False: "size at initialization", True: f"change after {steps} steps"}
  for change, title in titles.items():
    table = plain_table(title)
    for column in (*widths, "slope"):
      table.add_column(column, justify="right")
    table.add_column("")
    for one in (one for one in found if one.change == change):
      values = np.mean(one.point.changes[-1] if change else one.point.sizes[0], axis=1)
      mark = "" if one.flat else "not flat"
      table.add_row(one.point.name, *(f"{x:.3g}" for x in values), slope_text(one.value), mark)
    lines += ["", plain(table)]
  return "\n".join([*lines, "", verdict(found, steps, bound)])


def parametrization(model: ConfigDict) -> str:
  """Returns how a model is parametrized."""
  base = model.base_width if "base_width" in model else 0
  return f"muP, base width {base}" if base else "without muP (model.base_width=0)"


def slope_text(value: float) -> str:
  """Returns `+0.50`; 0 is `+0.00` from either side."""
  return f"{round(value, 2) + 0.0:+.2f}"


def width_texts(jobs: Sequence[Job]) -> list[str]:
  """Returns the width of each job."""
  return [str(job.config.model.model_size) for job in jobs]


def verdict(found: Sequence[Slope], steps: int, bound: float = BOUND) -> str:
  """Returns whether all is flat, and else what is not."""
  wrong = [one for one in found if not one.flat]
  if not wrong:
    both = [one for one in found if one.point.wide or not one.change]
    most = max(both, key=lambda one: one.value)
    return (
      f"flat: {len(found) // 2} activations, no slope beyond {bound:g}; the largest is "
      f"{slope_text(most.value)} ({_what(most, steps)})"
    )
  lines = [f"  {_what(one, steps)}: as width ** {one.value:.2f}" for one in wrong]
  return "\n".join(
    [
      f"not flat: {len(wrong)} of {len(found)} slopes are beyond {bound:g}, so a learning rate of "
      f"one width is not that of another:",
      *lines,
    ]
  )


def _what(one: Slope, steps: int) -> str:
  return f"{one.point.name}, {f'change after {steps} steps' if one.change else 'initial size'}"


def _sizes(model: ConfigDict) -> str:
  parts = [form.format(model[key]) for key, form in _SIZES.items() if key in model]
  return ", ".join(parts).replace("heads, of", "heads of")


# ------------------------------ as SVG ------------------------------

COLUMNS = 4
INK, FAINT, BAD = "#24292f", "#d0d7de", "#bc4c00"
FIRST, LAST = (0.69, 0.82, 0.96), (0.04, 0.41, 0.85)  # colors of the first step and of the last
# A white card with dark ink, so that it is legible on light and dark pages.
STYLE = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "meshwright",  # ids are the same each time
  "font.family": "sans-serif",
  "font.size": 9,
  "axes.titlesize": 9,
  "axes.edgecolor": FAINT,
  "text.color": INK,
}


def svg(jobs: Sequence[Job], found: Sequence[Slope]) -> str:
  """Returns the picture: a line per step, of the change of an activation since initialization.

  Both axes are logarithmic, and all panels have the same: flat lines are what muP is for.

  Args:
    jobs: of each width.
    found: of `coordinate_check.slopes`.
  """
  changes = [one for one in found if one.change]
  widths, steps = [*map(int, width_texts(jobs))], len(changes[0].point.changes) - 1
  rows = -(-len(changes) // COLUMNS)
  config, file = jobs[0].config, io.StringIO()
  title = f"{parametrization(config.model)}: changes of activations over the width"
  under = (
    f"root mean square after steps 1 (light) to {steps} (dark) of {config.optimizer.name} at "
    f"{config.optimizer.learning_rate:g}"
  )
  with matplotlib.rc_context(STYLE):
    figure = Figure(figsize=(8.4, 0.9 + 1.7 * rows), layout="constrained")
    figure.suptitle(f"{title}\n{under}", x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axes, one in itertools.zip_longest(panels.flat, changes):
      if one is None:
        axes.set_visible(False)
        continue
      axes.set_title(one.point.name, loc="left", weight="bold")
      color = INK if one.flat else BAD
      axes.set_title(f"slope {slope_text(one.value)}", loc="right", color=color)
      axes.grid(axis="y", color=FAINT, linewidth=0.7)
      axes.set(xscale="log", yscale="log")
      axes.set_xticks(widths, [*map(str, widths)])
      axes.tick_params(which="both", length=0, labelbottom=True)
      axes.minorticks_off()
      axes.yaxis.set_major_formatter("{x:g}")
      for number, values in enumerate(_means(one.point)[1:]):
        axes.plot(widths, values, color=_color(number / max(1, steps - 1)), linewidth=1.8)
    figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
  return file.getvalue()


def _means(point: Point) -> np.ndarray:
  """Returns [steps + 1, widths]: the geometric mean over the initializations; NaN if not finite."""
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    found = np.exp(np.mean(np.log(point.changes), axis=2))
  return np.where(np.isfinite(found) & (found > 0), found, np.nan)


def _color(share: float) -> tuple[float, ...]:
  return tuple(a + (b - a) * share for a, b in zip(FIRST, LAST, strict=True))
