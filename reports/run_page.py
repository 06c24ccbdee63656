"""The page of a run, `run.html`, from the files of its workdir.

`python -m reports.run_page WORKDIR NICENESS` prints it: a training run has another process do that,
which does not import JAX.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from reports import charts, run_charts, run_files, run_sections
from reports.html import render
from reports.run_files import Run
from reports.run_sections import Section
from runtime import units
from training.metrics import log_lines

# What follows the charts, in this order: functions that return a section of the page, or None where
# a run has nothing for it. The macro of a section is in templates/run_sections.html.j2.
SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
  run_sections.samples,
  run_sections.goodput,
  run_sections.step_time,
  run_sections.memory,
  run_sections.layout,
  run_sections.pipeline,
  run_sections.starts,
  run_sections.checkpoints,
  run_sections.bad_steps,
  run_sections.commands,
  run_sections.configuration,
)
ROWS = 200  # of a table of numbers


def html(run: Run, *, command: str = "") -> str:
  """Returns the page of a run; `command` asked for it."""
  good, text = verdict(run)
  drawn, sentences = drawn_charts(run_charts.of_run(run))
  return render(
    "run.html.j2",
    title=f"Run: {run.name}",
    command=command,
    good=good,
    verdict=text,
    facts=_facts(run),
    charts=drawn,
    sentences=sentences,
    marks=sorted({mark.kind for mark in run_charts.marks_of(run)}),
    tables=[*_numbers(run)],
    damaged=run.damaged,
    sections=[section for make in SECTIONS if (section := make(run)) is not None],
  )


def verdict(run: Run) -> tuple[str, str]:
  """Returns "good", "bad" or "", and one sentence: how far the run is, and how well."""
  total = f" of {run.total:,}" if run.total else ""
  end = run.end
  how = end.get("how") if end else ""
  if how == "done" or (run.times is not None and run.times["done"]):
    good, text = "good", f"Done: {run.done:,}{total} steps"
  elif how == "failed":
    good, text = "bad", f"Failed after step {run.done:,}{total} ({end.get('why', '')})"
  elif how == "stopped":
    good, text = "", f"Stopped after step {run.done:,}{total}; the same command resumes"
  else:
    good, text = "", f"Step {run.done:,}{total} when this page was written"
  results = [*_result_texts(run)]
  if run.times is not None:
    seconds = sum(run.times["seconds"].values())
    share = units.percent(run.times["goodput"])
    results.append(f"goodput {share} of {units.clock(seconds)}{_over_starts(run)}")
  return good, f"{text}. {'; '.join(results).capitalize()}." if results else f"{text}."


def _over_starts(run: Run) -> str:
  count = len(run.starts)
  return f" over {count} starts" if count > 1 else ""


def _result_texts(run: Run) -> Iterator[str]:
  if points := run.points("eval_loss"):
    more = []
    for key, name in (("eval_bits_per_byte", "bits per byte"), ("eval_accuracy", "accuracy")):
      if values := run.points(key):
        shown = units.percent(values[-1][1]) if name == "accuracy" else f"{values[-1][1]:.3f}"
        more = [f"{shown} {name}"]
    if over := log_lines.examples_text(run.evaluations[-1]):
      more.append(over)
    yield f"evaluation loss {points[-1][1]:.4f}{_error(run, 'eval_loss')}" + (
      f" ({', '.join(more)})" if more else ""
    )
  elif points := run.points("loss"):
    yield f"training loss {points[-1][1]:.4f}"


def _error(run: Run, key: str) -> str:
  """Returns ` ± 0.0123`, the standard error of the newest evaluation; "" where it has none."""
  error = run_files.number(run.evaluations[-1].get(log_lines.standard_error(key)))
  return f" ± {error:.4f}" if error else ""


def _facts(run: Run) -> list[tuple[str, str]]:
  """Returns (name, value) of the numbers that matter most."""
  last = {key: points[-1][1] for key in run.keys if (points := run.points(key))}
  speed = run.median_of_last_start(f"{run.unit}_per_second")
  facts = [
    ("step", f"{run.done:,}" + (f" of {run.total:,}" if run.total else "")),
    ("training loss", _shown(last.get("loss"), "{:.4f}")),
    ("evaluation loss", _shown(last.get("eval_loss"), "{:.4f}")),
    ("bits per byte", _shown(last.get("eval_bits_per_byte"), "{:.3f}")),
    ("accuracy", _shown(last.get("eval_accuracy"), "{:.1f} %")),
    (f"{run.unit} per second", _shown(speed, "{:,.0f}")),
    ("MFU", _shown(run.median_of_last_start("mfu"), "{:.1f} %")),
    ("goodput", _shown(run.times and run.times["goodput"], "{:.1f} %")),
    ("starts", f"{len(run.starts)}" if run.starts else ""),
  ]
  return [(name, text) for name, text in facts if text]


def _shown(value: float | None, form: str) -> str:
  """Returns a number by a format; a share of 1 where the format has a percent sign."""
  if value is None:
    return ""
  return form.format(100 * value if form.endswith("%") else value)


def drawn_charts(
  found: Sequence[tuple[str, charts.Chart]],
) -> tuple[list[dict[str, Any]], list[str]]:
  """Returns the charts that have a curve, and sentences in place of the others."""
  sentences = {name: run_charts.sentence(chart) for name, chart in found}
  drawn = [_drawn(name, chart) for name, chart in found if not sentences[name]]
  return drawn, [*filter(None, sentences.values())]


def _drawn(name: str, chart: charts.Chart) -> dict[str, Any]:
  """Returns what the template needs; the loss is drawn twice, for wide screens and narrow ones."""
  prefix = f"chart-{''.join(c if c.isalnum() else '-' for c in name)}"
  drawn: dict[str, Any] = {
    "title": chart.title,
    "data": charts.data(chart),
    "narrow": charts.svg(chart, name=prefix),
    "lines": _legend(chart.lines) if len(chart.lines) > 1 else [],
    "wide": Markup(""),
  }
  if name == "loss":
    drawn["wide"] = charts.svg(chart, name=f"{prefix}-wide", wide=True)
  return drawn


def _legend(lines: Sequence[charts.Line]) -> list[dict[str, Any]]:
  """Returns label, color and shape of each line; of diamonds in several colors one for all."""
  apart = {line.color for line in lines if not line.joined}
  found = [
    {
      **{"label": line.label, "color": line.color % len(charts.SERIES)},
      **{"joined": line.joined, "numbers": [number]},
    }
    for number, line in enumerate(lines)
    if line.joined or len(apart) == 1
  ]
  if len(apart) > 1:
    numbers = [number for number, line in enumerate(lines) if not line.joined]
    other = {"label": "evaluated on other examples", "color": None, "joined": False}
    found.append({**other, "numbers": numbers})
  return found


def _numbers(run: Run) -> Iterator[dict[str, Any]]:
  """Yields the tables of numbers: of steps, and of evaluations."""
  for title, lines in (("steps", run.steps), ("evaluations", run.evaluations)):
    if not lines:
      continue
    kept = [lines[place] for place in run_sections.evenly(len(lines), ROWS)]
    keys = [key for key in dict.fromkeys(key for one in kept for key in one) if key != "step"]
    yield {
      "title": title,
      "shown": len(kept),
      "count": len(lines),
      "heads": ["step", *keys],
      "rows": [
        [f"{one['step']:,}", *(units.plain(one.get(key, "")) for key in keys)] for one in kept
      ],
    }


def main(arguments: Sequence[str]) -> int:
  """Prints the page of a workdir, at a lower priority; returns the exit code."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the run
  workdir, niceness = arguments
  os.nice(int(niceness))
  sys.stdout.buffer.write(html(run_files.read(workdir)).encode())
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
