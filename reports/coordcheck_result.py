"""The result of `coordcheck` as text and as SVG: each activation, its change over the width."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np
from ml_collections import ConfigDict

from partitioning.mesh_sizes import mesh_text
from reports.drawings import plain
from reports.layout_text import plain_table
from training.coordinate_check import BOUND, Point, Slope
from training.setup import Job

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
    f"{parametrization(config)}; {steps} steps of {config.optimizer.name} at "
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


def parametrization(config: ConfigDict) -> str:
  """Returns how the model is parametrized."""
  base = config.model.base_width if "base_width" in config.model else 0
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

# Pixels. The card is white with dark ink, so that it is legible on light and dark pages.
PANEL, GAP, LEFT, TOP, BOTTOM, ROW = (168, 116), 22, 46, 64, 34, 62
COLUMNS = 4
INK, FAINT, BAD = "#24292f", "#d0d7de", "#bc4c00"
FIRST, LAST = (176, 208, 244), (9, 105, 218)  # colors of the first step and of the last


def svg(jobs: Sequence[Job], found: Sequence[Slope]) -> str:
  """Returns the picture: a line per step, of the change of an activation since initialization.

  Both axes are logarithmic, and all panels have the same: flat lines are what muP is for.

  Args:
    jobs: of each width.
    found: of `coordinate_check.slopes`.
  """
  changes = [one for one in found if one.change]
  at, steps = width_texts(jobs), len(changes[0].point.changes) - 1
  values = [_means(one.point)[1:] for one in changes]
  low, high = _decades(np.concatenate([np.ravel(x) for x in values]))
  rows = -(-len(changes) // COLUMNS)
  width = LEFT + COLUMNS * (PANEL[0] + GAP)
  height = TOP + rows * (PANEL[1] + ROW) - ROW + BOTTOM + 8
  title = f"{parametrization(jobs[0].config)}: changes of activations over the width"
  config = jobs[0].config
  under = (
    f"root mean square after steps 1 (light) to {steps} (dark) of {config.optimizer.name} at "
    f"{config.optimizer.learning_rate:g}"
  )
  parts = [
    f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#fff" '
    f'stroke="{FAINT}"/>',
    _text(16, 24, title, 'font-weight="600"'),
    _text(16, 42, under),
  ]
  for number, (one, lines) in enumerate(zip(changes, values, strict=True)):
    x = LEFT + (number % COLUMNS) * (PANEL[0] + GAP)
    y = TOP + (number // COLUMNS) * (PANEL[1] + ROW) + 14
    parts += _panel(one, lines, (x, y), at, (low, high), ticks=number % COLUMNS == 0)
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    f'height="{height}" font-family="system-ui,sans-serif" font-size="12" fill="{INK}" role="img">'
    f"<title>{escape(title)}</title>{''.join(parts)}</svg>\n"
  )


def _means(point: Point) -> np.ndarray:
  """Returns [steps + 1, widths]: the geometric mean over the initializations; NaN if not finite."""
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    found = np.exp(np.mean(np.log(point.changes), axis=2))
  return np.where(np.isfinite(found) & (found > 0), found, np.nan)


def _decades(values: np.ndarray) -> tuple[int, int]:
  """Returns the powers of ten between which all values are."""
  known = np.log10(values[np.isfinite(values)])
  if not known.size:
    return 0, 1
  low, high = math.floor(known.min()), math.ceil(known.max())
  return low, max(high, low + 1)


def _panel(
  one: Slope,
  lines: np.ndarray,
  corner: tuple[float, float],
  at: Sequence[str],
  decades: tuple[int, int],
  *,
  ticks: bool,
) -> list[str]:
  """Returns the parts of a panel: frame, one line per step, its name and slope."""
  (left, top), (width, height) = corner, PANEL
  low, high = decades
  logs = np.log(np.array([int(one) for one in at]))
  xs = left + width * (0.06 + 0.88 * (logs - logs[0]) / (logs[-1] - logs[0]))
  parts = [_text(left, top - 6, one.point.name, 'font-weight="600"')]
  color = INK if one.flat else BAD
  slope = f"slope {slope_text(one.value)}"
  parts.append(_text(left + width, top - 6, slope, f'text-anchor="end" fill="{color}"'))
  for power in range(low, high + 1):
    y = top + height * (high - power) / (high - low)
    parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{FAINT}" stroke-width=".7"/>')
    if ticks:
      parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", 'text-anchor="end"'))
  for x, name in zip(xs, at, strict=True):
    parts.append(_text(x, top + height + 16, name, 'text-anchor="middle"'))
  for number, values in enumerate(lines):
    points = [
      f"{x:.1f} {top + height * (high - math.log10(value)) / (high - low):.1f}"
      for x, value in zip(xs, values, strict=True)
      if math.isfinite(value)
    ]
    if points:
      stroke = _color(number / max(1, len(lines) - 1))
      path = f'<path d="M{"L".join(points)}" fill="none" stroke="{stroke}" stroke-width="1.8"/>'
      parts.append(path)
  return parts


def _color(share: float) -> str:
  mixed = (round(a + (b - a) * share) for a, b in zip(FIRST, LAST, strict=True))
  return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
