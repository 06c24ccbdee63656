"""A plan as a person reads it in a terminal: the verdict first, then why."""

import dataclasses
import io

from rich.console import Console
from rich.table import Table

from partitioning.layout import size_text
from planning.plan import Plan


@dataclasses.dataclass
class Row:
  """All collectives of one kind along the same axes, of one step."""

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
  for line in [verdict(plan), *remarks(plan)]:
    console.print(line, soft_wrap=True)
  console.print()
  console.print(_memory(plan))
  if plan.sent:
    console.print(_collectives(plan))
  for line in [*time_lines(plan), *(f"warning: {warning}" for warning in plan.warnings)]:
    console.print(line, soft_wrap=True)
  return out.getvalue().rstrip()


def verdict(plan: Plan) -> str:
  """Returns whether it fits, in one line."""
  room, peak = int(plan.topology.chip.hbm_bytes), plan.peak_bytes
  who = "says the compiler" if plan.program else "say the formulas, without a compiler"
  devices = f"{plan.job.mesh.size} devices of {plan.topology.name}"
  says = f"{size_text(peak)} of {size_text(room)} per device, {who}"
  if plan.fits:
    return f"fits {devices}: {says}; headroom {size_text(room - peak)}"
  return f"does not fit {devices}: {says}; {size_text(peak - room)} too much"


def remarks(plan: Plan) -> list[str]:
  """Returns what stands behind the numbers, and what would fit where this does not."""
  advice = [f"  would fit, by formula: {line}" for line in plan.advice]
  return advice if plan.program else [_without(plan), *advice]


def _without(plan: Plan) -> str:
  """Returns why there is no compiler, and what that means."""
  if plan.topology.platform == "tpu":
    why = "the compiler for TPUs is not installed: pip install -r requirements-plan.txt"
  else:
    why = f"there is no {plan.topology.chip.name} here to compile for"
  return f"{why}; so all numbers are by formulas alone"


def _memory(plan: Plan) -> Table:
  table = _table("memory per device", ("part",), ("by formula",))
  for part, size in plan.memory.items():
    table.add_row(part, size_text(size))
  table.add_row("most at a time", size_text(plan.memory_at_once))
  if plan.program:
    table.add_row("the compiler's peak", size_text(plan.peak_bytes))
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
  left, right = ("axis", "kind", "over"), ("runs", "bytes", "ms", "waited")
  table = _table("collectives of a step", left, right)
  for row in sums(plan):
    times = (f"{1e3 * value:,.1f}" for value in (row.seconds, row.waited))
    table.add_row(row.axis, row.kind, row.network, f"{row.runs:,}", size_text(row.bytes), *times)
  return table


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
  table = Table(title=title, title_justify="left", box=None, pad_edge=False)
  for name in left:
    table.add_column(name)
  for name in right:
    table.add_column(name, justify="right")
  return table


def terms(plan: Plan) -> dict[str, float]:
  """Returns what a step's seconds would be if it did one thing alone."""
  if plan.times is None:
    return {}
  times = plan.times
  return {
    "products": times.compute,
    "the memory": times.memory,
    "collectives": times.communication,
  }


def constants(plan: Plan) -> str:
  """Returns what the times follow from, in one line; plan.html has the sources."""
  chip, rates = plan.topology.chip, plan.rates
  speeds = f"{chip.flops / 1e12:.4g} TFLOP/s, memory {chip.hbm_bandwidth / 1e12:.3g} TB/s"
  speeds += f", links {chip.link_bandwidth / 1e9:.3g} GB/s"
  shares = f"{rates.matmul:g}, {rates.memory:g} and {rates.link:g}"
  return f"taken for {chip.name}: {speeds}, of which {shares} are reached"


def time_lines(plan: Plan) -> list[str]:
  """Returns how long a step takes, what bounds it, and what a budget of tokens takes."""
  low, expected, high = plan.step_seconds
  rate = plan.tokens / expected / plan.job.mesh.size
  lines = [
    f"a step takes {expected:.3g} s ({low:.3g} to {high:.3g}); "
    f"{rate:,.0f} {plan.unit}/s per device; "
    f"MFU {100 * plan.mfu():.1f} %, with attention's scores halved for the mask "
    f"{100 * plan.mfu(causal=True):.1f} %"
  ]
  if times := plan.times:
    alone = terms(plan)
    parts = ", ".join(f"{name} {1e3 * seconds:,.3g} ms" for name, seconds in alone.items())
    most = max(alone, key=alone.get)
    waited = f"waited for collectives {1e3 * times.exposed:,.3g} ms"
    lines.append(f"alone would take: {parts}; {waited}")
    lines.append(f"the step is bound by {most}")
  lines.append(constants(plan))
  budget = f"{plan.token_budget:.3g} {plan.unit} take {plan.chip_hours:,.3g} chip-hours"
  return [*lines, budget if plan.cost is None else f"{budget} and cost {plan.cost:,.2f}"]
