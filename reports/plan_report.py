"""A plan as text for the terminal: the verdict first, then the reasons.

The timeline of a layer has a row of compute, a row per kind of transfer, and the gaps.
"""

import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from partitioning.rules import size_text
from planning import buffers, gpu_target, memory, prediction, roofline
from planning.plan import Plan
from planning.step_time import by_axes
from planning.timeline import Bar, Gap, Layer, Timeline
from reports import charts, pipeline_picture
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
_KINDS = {"matmul": "matmul", "HBM": "memory", "loop": "inner"}  # what bounds compute -> of a bar
_CHARACTERS = {"matmul": "█", "memory": "▒", "inner": "▓", "wait": "·"}
_MARKED = 0.01  # of a layer: the least wait that gets a number
_ROUNDING = 1e-6
_PARTS = 0.02  # of its compute: the least part that is named


def rows_of(layer: Layer) -> dict[str, list[tuple[Bar, str]]]:
  """Returns what is computed and waited for, and what is sent: row -> (bar, its kind).

  The text of a bar says what it is.
  """

  def said(bars: Sequence[Bar], text: str) -> list[Bar]:
    return [dataclasses.replace(bar, text=text.format(bar.text)) for bar in bars]

  kinds = [_KINDS[bar.text] for bar in layer.compute] + ["wait"] * len(layer.waits)
  compute = said(layer.compute, "bound by {}") + said(layer.waits, "waits for {}")
  sent = {name: [(bar, "sent") for bar in bars] for name, bars in layer.transfers.items()}
  return {"compute": [*zip(compute, kinds, strict=True)], **sent}


def lines(timeline: Timeline | None) -> Iterator[str]:
  """Yields the lines; each fits 100 columns."""
  for layer in timeline.layers if timeline else ():
    yield from _layer(layer)
  if timeline and timeline.layers:
    yield f"  {TIMELINE_LEGEND}"
  yield from missing_lines(timeline)
  for gap in timeline.gaps[:1] if timeline else ():
    yield from gap_lines(gap)


def missing_lines(timeline: Timeline | None) -> list[str]:
  """Returns what there is no timeline of, and why."""
  missing = timeline.missing if timeline else ("none without a compiled program",)
  return [f"timeline of a layer: {why}" for why in missing]


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


def gap_lines(gap: Gap) -> Iterator[str]:
  """Yields the most expensive gap: what is waited for, and the line of code that causes it."""
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
  for name, bars in rows_of(layer).items():
    yield _row(name, _drawn(bars, layer.seconds))
  if numbers := _numbers(layer):
    yield _row("waiting, ms", numbers)
  if named := parts(layer):
    yield f"  compute is in {named}"


def _row(name: str, cells: str) -> str:
  name = name if len(name) < TIMELINE_LABEL - 2 else f"{name[: TIMELINE_LABEL - 6]}..."
  return f"  {name:<{TIMELINE_LABEL - 2}}{cells}".rstrip()


def _drawn(bars: Sequence[tuple[Bar, str]], seconds: float) -> str:
  """Returns a character for each cell: what takes most of it, or by how much of it is sent."""
  cells: list[dict[str, float]] = [{} for _ in range(TIMELINE_WIDTH)]
  each = seconds / TIMELINE_WIDTH
  for bar, kind in bars:
    for at in range(int(bar.begin / each), min(int(bar.end / each), TIMELINE_WIDTH - 1) + 1):
      inside = min(bar.end, (at + 1) * each) - max(bar.begin, at * each)
      if inside > _ROUNDING * each:
        cells[at][kind] = cells[at].get(kind, 0.0) + inside
  found = [max(cell.items(), key=lambda item: item[1], default=(" ", 0.0)) for cell in cells]
  marks = {" ": " ", **_CHARACTERS}
  return "".join(marks.get(kind, "▄" if part >= each / 2 else "▁") for kind, part in found)


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


class PlanTable(NamedTuple):
  """A table that the terminal and the page both show.

  Attributes:
    title: above it.
    texts: heads of its columns of words, which come first.
    numbers: heads of its columns of numbers.
    rows: cells of both.
    shares: of the longest, in percent, for each row: a bar on the page; () for none.
    swatches: the first rows, which have the color of a part of the bar of memory.
  """

  title: str
  texts: tuple[str, ...]
  numbers: tuple[str, ...]
  rows: Sequence[Sequence[str]]
  shares: Sequence[float] = ()
  swatches: int = 0


def text(plan: Plan, *, width: int = 110) -> str:
  """Returns the plan as text."""
  console = Console(file=io.StringIO(), width=width, highlight=False, no_color=True)
  said = [verdict(plan), *notes(plan), *(f"  {line}" for line in advice(plan)), ""]
  console.print("\n".join(said), soft_wrap=True)
  for found in (memory_table(plan), collectives_table(plan), host_table(plan)):
    if found.rows:
      console.print(_in_terminal(found))
  schedule = plan.job.program.pipeline
  said = [pipeline_picture.text(schedule, plan.job.config.model.layers)] if schedule else []
  said += [*(lines(plan.timeline) if plan.times else ()), *time_lines(plan)]
  said += [f"warning: {warning}" for warning in plan.warnings]
  console.print("\n".join(said), soft_wrap=True)
  return console.file.getvalue().rstrip()


def advice(plan: Plan) -> list[str]:
  """Returns what makes the config fit, or that nothing does of what was tried; or saves time."""
  lines = [plan.gather_once] if plan.gather_once else []
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


_GAPS = 1.02  # times the peak: gaps below that are not worth a word


def verdict(plan: Plan) -> str:
  """Returns whether it fits, in one line."""
  room, peak, taken = int(plan.topology.usable_bytes), plan.peak_bytes, plan.allocated_bytes
  who = "by the compiler" if plan.program else "by formula, without a compiler"
  slices = math.prod(plan.job.devices.slices.values())
  of = f"{slices} slices of {plan.topology.name}" if slices > 1 else plan.topology.name
  devices = f"{plan.job.mesh.size} devices of {of}"
  gaps = f", {size_text(taken)} with gaps between buffers" if taken > _GAPS * peak else ""
  says = f"{size_text(peak)} of {size_text(room)} per device, {who}{gaps}"
  if plan.fits:
    near = not plan.program and taken > (1 - prediction.MEMORY_WITHIN) * room
    off = f", which is less than formulas may be off by ({prediction.MEMORY_WITHIN:.0%})"
    return f"fits {devices}: {says}; headroom {size_text(room - taken)}{off if near else ''}"
  much = f"{size_text(taken - room)} too much" if taken > room else "which the compiler refuses"
  return f"does not fit {devices}: {says}; {much}, so no speed is given"


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
  chip = plan.topology.chip
  if plan.topology.platform == "tpu":
    why = "the compiler for TPUs is not installed: pip install -r requirements/plan.txt"
  elif gpu_target.compiler_there(chip):
    why = f"the step was not compiled for {chip.name}"
  elif chip.name in gpu_target.TARGETS:
    why = "the compiler for NVIDIA's GPUs is not installed: make setup ACCELERATOR=gpu"
  else:
    why = f"there is no {chip.name} here to compile for"
  return f"{why}; all numbers are by formula. Accuracy: {plan.accuracy['memory']}"


def memory_table(plan: Plan) -> PlanTable:
  """Returns the parts of a device's memory, those at the peak first, and what they add up to."""
  at_peak = memory.at_peak(plan.memory)
  rows = [(part, size_text(size), "") for part, size in at_peak.items()]
  rows.append(("peak, by formula: the sum", size_text(plan.memory_at_once), ""))
  others = ((part, size) for part, size in plan.memory.items() if part not in at_peak)
  rows += [(part, "", size_text(size)) for part, size in others]
  sums = {"peak, by the compiler": plan.peak_bytes} if plan.program else {}
  sums |= {f"in the host's memory: {part}": size for part, size in plan.host_memory.items()}
  if plan.program and plan.program.host_bytes:
    sums["in the host's memory, by the compiler"] = plan.program.host_bytes
  rows += [(name, size_text(size), "") for name, size in sums.items()]
  heads = ("at the peak", "at other times")
  return PlanTable("memory per device", ("part",), heads, rows, swatches=len(at_peak))


def collectives_table(plan: Plan) -> PlanTable:
  """Returns the collectives of a step by axes and kind, those that take longest first."""
  found = by_axes(plan.sent)
  rows = [
    [
      *(one["axis"], one["kind"], one["network"], f"{one['runs']:,}", size_text(one["bytes"])),
      *map(_milliseconds, (one["seconds"], one["exposed"])),
    ]
    for one in found
  ]
  texts, numbers = ("axis", "kind", "over"), ("runs", "bytes", "ms", "exposed ms")
  shares = _shares([one["seconds"] for one in found])
  return PlanTable("collectives of a step", texts, numbers, rows, shares)


def host_table(plan: Plan) -> PlanTable:
  """Returns the transfers to and from the host's memory."""
  rows = [
    [
      *(one.direction, one.what or "all", size_text(one.bytes)),
      *map(_milliseconds, (one.seconds, one.exposed_seconds)),
    ]
    for one in plan.host
  ]
  texts, numbers = ("direction", "arrays"), ("bytes", "ms", "exposed ms")
  shares = _shares([one.seconds for one in plan.host])
  return PlanTable("transfers of a step", texts, numbers, rows, shares)


def _milliseconds(seconds: float) -> str:
  return f"{1e3 * seconds:,.1f}"


def _shares(seconds: Sequence[float]) -> list[float]:
  """Returns percents of the longest."""
  most = max(seconds, default=0.0) or 1.0
  return [100 * one / most for one in seconds]


def _in_terminal(found: PlanTable) -> Table:
  table = Table(title=found.title, title_justify="left", box=None, pad_edge=False)
  for head in (*found.texts, *found.numbers):
    table.add_column(head, justify="left" if head in found.texts else "right")
  for row in found.rows:
    table.add_row(*row)
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
  by_formula = roofline.matmul_share(chip, alone=plan.job.mesh.size == 1)
  compiled = plan.program is not None and chip.torus
  matmul = rates.matmul or (chip.matmul if compiled else by_formula)
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
  hours = f"take {units.number(plan.chip_hours)} chip-hours"
  cost = "" if plan.cost is None else f" and cost {plan.cost:,.2f}"
  return [*lines, f"budget: {units.number(plan.token_budget)} {plan.unit} {hours}{cost}"]


# ------------------------------ what lives at the peak ------------------------------

FEW_BUFFERS = 12  # rows in the terminal; the page has MORE_BUFFERS
MORE_BUFFERS = 60
SMALL_PART = 0.02  # of the peak, below which a part is not worth a line


def buffers_text(plan: Plan) -> str:
  """Returns which arrays live at the peak, where they are made, and what makes them smaller."""
  if (found := plan.at_peak) is None:
    why = "the program came from JAX's compilation cache" if plan.program else _without(plan)
    return f"no arrays at the peak: {why}"
  lines = [f"at the peak of a device's memory, {size_text(found.peak)}:"]
  if plan.topology.platform == "tpu" and plan.peak_bytes > found.peak:
    other = size_text(plan.peak_bytes)
    lines.append(f"  (the compiler's figure, {other}, is that of on-chip or host memory)")
  for part, array, split, made, until, count, size in buffers_table(found, FEW_BUFFERS).rows:
    several = f"{count} x " if array and int(count) > 1 else ""
    lines.append(f"{size:>11}  {part}{array and f', {several}{array}'}{split and f', {split}'}")
    if made or until:
      lines.append(f"{'':13}from {made or 'an unknown line'} until {until or 'an unknown line'}")
  return "\n".join([*lines, *buffers_lines(found)])


def buffers_table(found: buffers.Assignment, most: int) -> PlanTable:
  """Returns the kinds of arrays at the peak, those with the most bytes first."""
  groups = found.groups()
  rows = [
    [one.part, *_life(one), f"{count}", size_text(size)] for one, count, size in groups[:most]
  ]
  if others := groups[most:]:
    count = sum(count for _, count, _ in others)
    rows.append(["others", "", "", "", "", f"{count}", size_text(sum(size for *_, size in others))])
  texts = ("at the peak", "array of a device", "split", "made at", "needed last at")
  shares = _shares([size for *_, size in groups[:most]]) + [0.0] * (len(rows) - len(groups[:most]))
  return PlanTable("memory at the peak", texts, ("count", "bytes"), rows, shares)


def _life(one: buffers.Buffer) -> tuple[str, str, str, str]:
  if one.until == buffers.ALWAYS:
    return "", "", "", ""
  return one.array, one.split, one.made, one.until


def buffers_lines(found: buffers.Assignment) -> Iterator[str]:
  """Yields the gaps between temporaries, and for each part of the peak what makes it smaller."""
  gaps = size_text(found.gaps)
  yield f"gaps between temporaries: {gaps} more are allocated than live at the peak"
  for part, size in found.parts().items():
    if size >= SMALL_PART * found.peak and part in buffers.FIXES:
      yield f"less of {part} ({size_text(size)}): {buffers.FIXES[part]}"


def _curve(found: buffers.Assignment) -> charts.Chart:
  """Returns the picture of a device's memory over the instructions of the program."""
  at = found.curve.index(found.peak)
  points = [(place, size / 2**30) for place, size in enumerate(found.curve)]
  mark = charts.Mark("bad", at, f"the peak, {size_text(found.peak)}")
  line = charts.Line("in use", points)
  return charts.Chart("GiB in use", [line], [mark], from_zero=True, over="instruction")


# ------------------------------ as a page ------------------------------

GAPS = 10  # of those waited for, how many are listed


def html(plan: Plan, *, command: str = "") -> str:
  """Returns the page; `command` is the one that asked for it."""
  sides = [Side(plan.title, plan.job, (), plan.topology.name)]
  limit, peak = plan.topology.usable_bytes, plan.peak_bytes if plan.program else None
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
    bar=memory_bar(memory.at_peak(plan.memory), limit, peak),
    buffers=plan.at_peak and _buffers(plan.at_peak),
    tables={
      "memory": memory_table(plan),
      "collectives": collectives_table(plan),
      "each": _each(plan),
      "host": host_table(plan),
      "gaps": _gaps(plan.timeline.gaps[:GAPS] if plan.timeline else ()),
      "constants": _constants(plan),
    },
    layers=[_layer_rows(one) for one in (plan.timeline.layers if plan.timeline else ())],
    no_layers=missing_lines(plan.timeline),
    step=_step(plan) if plan.times else None,
    parameters=Arrays(sides).section("parameters"),
    sources=SOURCES,
  )


def _buffers(found: buffers.Assignment) -> dict[str, Any]:
  return {
    "chart": charts.svg(_curve(found), name="memory", wide=True),
    "table": buffers_table(found, MORE_BUFFERS),
    "lines": [*buffers_lines(found)],
  }


def _each(plan: Plan) -> PlanTable:
  """Returns the collectives one by one, with the line of code that caused each."""
  rows = [
    [
      *("+".join(one.axes), one.kind, one.source),
      *(f"{one.runs:,}", size_text(one.bytes), _milliseconds(one.seconds)),
    ]
    for one in sorted(plan.sent, key=lambda one: -one.seconds)
  ]
  return PlanTable("", ("axis", "kind", "caused by"), ("runs", "bytes", "ms"), rows)


def _gaps(gaps: Sequence[Gap]) -> PlanTable:
  rows = [
    [f"{gap.what} {gap.when}".strip(), gap.line, f"{gap.runs:,}", units.seconds(gap.seconds)]
    for gap in gaps
  ]
  texts = ("waits of a step, the most expensive first", "line of code")
  return PlanTable("", texts, ("runs", "time"), rows)


def _lane_bar(kind: str, begin: float, seconds: float, whole: float, title: str) -> dict[str, Any]:
  """Returns a bar of a row, with its place in percent of the row."""
  place = {"left": round(100 * begin / whole, 3), "width": round(100 * seconds / whole, 3)}
  return {**place, "kind": kind, "text": "", "title": f"{title}: {units.seconds(seconds)}"}


def _layer_rows(layer: Layer) -> dict[str, Any]:
  rows = [
    {
      "name": name,
      "bars": [
        _lane_bar(kind, bar.begin, bar.seconds, layer.seconds, bar.text) for bar, kind in bars
      ],
    }
    for name, bars in rows_of(layer).items()
  ]
  return {"head": head(layer), "line": where(layer), "rows": rows, "parts": parts(layer)}


def _step(plan: Plan) -> dict[str, Any]:
  """Returns the numbers of a step, and its picture: what it consists of, and each term by itself.

  All rows have one scale, from 0 to the upper end of the expected range. The part of a transfer
  that the device waits for is marked.
  """
  low, expected, high = plan.step_seconds

  def row(name: str, *bars: tuple[str, float, str], text: str = "") -> dict[str, Any]:
    """Returns a row of bars, each (kind, seconds, title), one after another."""
    begins = [0.0, *itertools.accumulate(seconds for _, seconds, _ in bars)]
    drawn = [
      _lane_bar(kind, begin, seconds, high, title)
      for begin, (kind, seconds, title) in zip(begins, bars, strict=False)
    ]
    return {"name": name, "text": text or units.seconds(begins[-1]), "bars": drawn}

  def sent(name: str, seconds: float, waited: float) -> dict[str, Any]:
    hidden = ("sent", seconds - waited, f"{name}, hidden")
    return row(name, hidden, ("wait", waited, f"{name}, waited for"))

  parts = [
    ("computing" if name == "computing" else "wait", seconds, name)
    for name, seconds in plan.times.parts.items()
  ]
  rows = [row("step: " + ", ".join(plan.times.parts), *parts, text=units.seconds(expected))]
  for name, kind in (("compute", "matmul"), ("HBM", "memory")):
    rows.append(row(f"{name} alone", (kind, terms(plan)[name], name)))
  for one in by_axes(plan.sent):
    rows.append(sent(f"{one['axis']}, {one['kind']}", one["seconds"], one["exposed"]))
  for one in plan.times.host:
    name = " ".join(filter(None, (one.direction, one.what)))
    rows.append(sent(name, one.seconds, one.exposed_seconds))
  hours = f"{units.number(plan.chip_hours)} chip-hours"
  facts = [
    ("a step", f"{units.seconds(expected)} ({units.seconds(low)} to {units.seconds(high)})"),
    (f"{plan.unit} per second and device", f"{plan.rate:,.0f}"),
    ("MFU", f"{100 * plan.mfu():.1f} %"),
    ("with causal attention counted half", f"{100 * plan.mfu(causal=True):.1f} %"),
    ("largest term", max(terms(plan), key=terms(plan).get)),
    (f"{units.number(plan.token_budget)} {plan.unit}", hours),
  ]
  if plan.cost is not None:
    facts.append(("they cost", f"{plan.cost:,.2f}"))
  notes = [constants(plan), f"accuracy: {plan.accuracy['times']}"]
  notes += [host_line(plan)] if plan.host else []
  return {"facts": facts, "rows": rows, "notes": notes, "low": round(100 * low / high, 3)}


def _constants(plan: Plan) -> PlanTable:
  """Returns the assumptions, with their sources, including numbers set by the config."""
  chip = plan.topology.chip
  shares = ("matmul", "attention", "memory")
  sources = {name: getattr(chip, f"{name}_source") for name in ("flops", *shares)}
  rows = [
    (f"{chip.name}.{name}", sources.get(name.rpartition("_")[2], chip.source), f"{value:.4g}")
    for name, value in vars(chip).items()
    if isinstance(value, float) and (value or not name.endswith("_flops"))
  ]
  rows += [(name, REASONS[name], f"{value:.4g}") for name, value in vars(plan.rates).items()]
  return PlanTable("", ("planning.constants", "source or reason"), ("value",), rows)
