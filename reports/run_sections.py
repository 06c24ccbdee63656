"""The sections of a run's page, each from the files of the run."""

import dataclasses
import datetime
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from input_pipeline import catalog
from partitioning.parallel.pipeline_schedule import Schedule
from reports import html, pipeline_picture, run_charts
from reports.run_files import Run, number
from runtime import units
from training import history
from training.metrics.goodput import BINS

SAMPLES = 8  # that are shown
CHECKPOINTS = 40  # steps that are listed


@dataclasses.dataclass(frozen=True)
class Section:
  """A section.

  Attributes:
    title: its heading.
    macro: of `templates/run_sections.html.j2`, which renders it.
    values: its argument.
  """

  title: str
  macro: str
  values: Mapping[str, Any]


def evenly(count: int, most: int) -> list[int]:
  """Returns at most `most` of the places 0 to count - 1, evenly spaced from first to last."""
  if count <= most:
    return [*range(count)]
  return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def goodput(run: Run) -> Section | None:
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
    for number, (name, value) in enumerate(_first_steps(seconds).items())
  ]
  many = f"{len(run.starts)} starts" if len(run.starts) > 1 else "one start"
  title = (
    f"{units.clock(whole)} from the first start on, over {many}" if run.starts else "all starts"
  )
  return Section("Where the time went", "goodput", {"parts": parts, "title": title})


def _first_steps(seconds: Mapping[str, float]) -> dict[str, float]:
  """Returns the bins, that of steps first: its share is the goodput."""
  return {name: seconds[name] for name in sorted(seconds, key=lambda name: name != "step")}


def step_time(run: Run) -> Section | None:
  """Returns measured and predicted step time, and the collectives by axis."""
  compiled = run.events(history.COMPILED)[-1:]
  if not compiled:
    return None
  [event] = compiled
  predicted = event.get("predicted") or {}
  measured = run.median_of_last_start("step_seconds")
  rows, most = [], measured or 0.0
  if "step_seconds" in predicted:
    most = max(most, *predicted["step_seconds"])
    names = ("predicted, low", "predicted, expected", "predicted, high")
    rows = [*zip(names, predicted["step_seconds"], strict=True)]
  if measured is not None:
    rows.append(("measured, median since the newest start", measured))
  times = [
    {"name": name, "text": units.seconds(value), "percent": round(100 * value / most, 2)}
    for name, value in rows
    if most
  ]
  ratio = ""
  if measured and "step_seconds" in predicted:
    expected = predicted["step_seconds"][1]
    ratio = f"The measured step takes {measured / expected:.3g} times the predicted one."
  costs = {(one["axis"], one["kind"]): one for one in predicted.get("sent", ())}
  collectives = [
    {
      "axis": one["axis"],
      "kind": one["kind"],
      "numbers": [
        f"{one['runs']:,}",
        units.size(one["bytes"]),
        *_cost(costs.get((one["axis"], one["kind"]))),
      ],
    }
    for one in event.get("collectives", ())
  ]
  values = {
    **{"times": times, "ratio": ratio, "collectives": collectives},
    "topology": predicted.get("topology", ""),
    "accuracy": predicted.get("accuracy", ""),
    "missing": predicted.get("missing", ""),
  }
  return Section("Step time and collectives", "step_time", values)


def _cost(predicted: Mapping[str, Any] | None) -> list[str]:
  if predicted is None:
    return ["", ""]
  return [units.seconds(predicted["seconds"]), units.seconds(predicted["exposed"])]


def memory(run: Run) -> Section | None:
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
  return Section(
    "Memory of a device",
    "memory",
    {
      "bar": html.memory_bar(parts, limit, measured),
      "sums": [(name, units.size(size)) for name, size in sums if size is not None],
      "measured": measured is not None,
    },
  )


def layout(run: Run) -> Section | None:
  """Returns the mesh and how the largest parameters are sharded over it."""
  if run.layout is None:
    return None
  values = run.layout
  counts = f"{values['parameters']:,} parameters"
  sizes = values["bytes_per_device"]
  held = sum(size for name, size in sizes.items() if name != "batch")
  text = (
    f"{counts}; with optimizer state {units.size(held)} per device, of which "
    f"{units.size(values['replicated_bytes'])} are replicated on every device."
  )
  return Section("Mesh and layout", "layout", {**values, "text": text})


def pipeline(run: Run) -> Section | None:
  """Returns the schedule of the pipeline's stages; None without a pipeline."""
  values = dict((run.layout or {}).get("pipeline") or {})
  if not values:
    return None
  layers = values.pop("layers")
  schedule = Schedule(**values)
  return Section("Pipeline", "pipeline", pipeline_picture.for_page(schedule, layers))


def samples(run: Run) -> Section | None:
  """Returns what the model has written over time."""
  drawn = run.of_steps(history.SAMPLE)
  if not drawn:
    return None
  kept = [drawn[place] for place in evenly(len(drawn), SAMPLES)]
  rows = [
    {
      "step": f"{one['step']:,}",
      "prompt": str(one.get("prompt", "")),
      "text": str(one.get("text", "")),
    }
    for one in kept
  ]
  return Section("Samples", "samples", {"rows": rows, "count": len(drawn)})


def starts(run: Run) -> Section | None:
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
  if not rows:
    return None
  return Section("Starts", "starts", {"rows": rows, "versions": before})


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


def checkpoints(run: Run) -> Section | None:
  """Returns which steps were saved, and which of them are there."""
  if not run.saved:
    return None
  kept = [f"{run.saved[place]:,}" for place in evenly(len(run.saved), CHECKPOINTS)]
  on_disk = [f"{step:,}" for step in run.on_disk[-CHECKPOINTS:]]
  values = {"saved": kept, "count": len(run.saved), "on_disk": on_disk}
  return Section("Checkpoints", "checkpoints", values)


def bad_steps(run: Run) -> Section | None:
  """Returns the bad steps, and where the run was rolled back to."""
  back = {one["rolled_back"]: one for one in run.rollbacks}
  rows = [
    [
      f"{step:,}",
      why,
      f"{back[step]['step']:,}" if step in back else "",
      ", ".join(f"{a:,} to {b:,}" for a, b in back[step].get("skipped_rows", ()))
      if step in back
      else "",
    ]
    for step, why in run_charts.bad_steps(run)
  ]
  return Section("Bad steps", "bad_steps", {"rows": rows}) if rows else None


def configuration(run: Run) -> Section | None:
  """Returns the resolved config, and the versions of the newest start."""
  if not run.config:
    return None
  rows = [(key, value_text(value)) for key, value in run.config.items()]
  versions = run.starts[-1].get("versions", {}) if run.starts else {}
  return Section("Config and versions", "configuration", {"rows": rows, "versions": versions})


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
  resume = ("resume", "train {}") if run.done < run.total else _longer(run)
  chat = " --chat" * (run.config.get("data.name") == catalog.CONVERSATIONS)
  sample = [("sample", f"sample {{}}{chat}")] if run.unit == "tokens" else []
  offered = [resume, ("evaluate", "evaluate {}"), *sample]
  offered += [("this page", "report {}"), ("compare", "report {} OTHER_RUN")]
  folder = shlex.quote(run.folder)
  return [(what, f"python main.py {command.format(folder)}") for what, command in offered]


def _longer(run: Run) -> tuple[str, str]:
  return "train for longer", f"train {{}} training.steps={2 * max(run.done, run.total)}"


def commands(run: Run) -> Section:
  """Returns the section of the commands."""
  return Section("Commands", "commands", {"commands": commands_of_run(run)})
