"""A plan as text for the terminal: the verdict first, then the reasons.

The timeline of a layer has a row of compute, a row per kind of transfer, and the gaps.
"""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from partitioning.rules import size_text
from planning import analytic, memory
from planning.plan import Plan
from planning.timeline import Bar, Gap, Layer, Timeline
from reports import pipeline_picture
from reports.html import memory_bar, render
from reports.layout_page import Arrays, Side, pipelines
from reports.layout_text import chosen_lines, counts_text, reduction_text
from runtime import units
from runtime.chips import REASONS, SOURCES

# ------------------------------ the timeline of a layer ------------------------------

TIMELINE_WIDTH, TIMELINE_LABEL = 76, 23  # of the rows, and of their names
TIMELINE_LEGEND = (
  "█ bound by matmuls  ▒ by HBM  ▓ an inner loop  · waiting  ▄ sending  ▁ in part of it"
)
_COMPUTE = {"matmul": "█", "HBM": "▒", "loop": "▓", "wait": "·"}
_MARKED = 0.01  # of a layer: the least wait that gets a number
_ROUNDING = 1e-6
_PARTS = 0.02  # of its compute: the least part that is named


def lines(timeline: Timeline | None) -> Iterator[str]:
  """Yields the lines; each fits 100 columns."""
  for layer in timeline.layers if timeline else ():
    yield from _layer(layer)
  if timeline and timeline.layers:
    yield f"  {TIMELINE_LEGEND}"
  yield from missing_lines(timeline)
  if timeline:
    yield from gap_lines(timeline.gaps[:1])


def missing_lines(timeline: Timeline | None) -> Iterator[str]:
  """Yields what there is no timeline of, and why."""
  if timeline is None:
    yield "timeline of a layer: none without a compiled program"
  else:
    yield from (f"timeline of a layer: {missing}" for missing in timeline.missing)


def head(layer: Layer) -> str:
  """Returns the title of a layer with its times."""
  several = f"{layer.layers} layers" if layer.layers > 1 else "a layer"
  waits = sum(one.seconds for one in layer.waits)
  return (
    f"{several}, {layer.title}: {milliseconds(layer.seconds)} ms, of which it waits "
    f"{milliseconds(waits)} ms; {layer.runs} times a step"
  )


def where(layer: Layer) -> str:
  """Returns the line of the loop, and how many layers are outside of it."""
  others = f"{layer.outside} {'layer' if layer.outside == 1 else 'layers'} outside of it"
  at = layer.line and f"loop at {layer.line}"
  return "; ".join(filter(None, (at, layer.outside and others)))


def parts(layer: Layer) -> str:
  """Returns which functions the compute is in: `MLP 67 %, Attention 17 %`."""
  total = sum(layer.parts.values())
  shares = {name: seconds / total for name, seconds in layer.parts.items() if total}
  named = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= _PARTS]
  return ", ".join(named)


def gap_lines(gaps: Sequence[Gap]) -> Iterator[str]:
  """Yields the most expensive gaps: what is waited for, and the line of code that causes it."""
  for gap in gaps:
    each = f" ({gap.runs} x {milliseconds(gap.seconds / gap.runs)} ms)" if gap.runs > 1 else ""
    yield f"most expensive gap: {milliseconds(gap.seconds)} ms of a step{each}, to wait for"
    yield f"  the {gap.what}{gap.when and ', '}{gap.when}"
    line = gap.line or "its line of code is not in the program"
    yield from (f"  {part}" for part in line.replace(", through", ",\nthrough").splitlines())


def milliseconds(seconds: float) -> str:
  """Returns milliseconds with three digits, at most as many decimals: `0.006`, `3.73`, `117`."""
  value = 1e3 * seconds
  if value >= 100:
    return f"{value:,.0f}"
  return f"{value:.3g}" if value >= 0.1 or not value else f"{value:.3f}"


def _layer(layer: Layer) -> Iterator[str]:
  yield head(layer)
  if said := where(layer):
    yield f"  {said}"
  waits = [Bar(one.begin, one.end, "wait") for one in layer.waits]
  yield _row("compute", _computed([*layer.compute, *waits], layer.seconds))
  for name, bars in layer.transfers.items():
    yield _row(name, _sent(bars, layer.seconds))
  if numbers := _numbers(layer):
    yield _row("waiting, ms", numbers)
  if named := parts(layer):
    yield f"  compute is in {named}"


def _row(name: str, cells: str) -> str:
  name = name if len(name) < TIMELINE_LABEL - 2 else f"{name[: TIMELINE_LABEL - 6]}..."
  return f"  {name:<{TIMELINE_LABEL - 2}}{cells}".rstrip()


def _shares(bars: Sequence[Bar], seconds: float) -> list[dict[str, float]]:
  """Returns for each cell how long the bars of each text are in it."""
  cells: list[dict[str, float]] = [{} for _ in range(TIMELINE_WIDTH)]
  each = seconds / TIMELINE_WIDTH
  for bar in bars:
    first, last = int(bar.begin / each), min(int(bar.end / each), TIMELINE_WIDTH - 1)
    for at in range(first, last + 1):
      inside = min(bar.end, (at + 1) * each) - max(bar.begin, at * each)
      if inside > _ROUNDING * each:
        cells[at][bar.text] = cells[at].get(bar.text, 0.0) + inside
  return cells


def _computed(bars: Sequence[Bar], seconds: float) -> str:
  """Returns a character for each cell: what takes most of it."""
  cells = _shares(bars, seconds)
  return "".join(_COMPUTE[max(cell, key=cell.get)] if cell else " " for cell in cells)


def _sent(bars: Sequence[Bar], seconds: float) -> str:
  """Returns a character for each cell: by how much of it something is sent."""
  one = [Bar(bar.begin, bar.end, "") for bar in bars]
  cells = _shares(one, seconds)
  half = seconds / TIMELINE_WIDTH / 2
  return "".join(("▄" if sum(cell.values()) >= half else "▁") if cell else " " for cell in cells)


def _numbers(layer: Layer) -> str:
  """Returns the milliseconds of the largest waits below them, as far as they do not overlap."""
  cells = [" "] * TIMELINE_WIDTH
  for bar in sorted(layer.waits, key=lambda bar: -bar.seconds):
    text = milliseconds(bar.seconds)
    middle = int((bar.begin + bar.end) / 2 / layer.seconds * TIMELINE_WIDTH)
    at = max(0, min(middle - len(text) // 2, TIMELINE_WIDTH - len(text)))
    around = cells[max(at - 1, 0) : at + len(text) + 1]
    if bar.seconds >= _MARKED * layer.seconds and not "".join(around).strip():
      cells[at : at + len(text)] = text
  return "".join(cells).rstrip()


# ------------------------------ the plan ------------------------------


@dataclasses.dataclass
class Row:
  """All collectives of one kind over the same axes, in one step."""

  axis: str
  kind: str
  network: str
  runs: int = 0
  bytes: int = 0
  seconds: float = 0.0
  waited: float = 0.0


def text(plan: Plan, *, width: int = 110) -> str:
  """Returns the plan as text."""
  out = io.StringIO()
  console = Console(file=out, width=width, highlight=False, no_color=True)
  for line in [verdict(plan), *notes(plan), *(f"  {line}" for line in advice(plan))]:
    console.print(line, soft_wrap=True)
  console.print()
  console.print(_memory(plan))
  if plan.sent:
    console.print(_collectives(plan))
  if plan.host:
    console.print(_host(plan))
  if schedule := plan.job.program.pipeline:
    console.print(pipeline_picture.text(schedule, plan.job.config.model.layers), soft_wrap=True)
  for line in lines(plan.timeline) if plan.times else ():
    console.print(line, soft_wrap=True)
  for line in [*time_lines(plan), *(f"warning: {warning}" for warning in plan.warnings)]:
    console.print(line, soft_wrap=True)
  return out.getvalue().rstrip()


def advice(plan: Plan) -> list[str]:
  """Returns what makes the config fit, or that nothing does of what was tried; or saves time."""
  lines = [line for line in (plan.gather_once, plan.per_tick) if line]
  lines += [
    f"would fit, with {size_text(one.bytes)} per device by formula: {one.overrides}"
    for one in plan.advice.fitting
  ]
  if nearest := plan.advice.smallest:
    lines.append(
      f"none of {plan.advice.tried} changes fits; the smallest takes {size_text(nearest.bytes)} "
      f"per device by formula: {nearest.overrides}"
    )
  return lines


def verdict(plan: Plan) -> str:
  """Returns whether it fits, in one line."""
  room, peak = int(plan.topology.chip.hbm_bytes), plan.peak_bytes
  who = "by the compiler" if plan.program else "by formula, without a compiler"
  slices = math.prod(plan.job.devices.slices.values())
  of = f"{slices} slices of {plan.topology.name}" if slices > 1 else plan.topology.name
  devices = f"{plan.job.mesh.size} devices of {of}"
  says = f"{size_text(peak)} of {size_text(room)} per device, {who}"
  if plan.fits:
    return f"fits {devices}: {says}; headroom {size_text(room - peak)}"
  return f"does not fit {devices}: {says}; {size_text(peak - room)} too much, so no speed is given"


def notes(plan: Plan) -> list[str]:
  """Returns notes on the source of the numbers."""
  found = [plan.topology.note] if plan.topology.note else []
  job = plan.job
  if reduced := reduction_text(job.program, job.devices.sizes):
    found.append(reduced)
  if plan.topology.slices > 1:
    over = " ".join(f"--config.mesh_dcn.{k}={v}" for k, v in plan.job.devices.slices.items())
    found.append(f"{plan.topology.slices} slices, as {over}: train needs it too")
  if not plan.program:
    found.append(_without(plan))
  if job.devices.sizes["expert"] > 1 and job.config.model.expert_exchange == "rounds":
    found.append(
      "exchange of tokens: one round in each layer with experts, as where tokens are spread evenly"
    )
  return [
    *found,
    counts_text(*job.parameter_counts()),
    *chosen_lines(job, compiled=bool(plan.program)),
  ]


def _without(plan: Plan) -> str:
  """Returns why there is no compiler, and the consequence."""
  if plan.topology.platform == "tpu":
    why = "the compiler for TPUs is not installed: pip install -r requirements/plan.txt"
  else:
    why = f"there is no {plan.topology.chip.name} here to compile for"
  return f"{why}; all numbers are by formula. Accuracy: {plan.accuracy['memory']}"


def _memory(plan: Plan) -> Table:
  table = _table("memory per device", ("part",), ("at the peak", "at other times"))
  at_peak = memory.at_peak(plan.memory)
  for part, size in at_peak.items():
    table.add_row(part, size_text(size))
  table.add_row("peak, by formula: the sum", size_text(plan.memory_at_once))
  for part, size in plan.memory.items():
    if part not in at_peak:
      table.add_row(part, "", size_text(size))
  if plan.program:
    table.add_row("peak, by the compiler", size_text(plan.peak_bytes))
  for part, size in plan.host_memory.items():
    table.add_row(f"in the host's memory: {part}", size_text(size))
  if plan.program and plan.program.host_bytes:
    table.add_row("in the host's memory, by the compiler", size_text(plan.program.host_bytes))
  return table


def sums(plan: Plan) -> list[Row]:
  """Returns the collectives of a step by axes and kind, those that take longest first."""
  rows: dict[tuple[str, str, str], Row] = {}
  for one in plan.sent:
    key = "+".join(one.axes), one.kind, one.wire.network
    row = rows.setdefault(key, Row(*key))
    row.runs += one.runs
    row.bytes += one.bytes
    row.seconds += one.seconds
    row.waited += one.exposed_seconds
  return sorted(rows.values(), key=lambda row: -row.seconds)


def _collectives(plan: Plan) -> Table:
  left, right = ("axis", "kind", "over"), ("runs", "bytes", "ms", "exposed ms")
  table = _table("collectives of a step", left, right)
  for row in sums(plan):
    times = (f"{1e3 * value:,.1f}" for value in (row.seconds, row.waited))
    table.add_row(row.axis, row.kind, row.network, f"{row.runs:,}", size_text(row.bytes), *times)
  return table


def _host(plan: Plan) -> Table:
  table = _table("transfers of a step", ("direction", "arrays"), ("bytes", "ms", "exposed ms"))
  for one in plan.host:
    times = (f"{1e3 * value:,.1f}" for value in (one.seconds, one.exposed_seconds))
    table.add_row(one.direction, one.what or "all", size_text(one.bytes), *times)
  return table


def host_line(plan: Plan) -> str:
  """Returns whether the traffic to and from the host's memory is hidden by compute."""
  size, waited = sum(one.bytes for one in plan.host), plan.times.host_exposed
  share = 1 - waited / max(sum(one.seconds for one in plan.host), 1e-12)
  speed = f"{plan.topology.chip.host_bandwidth / 1e9:.3g} GB/s each way"
  return (
    f"host memory: {size_text(size)} moved per step and device over {speed}, "
    f"{100 * share:.0f} % hidden (exposed {units.seconds(waited)})"
  )


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
  table = Table(title=title, title_justify="left", box=None, pad_edge=False)
  for name in left:
    table.add_column(name)
  for name in right:
    table.add_column(name, justify="right")
  return table


def terms(plan: Plan) -> dict[str, float]:
  """Returns the roofline terms: the seconds of compute, HBM and communication by themselves."""
  if plan.times is None:
    return {}
  times = plan.times
  found = {"compute": times.compute, "HBM": times.memory, "communication": times.communication}
  return found | ({"host memory": sum(one.seconds for one in times.host)} if times.host else {})


def constants(plan: Plan) -> str:
  """Returns the constants behind the times, in one line; plan.html has the sources."""
  chip, rates = plan.topology.chip, plan.rates
  name = "a simulated device" if chip.name == "cpu" else chip.name.upper()
  near = "ICI per axis" if chip.torus else chip.network
  speeds = [
    f"{units.number(chip.flops / 1e12)} TFLOP/s",
    f"{chip.hbm_bandwidth / 1e12:.3g} TB/s HBM",
  ]
  if (dtype := plan.job.config.training.matmul_dtype) != "compute":
    speeds.insert(1, f"{units.number(chip.eight_bit_flops / 1e12)} TFLOP/s in {dtype}")
  speeds.append(f"{chip.link_bandwidth / 1e9:.3g} GB/s {near}")
  by_formula = analytic.matmul_share(chip, alone=plan.job.mesh.size == 1)
  matmul = rates.matmul or (chip.matmul if plan.program else by_formula)
  memory = rates.memory or chip.memory
  shares = [f"{100 * share:g}" for share in (matmul, memory, rates.link)]
  each = f"each at {shares[0]} %" if len(set(shares)) == 1 else f"at {', '.join(shares)} %"
  fused = plan.times and plan.times.work.attention and chip.attention
  more = f", fused attention at {100 * chip.attention:g} %" if fused else ""
  return f"assumed for {name}: {', '.join(speeds)}, {each} efficiency{more}"


def _parts(plan: Plan) -> str:
  """Returns what a step consists of: computing, and waiting for each kind of transfer."""
  texts = [f"{name} {units.seconds(seconds)}" for name, seconds in plan.times.parts.items()]
  if slowed := plan.times.slowed:
    texts[0] += f" ({units.seconds(slowed)} of it since transfers take HBM bandwidth)"
  return f"of the step: {', '.join(texts)}"


def time_lines(plan: Plan) -> list[str]:
  """Returns how long a step takes, what bounds it, and what the token budget takes."""
  if plan.times is None:
    return []
  low, expected, high = plan.step_seconds
  parts = ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in terms(plan).items())
  lines = [
    f"step: {units.seconds(expected)} ({units.seconds(low)} to {units.seconds(high)}), "
    f"{plan.rate:,.0f} {plan.unit}/s per device, MFU {100 * plan.mfu():.1f} % "
    f"({100 * plan.mfu(causal=True):.1f} % with causal attention counted half)",
    _parts(plan),
    f"roofline: {parts} (exposed {units.seconds(plan.times.exposed + plan.times.host_exposed)})",
    f"largest term: {max(terms(plan), key=terms(plan).get)}",
    constants(plan),
    f"accuracy: {plan.accuracy['times']}",
  ]
  if plan.host:
    lines.insert(3, host_line(plan))
  budget = (
    f"budget: {units.number(plan.token_budget)} {plan.unit} take {units.number(plan.chip_hours)} "
  )
  budget += "chip-hours"
  return [*lines, budget if plan.cost is None else f"{budget} and cost {plan.cost:,.2f}"]


# ------------------------------ as a page ------------------------------

KINDS = {"matmul": "matmul", "HBM": "memory", "loop": "inner"}  # of compute -> CSS class
GAPS = 10  # of those waited for, how many are listed


def html(plan: Plan, *, command: str = "") -> str:
  """Returns the page; `command` is the one that asked for it."""
  sides = [Side(plan.title, plan.job, (), plan.topology.name)]
  return render(
    "plan.html.j2",
    title=f"Plan: {plan.title} on {plan.topology.name}",
    command=command,
    sides=sides,
    fits=plan.fits,
    verdict=verdict(plan),
    notes=notes(plan),
    warnings=plan.warnings,
    advice=[(size_text(one.bytes), one.overrides) for one in plan.advice.fitting],
    no_advice=[] if plan.advice.fitting else advice(plan),
    pipelines=pipelines(sides),
    memory=_memory_parts(plan),
    **_communication(plan),
    host=_host_rows(plan),
    layers=[_layer_rows(one) for one in (plan.timeline.layers if plan.timeline else ())],
    no_layers=[*missing_lines(plan.timeline)],
    gaps=[_gap(one) for one in (plan.timeline.gaps[:GAPS] if plan.timeline else ())],
    step=_step(plan) if plan.times else None,
    parameters=Arrays(sides).section("parameters"),
    constants=_constants(plan),
    sources=SOURCES,
  )


def _memory_parts(plan: Plan) -> dict[str, Any]:
  """Returns the parts by formula, stacked against the limit, and the compiler's peak."""
  limit, at_peak = plan.topology.chip.hbm_bytes, memory.at_peak(plan.memory)
  sums = [("peak, by formula", size_text(plan.memory_at_once))]
  if plan.program:
    sums.append(("peak, by the compiler", size_text(plan.peak_bytes)))
  sums += [(f"in the host's memory: {k}", size_text(size)) for k, size in plan.host_memory.items()]
  shown = {name: size if name in at_peak else 0 for name, size in plan.memory.items()}
  return {
    "bar": memory_bar(shown, limit, plan.peak_bytes if plan.program else None),
    "parts": [
      {"name": name, "text": size_text(size), "at_peak": name in at_peak}
      for name, size in plan.memory.items()
    ],
    "sums": [*sums, (f"memory of a device of {plan.topology.name}", size_text(int(limit)))],
  }


def _communication(plan: Plan) -> dict[str, list[dict[str, Any]]]:
  """Returns the collectives by axes and kind, then each with its source line."""
  totals = sums(plan)
  most = max([row.seconds for row in totals], default=0) or 1
  return {
    "collectives": [
      {
        **{"axis": row.axis, "kind": row.kind, "network": row.network},
        "numbers": [*_runs(row), units.seconds(row.waited)],
        "percent": 100 * row.seconds / most,
      }
      for row in totals
    ],
    "each": [
      {"axis": "+".join(one.axes), "kind": one.kind, "numbers": _runs(one), "source": one.source}
      for one in sorted(plan.sent, key=lambda one: -one.seconds)
    ],
  }


def _host_rows(plan: Plan) -> list[dict[str, Any]]:
  """Returns the transfers to and from the host's memory."""
  most = max([one.seconds for one in plan.host], default=0) or 1
  return [
    {
      **{"direction": one.direction, "what": one.what or "all"},
      "numbers": [
        size_text(one.bytes),
        *map(units.seconds, (one.seconds, one.exposed_seconds)),
      ],
      "percent": 100 * one.seconds / most,
    }
    for one in plan.host
  ]


def _layer_rows(layer: Layer) -> dict[str, Any]:
  """Returns the rows of a layer's timeline, with each bar's place in percent."""

  def shown(bar: Bar, kind: str, what: str) -> dict[str, Any]:
    return {
      "left": round(100 * bar.begin / layer.seconds, 3),
      "width": round(100 * bar.seconds / layer.seconds, 3),
      "title": f"{what}: {units.seconds(bar.seconds)}",
      "kind": kind,
    }

  compute = [shown(bar, KINDS[bar.text], f"bound by {bar.text}") for bar in layer.compute]
  waits = [shown(bar, "wait", f"waits for {bar.text}") for bar in layer.waits]
  rows = [{"name": "compute", "bars": compute + waits}]
  for name, bars in layer.transfers.items():
    rows.append({"name": name, "bars": [shown(bar, "sent", bar.text) for bar in bars]})
  return {
    "head": head(layer),
    "line": where(layer),
    "rows": rows,
    "parts": parts(layer),
  }


def _gap(gap: Gap) -> dict[str, Any]:
  texts = [" ".join(filter(None, (gap.what, gap.when))), gap.line]
  return {"texts": texts, "numbers": [f"{gap.runs:,}", units.seconds(gap.seconds)]}


def _runs(row: Any) -> list[str]:
  return [f"{row.runs:,}", size_text(row.bytes), units.seconds(row.seconds)]


def _step(plan: Plan) -> dict[str, Any]:
  """Returns the numbers of a step, and its picture: what it consists of, and each term by itself.

  All rows have one scale, from 0 to the upper end of the expected range. The part of a transfer
  that the device waits for is marked.
  """
  low, expected, high = plan.step_seconds

  def bar(kind: str, begin: float, seconds: float, title: str) -> dict[str, Any]:
    place = {"left": round(100 * begin / high, 3), "width": round(100 * seconds / high, 3)}
    return {**place, "kind": kind, "title": f"{title}: {units.seconds(seconds)}"}

  def row(name: str, seconds: float, *bars: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "text": units.seconds(seconds), "bars": bars}

  def sent(name: str, seconds: float, waited: float) -> dict[str, Any]:
    parts = [bar("sent", 0, seconds - waited, f"{name}, hidden")]
    return row(name, seconds, *parts, bar("wait", seconds - waited, waited, f"{name}, waited for"))

  parts, begin = [], 0.0
  for name, seconds in plan.times.parts.items():
    parts.append(bar("computing" if name == "computing" else "wait", begin, seconds, name))
    begin += seconds
  rows = [row("step: " + ", ".join(plan.times.parts), expected, *parts)]
  for name, kind in (("compute", "matmul"), ("HBM", "memory")):
    seconds = terms(plan)[name]
    rows.append(row(f"{name} alone", seconds, bar(kind, 0, seconds, name)))
  for one in sums(plan):
    rows.append(sent(f"{one.axis}, {one.kind}", one.seconds, one.waited))
  for one in plan.times.host:
    name = " ".join(filter(None, (one.direction, one.what)))
    rows.append(sent(name, one.seconds, one.exposed_seconds))
  duration = units.seconds
  facts = [
    ("a step", f"{duration(expected)} ({duration(low)} to {duration(high)})"),
    (f"{plan.unit} per second and device", f"{plan.rate:,.0f}"),
    ("MFU", f"{100 * plan.mfu():.1f} %"),
    ("with causal attention counted half", f"{100 * plan.mfu(causal=True):.1f} %"),
    ("largest term", max(terms(plan), key=terms(plan).get)),
    (
      f"{units.number(plan.token_budget)} {plan.unit}",
      f"{units.number(plan.chip_hours)} chip-hours",
    ),
  ]
  if plan.cost is not None:
    facts.append(("they cost", f"{plan.cost:,.2f}"))
  notes = [constants(plan), f"accuracy: {plan.accuracy['times']}"]
  notes += [host_line(plan)] if plan.host else []
  return {"facts": facts, "rows": rows, "notes": notes, "low": round(100 * low / high, 3)}


def _constants(plan: Plan) -> Sequence[tuple[str, str, str]]:
  """Returns the assumptions, with their sources, including numbers set by the config."""
  chip = plan.topology.chip
  shares = ("matmul", "attention", "memory")
  sources = {name: getattr(chip, f"{name}_source") for name in ("flops", *shares)}
  rows = [
    (f"{chip.name}.{name}", f"{value:.4g}", sources.get(name.rpartition("_")[2], chip.source))
    for name, value in vars(chip).items()
    if isinstance(value, float) and (value or not name.endswith("_flops"))
  ]
  return [*rows, *((name, f"{v:.4g}", REASONS[name]) for name, v in vars(plan.rates).items())]
