"""The page of several runs: a row for each, the best first, their curves, and what differs.

The same rows are the table that `report` prints.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath
from markupsafe import Markup

from input_pipeline.text import tokenizer_files
from reports import charts, run_charts, run_page
from reports.html import render
from reports.run_files import CONFIG, TOKENIZER, Points, Run, number
from runtime import units
from training import workdir_files
from training.metrics import log_lines

# Metric -> its title; of these a table has those that its runs have, and orders by the first.
METRICS = {
  "eval_bits_per_byte": "bits per byte",
  "eval_loss": "evaluation loss",
  "eval_accuracy": "accuracy",
  "loss": "training loss",
}
MOST_KEYS = 6  # of a config that have columns
OTHER_KEYS = 4  # of them, where no command has set one that differs
POINTS = 60  # of a sparkline
# Files beside a tokenizer that do not say how texts become tokens.
_NO_TOKENIZER = {CONFIG, "chat_template.json", tokenizer_files.TEMPLATE_FILE}
_NO_TOKENIZER |= {tokenizer_files.GENERATION_FILE, tokenizer_files.CONFIG_FILE}
_SET = re.compile(r"(?<!\S)'?(?:--config\.)?([a-z]\w*(?:\.\w+)*)=")


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell of the table.

  Attributes:
    text: what is shown.
    order: what its column is sorted by; None is last. By default the text.
    more: shown when the pointer is over it.
  """

  text: str
  order: float | str | None = ""
  more: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of the table.

  Attributes:
    title: its head.
    cells: one for each run.
    kind: `number` or `text`.
    rank: by which a terminal too narrow for all leaves columns out, the largest first; None: it
      never has this one.
  """

  title: str
  cells: Sequence[Cell]
  kind: str = "number"
  rank: int | None = 1


def html(
  runs: Sequence[Run],
  *,
  page: epath.Path,
  command: str = "",
  template: str = "runs.html.j2",
  title: str = "",
  **more: Any,
) -> str:
  """Returns the page.

  Args:
    runs: at least one; the curves are of the first that `ordered` gives.
    page: the file that it will be, from which it links to the pages of the runs.
    command: that asked for it.
    template: the page's own, or one that extends it.
    title: by default the names of the runs, or how many there are.
    **more: for the template.
  """
  runs = ordered(runs)
  names, drawn = names_of(runs), runs[: run_charts.MOST_LINES]
  found = run_charts.of_runs(drawn, names[: len(drawn)], unlike=unlike_tokenizers(runs))
  curves, sentences = run_page.drawn_charts(found)
  named = f"Runs: {', '.join(names)}" if len(runs) <= len(drawn) else f"{len(runs)} runs"
  return render(
    template,
    title=title or named,
    command=command,
    columns=[column.title for column in table(runs)],
    kinds=[column.kind for column in table(runs)],
    rows=[
      {
        **{"name": name, "verdict": run_page.verdict(run)[1], "curve": sparkline(_curve(run))},
        **{"link": _link(run, page), "color": place if place < len(drawn) else None},
        "cells": [column.cells[place] for column in table(runs)],
      }
      for place, (name, run) in enumerate(zip(names, runs, strict=True))
    ],
    count=len(drawn),
    unlike=unlike_tokenizers(runs),
    charts=curves,
    sentences=sentences,
    names=names,
    results=_results(runs),
    differences=run_page.differences(runs),
    versions=run_page.version_differences(runs),
    **more,
  )


def names_of(runs: Sequence[Run]) -> list[str]:
  """Returns the folders' names, or their paths where two have the same."""
  names = [run.name for run in runs]
  return names if len({*names}) == len(names) else [run.folder for run in runs]


def ordered(runs: Sequence[Run]) -> list[Run]:
  """Returns the runs by the best value of their first metric, the best first."""
  keys = _metrics(runs)

  def order(run: Run) -> tuple[int, float]:
    for place, key in enumerate(keys):
      if best := _best(run, key):
        return place, -best[1] if key in LARGEST else best[1]
    return len(keys), 0.0

  return sorted(runs, key=order)


def unlike_tokenizers(runs: Sequence[Run]) -> bool:
  """Returns whether runs count in different tokens, so that their losses do not compare."""
  return len({_tokenizer(run) for run in runs if run.points("eval_bits_per_byte")}) > 1


def _tokenizer(run: Run) -> str:
  """Returns a digest of the tokenizer's files in the workdir, or the key of the config."""
  digest, folder = hashlib.sha256(), epath.Path(run.folder) / TOKENIZER
  try:
    names = sorted(path.name for path in folder.iterdir() if path.name not in _NO_TOKENIZER)
    for name in names:
      digest.update((folder / name).read_bytes())
  except OSError:
    names = []
  return digest.hexdigest() if names else str(run.config.get("data.tokenizer"))


# ------------------------------ the table ------------------------------

LARGEST = ("eval_accuracy",)  # of METRICS, whose best value is the largest


def table(runs: Sequence[Run]) -> list[Column]:
  """Returns the columns besides the name: state, metrics, config, time and cost."""
  columns = [
    Column("state", [Cell(state(run), state(run)) for run in runs], "text"),
    Column("step", [Cell(_steps(run), run.done) for run in runs]),
  ]
  for key in _metrics(runs):
    columns.append(
      Column(f"{METRICS[key]}, best", [_metric(run, key, _best) for run in runs], rank=0)
    )
    columns.append(Column("last", [_metric(run, key, _last) for run in runs], rank=None))
  for key, texts in varied(runs):
    columns.append(Column(key, [_value(text) for text in texts], "text", rank=2))
  seconds = [sum(run.times["seconds"].values()) if run.times else None for run in runs]
  columns.append(Column("time", [_timed(units.clock, one) for one in seconds]))
  for title, text, values in (
    ("device hours", "{:,.3g}".format, [_hours(run) for run in runs]),
    ("cost", "{:,.2f}".format, [_cost(run) for run in runs]),
  ):
    if any(value is not None for value in values):
      columns.append(Column(title, [_timed(text, value) for value in values], rank=None))
  return columns


def state(run: Run) -> str:
  """Returns how a run has ended; one that is killed leaves the same files as one that runs."""
  how = str(run.end.get("how")) if run.end else ""
  if run.times is not None and run.times["done"]:
    return "done"
  return how or "running or killed"


def varied(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
  """Returns (key, value of each run) of config keys that differ and that somebody has set.

  Others that differ follow from them. Where no command has set one, they are the first that differ.
  The mesh is one column.
  """
  given = {key for run in runs for key in _given(run)}
  rows = [row for row in run_page.differences(runs) if not row[0].startswith("mesh.")]
  chosen = [row for row in rows if row[0] in given][:MOST_KEYS] or rows[:OTHER_KEYS]
  meshes = [_mesh(run) for run in runs]
  found = [(key, texts) for key, *texts in chosen]
  return [("mesh", meshes), *found] if len({*meshes}) > 1 else found


def _given(run: Run) -> Iterator[str]:
  for one in run.starts:
    yield from _SET.findall(str(one.get("command", "")))


def _mesh(run: Run) -> str:
  sizes = ((key, size) for key, size in run.config.items() if key.startswith("mesh."))
  texts = [f"{key.partition('.')[2]}={size}" for key, size in sizes if size != 1]
  return " x ".join(texts) or "one device"


def _metrics(runs: Sequence[Run]) -> list[str]:
  """Returns which of METRICS the columns have: training losses only where nothing is evaluated."""
  left_out = "eval_loss" if unlike_tokenizers(runs) else "eval_bits_per_byte"
  found = [key for key in METRICS if any(run.points(key) for run in runs) and key != left_out]
  return found[:-1] if all(run.evaluations for run in runs) and len(found) > 1 else found


def _best(run: Run, key: str) -> tuple[float, float] | None:
  choose = max if key in LARGEST else min
  return choose(run.points(key), key=lambda point: point[1], default=None)


def _last(run: Run, key: str) -> tuple[float, float] | None:
  return run.points(key)[-1] if run.points(key) else None


def _metric(run: Run, key: str, choose: Callable) -> Cell:
  found = choose(run, key)
  if found is None:
    return Cell("", None)
  step, value = found
  text = units.percent(value) if key == "eval_accuracy" else f"{value:.4f}"
  lines = [one for one in run.evaluations if (one["step"], one.get(key)) == found]
  error = number(lines[-1].get(log_lines.standard_error(key))) if lines else None
  over = f", {log_lines.examples_text(lines[-1])}" if lines else ""
  return Cell(text + (f" ± {error:.4f}" if error else ""), value, f"after step {step:,}{over}")


def _value(text: str) -> Cell:
  try:
    return Cell(text, float(text))
  except ValueError:
    return Cell(text, text)


def _steps(run: Run) -> str:
  return f"{run.done:,}" + (f" of {run.total:,}" if run.total else "")


def _timed(text: Callable[[float], str], value: float | None) -> Cell:
  return Cell("", None) if value is None else Cell(text(value), value)


def _hours(run: Run) -> float | None:
  """Returns hours times devices; None of simulated ones, which share a machine."""
  newest: Mapping = run.starts[-1] if run.starts else {}
  devices = number(newest.get("devices"))
  if run.times is None or devices is None or newest.get("simulated"):
    return None
  return sum(run.times["seconds"].values()) * devices / 3600


def _cost(run: Run) -> float | None:
  price, hours = number(run.config.get("planning.price_per_chip_hour")), _hours(run)
  return price * hours if price and hours is not None else None


def terminal(runs: Sequence[Run], width: int) -> str:
  """Returns the table as text: the name of each run, and the columns that fit."""
  runs = ordered(runs)
  names = Column("run", [Cell(name) for name in names_of(runs)], "text", rank=-1)
  columns = [one for one in (names, *table(runs)) if one.rank is not None]
  texts = {
    place: [one.title, *(cell.text for cell in one.cells)] for place, one in enumerate(columns)
  }
  widths = {place: max(map(len, some)) for place, some in texts.items()}
  kept, used = [], -2
  for place in sorted(widths, key=lambda place: columns[place].rank):
    if not kept or used + 2 + widths[place] <= width:
      kept.append(place)
      used += 2 + widths[place]
  pads = {"text": str.ljust, "number": str.rjust}
  rows = zip(
    *([pads[columns[n].kind](text, widths[n]) for text in texts[n]] for n in sorted(kept)),
    strict=True,
  )
  return "\n".join("  ".join(row).rstrip() for row in rows)


# ------------------------------ the rest of the page ------------------------------


def _link(run: Run, page: epath.Path) -> str:
  """Returns where a run's page is, as seen from another page; "" where there is none."""
  file = epath.Path(run.folder) / workdir_files.REPORT
  if not file.exists():
    return ""
  if "://" in str(file) or "://" in str(page):
    return str(file)
  return os.path.relpath(file, page.parent)


def _curve(run: Run) -> Points:
  """Returns the points of a run's evaluations that compare, or of its training loss."""
  curves = [points for key in ("eval_loss", "loss") for _, points in run.curves(key)[:1]]
  return next((points for points in curves if len(points) > 1), [])


def sparkline(points: Points) -> Markup:
  """Returns a small curve without axes; "" of fewer than two points."""
  if len(points) < 2:
    return Markup("")
  xs, ys = zip(*charts.thinned(points, POINTS), strict=True)
  wide, high = (xs[-1] - xs[0]) or 1, (max(ys) - min(ys)) or 1
  places = (
    f"{96 * (x - xs[0]) / wide + 2:.1f},{18 - 16 * (y - min(ys)) / high:.1f}"
    for x, y in zip(xs, ys, strict=True)
  )
  return Markup('<svg viewBox="0 0 100 20"><polyline points="{}"/></svg>').format(" ".join(places))


def _results(runs: Sequence[Run]) -> list[list[str]]:
  """Returns the table of the last values, a column for each run."""
  keys = dict.fromkeys(key for run in runs for key in run.keys if "/" not in key)
  last = [{key: run.points(key)[-1][1] for key in keys if run.points(key)} for run in runs]
  rows = [["starts", *(f"{len(run.starts) or ''}" for run in runs)]]
  rows += [[key, *(units.plain(one[key]) if key in one else "" for one in last)] for key in keys]
  shares = (units.percent(run.times["goodput"]) if run.times else "" for run in runs)
  return [*rows, ["goodput", *shares]]
