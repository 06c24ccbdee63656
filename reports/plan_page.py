"""A plan as an HTML page: the verdict, memory, communication, time, the layout, the constants.

This module collects the content; `templates/plan.html.j2` renders it.
"""

from collections.abc import Sequence
from typing import Any

from partitioning.rules import size_text
from planning import memory
from planning.plan import Plan
from planning.timeline import Bar, Gap, Layer
from reports import plan_text
from reports.html import memory_bar, render
from reports.layout_page import Arrays, Side, pipelines
from runtime import units
from runtime.chips import REASONS, SOURCES

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
    verdict=plan_text.verdict(plan),
    notes=plan_text.notes(plan),
    warnings=plan.warnings,
    advice=[(size_text(one.bytes), one.overrides) for one in plan.advice.fitting],
    no_advice=[] if plan.advice.fitting else plan_text.advice(plan),
    pipelines=pipelines(sides),
    memory=_memory(plan),
    **_communication(plan),
    host=_host(plan),
    layers=[_layer(one) for one in (plan.timeline.layers if plan.timeline else ())],
    no_layers=[*plan_text.missing_lines(plan.timeline)],
    gaps=[_gap(one) for one in (plan.timeline.gaps[:GAPS] if plan.timeline else ())],
    step=_step(plan) if plan.times else None,
    parameters=Arrays(sides).section("parameters"),
    constants=_constants(plan),
    sources=SOURCES,
  )


def _memory(plan: Plan) -> dict[str, Any]:
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
  sums = plan_text.sums(plan)
  most = max([row.seconds for row in sums], default=0) or 1
  return {
    "collectives": [
      {
        **{"axis": row.axis, "kind": row.kind, "network": row.network},
        "numbers": [*_runs(row), units.seconds(row.waited)],
        "percent": 100 * row.seconds / most,
      }
      for row in sums
    ],
    "each": [
      {"axis": "+".join(one.axes), "kind": one.kind, "numbers": _runs(one), "source": one.source}
      for one in sorted(plan.sent, key=lambda one: -one.seconds)
    ],
  }


def _host(plan: Plan) -> list[dict[str, Any]]:
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


def _layer(layer: Layer) -> dict[str, Any]:
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
  parts = plan_text.parts(layer)
  return {
    "head": plan_text.head(layer),
    "line": plan_text.where(layer),
    "rows": rows,
    "parts": parts,
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
    seconds = plan_text.terms(plan)[name]
    rows.append(row(f"{name} alone", seconds, bar(kind, 0, seconds, name)))
  for one in plan_text.sums(plan):
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
    ("largest term", max(plan_text.terms(plan), key=plan_text.terms(plan).get)),
    (
      f"{units.number(plan.token_budget)} {plan.unit}",
      f"{units.number(plan.chip_hours)} chip-hours",
    ),
  ]
  if plan.cost is not None:
    facts.append(("they cost", f"{plan.cost:,.2f}"))
  notes = [plan_text.constants(plan), f"accuracy: {plan.accuracy['times']}"]
  notes += [plan_text.host_line(plan)] if plan.host else []
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
