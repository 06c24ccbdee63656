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
    time_lines=plan_text.time_lines(plan),
    times=_times(plan),
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
        "numbers": [*_runs(row), plan_text.duration(row.waited)],
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
        *map(plan_text.duration, (one.seconds, one.exposed_seconds)),
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
      "title": f"{what}: {plan_text.duration(bar.seconds)}",
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
  return {"texts": texts, "numbers": [f"{gap.runs:,}", plan_text.duration(gap.seconds)]}


def _runs(row: Any) -> list[str]:
  return [f"{row.runs:,}", size_text(row.bytes), plan_text.duration(row.seconds)]


def _times(plan: Plan) -> list[dict[str, Any]]:
  """Returns the roofline terms and the range of the step's time."""
  if plan.step_seconds is None:
    return []
  names = ("step, low", "step, expected", "step, high")
  values = {**plan_text.terms(plan), **dict(zip(names, plan.step_seconds, strict=True))}
  most = max(values.values())
  return [
    {"name": name, "text": plan_text.duration(seconds), "percent": 100 * seconds / most}
    for name, seconds in values.items()
  ]


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
