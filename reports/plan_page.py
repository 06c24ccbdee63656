"""A plan as one HTML page: the verdict, memory, what each mesh axis carries, time, the layout."""

import html as markup
from collections.abc import Mapping

from analysis.accelerators import ACCELERATORS
from analysis.chips import REASONS, SOURCES
from partitioning.shardings import size_text
from planning.plan import Plan
from reports import plan_text
from reports.html import HEAD, TAIL
from reports.layout_page import Page, Side, legend, meshes, table

WIDTH = 560  # pixels of the longest bar


def html(plan: Plan) -> str:
  """Returns the page, which needs nothing else."""
  side = Side(plan.title, plan.job, (), plan.topology.name)
  page, name = Page([side]), f"{plan.title} on {plan.topology.name}"
  notes = [*plan_text.remarks(plan), *(f"warning: {warning}" for warning in plan.warnings)]
  parts = [
    HEAD.replace("TITLE", markup.escape(f"Plan: {name}")),
    f"<h1>Plan: {markup.escape(name)}</h1>",
    f"<p><b>{markup.escape(plan_text.verdict(plan))}</b></p>",
    *(f"<p>{markup.escape(note)}</p>" for note in notes),
    meshes([side]),
    "<h2>Memory per device</h2>",
    _memory(plan),
    "<h2>What each mesh axis carries in a step</h2>",
    _axes(plan),
    "<h2>Time of a step</h2>",
    _time(plan),
    "<h2>Layout of the parameters</h2>",
    legend([side]),
    page.section("parameters", folded=True),
    "<h2>Constants</h2>",
    _constants(plan),
    TAIL,
  ]
  return "\n".join(parts)


def _bar(share: float) -> str:
  return f'<i class="bar" style="width:{max(1, round(WIDTH * share))}px"></i>'


def _bars(title: str, values: Mapping[str, float], texts: Mapping[str, str], most: float) -> str:
  """Returns a table of names, values and bars, the longest possible one for `most`."""
  rows = [
    ("", [markup.escape(name), texts[name], _bar(value / most)]) for name, value in values.items()
  ]
  return table([title, "", ""], rows)


def _memory(plan: Plan) -> str:
  """Returns the parts by formula, what the compiler says, and the room that there is."""
  room = plan.topology.chip.hbm_bytes
  sizes: dict[str, float] = dict(plan.memory)
  sizes["peak, by formula"] = plan.memory_at_once
  if plan.program:
    sizes["peak, by the compiler"] = plan.peak_bytes
  sizes[f"memory of a device of {plan.topology.name}"] = room
  texts = {name: size_text(int(size)) for name, size in sizes.items()}
  return _bars("part", sizes, texts, max(sizes.values()))


def _axes(plan: Plan) -> str:
  """Returns the collectives, grouped by axis; then each with the line that asked for it."""
  if plan.times is None:
    return "<p>Not computed: it does not fit.</p>"
  if not plan.sent:
    return "<p>No collectives.</p>"
  rows, sums = [], plan_text.sums(plan)
  most = max(max(row.seconds for row in sums), 1e-12)
  for row in sums:
    texts = [row.axis, row.kind, row.network, f"{row.runs:,}", size_text(row.bytes)]
    texts += [f"{1e3 * row.seconds:,.2f}", f"{1e3 * row.waited:,.2f}"]
    rows.append(("", [*map(markup.escape, texts), _bar(row.seconds / most / 2)]))
  heads = ["mesh axis", "kind", "over", "runs", "bytes", "ms", "exposed ms", ""]
  lines = [
    (
      "",
      [
        *("+".join(one.axes), one.kind, f"{one.runs:,}", size_text(one.bytes)),
        f"{1e3 * one.seconds:,.2f}",
        markup.escape(one.source),
      ],
    )
    for one in sorted(plan.sent, key=lambda one: -one.seconds)
  ]
  each = table(["axis", "kind", "runs", "bytes", "ms", "asked for by"], lines)
  return (
    f"{table(heads, rows)}<details><summary><b>{len(lines)} collectives</b> "
    f"<small>with the line that asked for each</small></summary>{each}</details>"
  )


def _time(plan: Plan) -> str:
  if plan.step_seconds is None:
    return "<p>Not computed: it does not fit.</p>"
  low, expected, high = plan.step_seconds
  values = {
    **plan_text.terms(plan),
    "step, low": low,
    "step, expected": expected,
    "step, high": high,
  }
  texts = {name: plan_text.duration(seconds) for name, seconds in values.items()}
  said = "".join(f"<p>{markup.escape(line)}</p>" for line in plan_text.time_lines(plan))
  return said + _bars("term", values, texts, max(values.values()))


def _constants(plan: Plan) -> str:
  """Returns what was taken to be so, with sources; a config's own numbers stand here too."""
  chip = plan.topology.chip
  peak = ACCELERATORS[chip.name].source if chip.name in ACCELERATORS else chip.source
  rows = [
    (f"{chip.name}.{name}", f"{value:.4g}", peak if name == "flops" else chip.source)
    for name, value in vars(chip).items()
    if isinstance(value, float)
  ]
  rows += [(name, f"{value:.4g}", REASONS[name]) for name, value in vars(plan.rates).items()]
  values = table(
    ["planning.constants", "value", "source or reason"],
    [("", list(map(markup.escape, row))) for row in rows],
  )
  return f"{values}<p>Sources: {markup.escape(SOURCES)}.</p>"
