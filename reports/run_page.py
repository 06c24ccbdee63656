"""The page of a run, `run.html`, from the files of its workdir.

`python -m reports.run_page WORKDIR NICENESS` prints it: a training run has another process do that,
which does not import JAX.
"""

import datetime
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from input_pipeline import catalog
from partitioning.parallel.pipeline_schedule import Schedule
from reports import charts, pipeline_picture, run_charts, run_files
from reports.html import memory_bar, render
from reports.run_files import Run, number
from runtime import units
from training import history
from training.metrics import log_lines
from training.metrics.goodput import BINS

SAMPLES = 8  # that are shown
CHECKPOINTS = 40  # steps that are listed


def evenly(count: int, most: int) -> list[int]:
  """Returns at most `most` of the places 0 to count - 1, evenly spaced from first to last."""
  if count <= most:
    return [*range(count)]
  return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def goodput(run: Run) -> Mapping[str, Any] | None:
  """Returns where the time went, over all starts, as one bar."""
  if run.times is None:
    return None
  seconds = run.times["seconds"]
  whole = sum(seconds.values()) or 1.0
  parts = [
    {
      "name": BINS.get(name, name),
      "text": units.clock(value) if value >= 60 else units.seconds(value),
      "share": units.percent(value / whole),
      "percent": round(100 * value / whole, 3),
      "number": number,
    }
    for number, (name, value) in enumerate(
      sorted(seconds.items(), key=lambda one: one[0] != "step")  # whose share is the goodput
    )
  ]
  many = f"{len(run.starts)} starts" if len(run.starts) > 1 else "one start"
  title = (
    f"{units.clock(whole)} from the first start on, over {many}" if run.starts else "all starts"
  )
  return {"parts": parts, "title": title}


def step_time(run: Run) -> Mapping[str, Any] | None:
  """Returns measured and predicted step time, and the collectives by axis."""
  if not (compiled := run.events(history.COMPILED)):
    return None
  event = compiled[-1]
  predicted = event.get("predicted") or {}
  measured = run.median_of_last_start("step_seconds")
  expected = predicted.get("step_seconds") or ()
  names = ("predicted, low", "predicted, expected", "predicted, high")
  rows = dict(zip(names, expected, strict=False))
  if measured is not None:
    rows["measured, median since the newest start"] = measured
  most, ratio = max(rows.values(), default=0.0), ""
  if measured and expected:
    ratio = f"The measured step takes {measured / expected[1]:.3g} times the predicted one."
  costs = {(one["axis"], one["kind"]): one for one in predicted.get("sent", ())}

  def numbers(one: Mapping[str, Any]) -> list[str]:
    cost = costs.get((one["axis"], one["kind"]))
    times = (cost["seconds"], cost["exposed"]) if cost else ()
    shown = [f"{one['runs']:,}", units.size(one["bytes"]), *map(units.seconds, times)]
    return shown if times else [*shown, "", ""]

  return {
    "times": [
      {"name": name, "text": units.seconds(value), "percent": round(100 * value / most, 2)}
      for name, value in rows.items()
      if most
    ],
    "ratio": ratio,
    "collectives": [
      {"axis": one["axis"], "kind": one["kind"], "numbers": numbers(one)}
      for one in event.get("collectives", ())
    ],
    **{key: predicted.get(key, "") for key in ("topology", "accuracy", "missing")},
  }


def memory(run: Run) -> Mapping[str, Any] | None:
  """Returns the memory of a device: what is stored, the compiler's peak, the measured one."""
  compiled = run.events(history.COMPILED)[-1:]
  predicted = (compiled[0].get("predicted") or {}) if compiled else {}
  stored = (run.layout or {}).get("bytes_per_device", {})
  peak, limit = number(predicted.get("peak_bytes")), number(predicted.get("limit_bytes"))
  measured = max((value for _, value in run.points("peak_bytes")), default=None)
  if not stored and peak is None and measured is None:
    return None
  parts = {name: float(size) for name, size in stored.items()}
  if peak is not None and peak > sum(parts.values()):
    parts["activations and temporaries, by the compiler"] = peak - sum(parts.values())
  simulated = bool(run.starts and run.starts[-1].get("simulated"))
  sums = [("peak, by the compiler", peak), ("peak, measured", measured)]
  sums.append(("memory of a device" + (", assumed" if simulated else ""), limit))
  return {
    "bar": memory_bar(parts, limit, measured),
    "sums": [(name, units.size(size)) for name, size in sums if size is not None],
    "measured": measured is not None,
  }


def layout(run: Run) -> Mapping[str, Any] | None:
  """Returns the mesh and how the largest parameters are sharded over it."""
  if run.layout is None:
    return None
  sizes = run.layout["bytes_per_device"]
  held = sum(size for name, size in sizes.items() if name != "batch")
  text = (
    f"{run.layout['parameters']:,} parameters; with optimizer state {units.size(held)} per device, "
    f"of which {units.size(run.layout['replicated_bytes'])} are replicated on every device."
  )
  return {**run.layout, "text": text}


def pipeline(run: Run) -> Mapping[str, Any] | None:
  """Returns the schedule of the pipeline's stages; None without a pipeline."""
  if not (values := dict((run.layout or {}).get("pipeline") or {})):
    return None
  layers = values.pop("layers")
  return pipeline_picture.for_page(Schedule(**values), layers)


def samples(run: Run) -> Mapping[str, Any] | None:
  """Returns what the model has written over time."""
  drawn = run.of_steps(history.SAMPLE)
  if not drawn:
    return None
  kept = [drawn[place] for place in evenly(len(drawn), SAMPLES)]
  rows = [
    {"step": f"{one['step']:,}", **{key: str(one.get(key, "")) for key in ("prompt", "text")}}
    for one in kept
  ]
  return {"rows": rows, "count": len(drawn)}


def starts(run: Run) -> Mapping[str, Any] | None:
  """Returns the starts of the run: when, from which step, on what, how each ended."""
  rows, before = [], {}
  for place, one in enumerate(run.history):
    if one["event"] != history.START:
      continue
    versions = one.get("versions") or {}
    changed = [key for key in {**before, **versions} if before.get(key) != versions.get(key)]
    mesh = " x ".join(f"{axis}={size}" for axis, size in (one.get("mesh") or {}).items())
    kind = "simulated CPU devices" if one.get("simulated") else one.get("device_kind", "")
    rows.append(
      [
        str(len(rows) + 1),
        time_text(one["time"]),
        f"{one['step']:,}",
        f"{one.get('devices', '')} x {kind}, {mesh or 'one device'}",
        str(one.get("processes", "")),
        _ending(run, place),
        ", ".join(changed) if before and changed else "",
      ]
    )
    before = versions
  return {"rows": rows} if rows else None


def _ending(run: Run, place: int) -> str:
  """Returns how the start at a place of the history has ended."""
  for one in run.history[place + 1 :]:
    if one["event"] == history.END:
      return f"{one.get('how', '')} at step {one['step']:,}"
    if one["event"] == history.START:
      return "killed"
  return "not ended when this page was written"


def time_text(seconds: float) -> str:
  """Returns a time in UTC."""
  moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
  return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def checkpoints(run: Run) -> Mapping[str, Any] | None:
  """Returns which steps were saved, and which of them are there."""
  if not run.saved:
    return None
  kept = [f"{run.saved[place]:,}" for place in evenly(len(run.saved), CHECKPOINTS)]
  on_disk = [f"{step:,}" for step in run.on_disk[-CHECKPOINTS:]]
  return {"saved": kept, "count": len(run.saved), "on_disk": on_disk}


def bad_steps(run: Run) -> Mapping[str, Any] | None:
  """Returns the bad steps, and where the run was rolled back to."""
  back = {one["rolled_back"]: one for one in run.rollbacks}
  rows = []
  for step, why in run_charts.bad_steps(run):
    to = back.get(step)
    skipped = to.get("skipped_rows", ()) if to else ()
    ranges = ", ".join(f"{first:,} to {last:,}" for first, last in skipped)
    rows.append([f"{step:,}", why, f"{to['step']:,}" if to else "", ranges])
  return {"rows": rows} if rows else None


def configuration(run: Run) -> Mapping[str, Any] | None:
  """Returns the resolved config, and the versions of the newest start."""
  if not run.config:
    return None
  rows = [(key, value_text(value)) for key, value in run.config.items()]
  versions = run.starts[-1].get("versions", {}) if run.starts else {}
  return {"rows": rows, "versions": versions}


def value_text(value: Any) -> str:
  """Returns a value of a config."""
  return "unset" if value is None else str(value)


def differences(runs: Sequence[Run]) -> list[list[str]]:
  """Returns (key, value of each run) of the keys whose values differ."""
  keys = dict.fromkeys(key for run in runs for key in run.config)
  rows = [
    [key, *(value_text(run.config[key]) if key in run.config else "no such key" for run in runs)]
    for key in keys
  ]
  return [row for row in rows if len({*row[1:]}) > 1]


def version_differences(runs: Sequence[Run]) -> list[list[str]]:
  """Returns likewise the versions of the newest starts."""
  known = [(run.starts[-1].get("versions") or {}) if run.starts else {} for run in runs]
  keys = dict.fromkeys(key for one in known for key in one)
  rows = [[key, *(str(one.get(key, "unknown")) for one in known)] for key in keys]
  return [row for row in rows if len({*row[1:]}) > 1]


def commands_of_run(run: Run) -> list[tuple[str, str]]:
  """Returns (what it does, command) of what a run's page offers; the folder stands for the run."""
  longer = f"train {{}} training.steps={2 * max(run.done, run.total)}"
  resume = ("resume", "train {}") if run.done < run.total else ("train for longer", longer)
  chat = " --chat" * (run.config.get("data.name") == catalog.CONVERSATIONS)
  sample = [("sample", f"sample {{}}{chat}")] if run.unit == "tokens" else []
  offered = [resume, ("evaluate", "evaluate {}"), *sample]
  offered += [("this page", "report {}"), ("compare", "report {} OTHER_RUN")]
  folder = shlex.quote(run.folder)
  return [(what, f"python main.py {command.format(folder)}") for what, command in offered]


def commands(run: Run) -> Mapping[str, Any]:
  """Returns the section of the commands."""
  return {"commands": commands_of_run(run)}


# ------------------------------ the page ------------------------------

# What follows the charts, in this order: heading -> function that returns the values of its macro,
# which has its name in templates/run_sections.html.j2, or None where a run has nothing for it.
SECTIONS: dict[str, Callable[[Run], Mapping[str, Any] | None]] = {
  "Samples": samples,
  "Where the time went": goodput,
  "Step time and collectives": step_time,
  "Memory of a device": memory,
  "Mesh and layout": layout,
  "Pipeline": pipeline,
  "Starts": starts,
  "Checkpoints": checkpoints,
  "Bad steps": bad_steps,
  "Commands": commands,
  "Config and versions": configuration,
}
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
    sections=[
      (title, make.__name__, values)
      for title, make in SECTIONS.items()
      if (values := make(run)) is not None
    ],
  )


def verdict(run: Run) -> tuple[str, str]:
  """Returns "good", "bad" or "", and one sentence: how far the run is, and how well."""
  steps = f"{run.done:,}" + (f" of {run.total:,}" if run.total else "")
  how = run.end.get("how") if run.end else ""
  if how == "done" or (run.times is not None and run.times["done"]):
    good, text = "good", f"Done: {steps} steps"
  elif how == "failed":
    good, text = "bad", f"Failed after step {steps} ({run.end.get('why', '')})"
  elif how == "stopped":
    good, text = "", f"Stopped after step {steps}; the same command resumes"
  else:
    good, text = "", f"Step {steps} when this page was written"
  results = [_result_text(run)] if run.points("loss") or run.points("eval_loss") else []
  if run.times is not None:
    seconds, count = sum(run.times["seconds"].values()), len(run.starts)
    over = f" over {count} starts" if count > 1 else ""
    results.append(f"goodput {units.percent(run.times['goodput'])} of {units.clock(seconds)}{over}")
  return good, f"{text}. {'; '.join(results).capitalize()}." if results else f"{text}."


def _result_text(run: Run) -> str:
  """Returns the newest loss, of the evaluation where there is one."""
  if not (points := run.points("eval_loss")):
    return f"training loss {run.points('loss')[-1][1]:.4f}"
  error = number(run.evaluations[-1].get(log_lines.standard_error("eval_loss")))
  more = []
  if values := run.points("eval_accuracy"):
    more.append(f"{units.percent(values[-1][1])} accuracy")
  elif values := run.points("eval_bits_per_byte"):
    more.append(f"{values[-1][1]:.3f} bits per byte")
  more += filter(None, [log_lines.examples_text(run.evaluations[-1])])
  loss = f"evaluation loss {points[-1][1]:.4f}" + (f" ± {error:.4f}" if error else "")
  return loss + (f" ({', '.join(more)})" if more else "")


def _facts(run: Run) -> list[tuple[str, str]]:
  """Returns (name, value) of the numbers that matter most."""
  last = {key: points[-1][1] for key in run.keys if (points := run.points(key))}
  last["speed"] = run.median_of_last_start(f"{run.unit}_per_second")
  last["mfu"] = run.median_of_last_start("mfu")
  last["goodput"] = run.times and run.times["goodput"]
  facts = {
    "loss": ("training loss", "{:.4f}"),
    "eval_loss": ("evaluation loss", "{:.4f}"),
    "eval_bits_per_byte": ("bits per byte", "{:.3f}"),
    "eval_accuracy": ("accuracy", "{:.1%}"),
    "speed": (f"{run.unit} per second", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "goodput": ("goodput", "{:.1%}"),
  }
  shown = [
    (name, form.format(last[key]).replace("%", " %"))
    for key, (name, form) in facts.items()
    if last.get(key) is not None
  ]
  step = f"{run.done:,}" + (f" of {run.total:,}" if run.total else "")
  starts_text = [("starts", f"{len(run.starts)}")] if run.starts else []
  return [("step", step), *shown, *starts_text]


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
    kept = [lines[place] for place in evenly(len(lines), ROWS)]
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
