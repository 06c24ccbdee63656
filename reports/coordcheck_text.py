"""The result of `coordcheck` as text: a row per activation, a column per width, and the verdict."""

from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from partitioning.mesh_sizes import mesh_text
from reports.drawings import plain
from reports.layout_text import plain_table
from training.coordinate_check import BOUND, Slope
from training.setup import Job

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
