"""A plan as a person reads it in a terminal: the verdict first, then why."""

import io

from rich.console import Console
from rich.table import Table

from partitioning.layout import size_text
from planning.plan import Plan


def text(plan: Plan, *, width: int = 110) -> str:
  """Returns the plan as text."""
  out = io.StringIO()
  console = Console(file=out, width=width, highlight=False, no_color=True)
  console.print(verdict(plan), soft_wrap=True)
  if plan.program is None:
    console.print(_without(plan), soft_wrap=True)
  for line in plan.advice:
    console.print(f"  would fit, by formula: {line}", soft_wrap=True)
  console.print()
  console.print(_memory(plan))
  if plan.times:
    console.print(_collectives(plan))
  for line in _time(plan):
    console.print(line, soft_wrap=True)
  for warning in plan.warnings:
    console.print(f"warning: {warning}", soft_wrap=True)
  return out.getvalue().rstrip()


def verdict(plan: Plan) -> str:
  """Returns whether it fits, in one line."""
  room, peak = int(plan.topology.chip.hbm_bytes), plan.peak_bytes
  who = "the compiler" if plan.program else "the formulas, without a compiler"
  devices = f"{plan.job.mesh.size} devices of {plan.topology.name}"
  says = f"{size_text(peak)} of {size_text(room)} per device, say {who}"
  says = says.replace("say the compiler", "says the compiler")
  if plan.fits:
    return f"fits {devices}: {says}; headroom {size_text(room - peak)}"
  return f"does not fit {devices}: {says}; {size_text(peak - room)} too much"


def _without(plan: Plan) -> str:
  """Returns why there is no compiler, and what that means."""
  if plan.topology.platform == "tpu":
    why = "the compiler for TPUs is not installed: pip install -r requirements-plan.txt"
  else:
    why = f"there is no {plan.topology.chip.name} here to compile for"
  return f"{why}; so all numbers are by formulas alone, and collectives are not counted"


def _memory(plan: Plan) -> Table:
  table = Table(title="memory per device", title_justify="left", box=None, pad_edge=False)
  table.add_column("part")
  table.add_column("by formula", justify="right")
  for part, size in plan.memory.items():
    table.add_row(part, size_text(size))
  table.add_row("together", size_text(sum(plan.memory.values())))
  if plan.program:
    table.add_row("the compiler's peak", size_text(plan.peak_bytes))
  return table


def _collectives(plan: Plan) -> Table:
  table = Table(title="collectives of a step", title_justify="left", box=None, pad_edge=False)
  for name, side in [("axis", "left"), ("kind", "left"), ("over", "left"), ("runs", "right"),
                     ("bytes", "right"), ("ms", "right"), ("waited", "right")]:  # fmt: skip
    table.add_column(name, justify=side)
  rows: dict[tuple[str, str, str], list[float]] = {}
  for one in plan.times.sent:
    count = one.collective.count or 1
    key = "+".join(one.collective.axes), one.collective.kind, one.wire.network
    row = rows.setdefault(key, [0, 0, 0.0, 0.0])
    numbers = (count, count * one.collective.bytes, one.seconds, one.exposed_seconds)
    rows[key] = [a + b for a, b in zip(row, numbers, strict=True)]
  for key, (count, size, seconds, waited) in sorted(rows.items(), key=lambda row: -row[1][2]):
    times = (f"{1e3 * value:,.1f}" for value in (seconds, waited))
    table.add_row(*key, f"{count:,.0f}", size_text(int(size)), *times)
  return table


def _time(plan: Plan) -> list[str]:
  low, expected, high = plan.step_seconds
  rate = plan.tokens / expected / plan.job.mesh.size
  lines = [
    f"a step takes {expected:.3g} s ({low:.3g} to {high:.3g}); {rate:,.0f} tokens/s per device; "
    f"MFU {100 * plan.mfu():.1f} %, with attention's scores halved for the mask "
    f"{100 * plan.mfu(causal=True):.1f} %"
  ]
  if times := plan.times:
    terms = {
      "products": times.compute,
      "the memory": times.memory,
      "collectives": times.communication,
    }
    parts = ", ".join(f"{name} {1e3 * seconds:,.0f} ms" for name, seconds in terms.items())
    most = max(terms, key=terms.get)
    lines.append(f"alone would take: {parts}; waited for collectives {1e3 * times.exposed:,.0f} ms")
    lines.append(f"the step is bound by {most}")
  return lines
