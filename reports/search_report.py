"""The result of a search as text: for each topology a table, and overrides to copy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table

from partitioning.rules import size_text
from planning import search_space
from planning.search_results import COMPILER, FORMULA, RUN, Found, Tried
from reports import charts, grid
from reports.drawings import plain
from reports.html import render
from reports.layout_text import plain_table
from runtime import units

# How each source is meant.
SOURCES = {
  COMPILER: "memory and time by the compiler and the plan's clock; nothing was run",
  FORMULA: "memory and time by formula; nothing was compiled or run",
  RUN: "memory by the compiler, time measured in short runs: the fastest step of each",
}
SETTINGS = "rematerialization, others"  # the last column
REASONS = 3  # for refusals that are listed
MOST_ROWS = 5  # of the table, and the config as given
ALIKE = 0.01  # settings whose steps differ by less are one row


def text(found: Sequence[Found], command: str) -> str:
  """Returns the result.

  Args:
    found: of each topology.
    command: that trains the config, to which the overrides are added.
  """
  lines = [line for one in found for line in [*_of_topology(one), ""]]
  return "\n".join([*lines, *summary(found, command)])


def _of_topology(found: Found) -> Iterator[str]:
  yield f"{heading(found)}: {counts(found)}"
  if found.note:
    yield found.note
  yield verdict(found)
  yield SOURCES[found.source]
  yield from nearest(found)
  rows = listed(found)
  if not rows:
    return
  table, same = _table(found, rows)
  if same:
    yield f"all of them: {same}"
  yield plain(table)
  if any(row.front for row in rows.values()):
    yield "* no other setting takes less memory and less time (the Pareto front)"
  if left := len(found.rows) - len(rows):
    yield f"{left} more on the page, within {ALIKE:.0%} of one of these, or slower"
  yield "overrides, by number:"
  for place, row in rows.items():
    yield f"  {place}: {overrides(row)}"


def listed(found: Found) -> dict[int, Tried]:
  """Returns the settings of the table by their places on the page, which has all of them.

  One that saves neither 1 % of the time nor of the memory of a row is left out.
  """
  rows: dict[int, Tried] = {}
  for place, row in enumerate(found.rows, start=1):
    alike = row.seconds is not None and any(
      row.seconds_per_token <= (1 + ALIKE) * one.seconds_per_token
      and row.bytes >= (1 - ALIKE) * one.bytes
      for one in rows.values()
      if one.seconds is not None
    )
    if row.given or (not alike and len(rows) < MOST_ROWS):
      rows[place] = row
  return rows


def heading(found: Found) -> str:
  """Returns `64 devices of v5p:4x4x4`."""
  return f"{found.devices} devices of {found.topology}"


def counts(found: Found) -> str:
  """Returns how many settings were looked at, and how."""
  texts = [f"{len(found.estimates)} settings by formula"]
  if found.source != FORMULA:
    how = "the compiler" if found.source == COMPILER else "short runs"
    texts.append(f"{len(found.tried)} by {how}")
  if refused := sum(found.refused.values()):
    texts.append(f"{refused} refused")
  return f"{', '.join(texts)}; limit {size_text(int(found.limit))} per device"


def verdict(found: Found) -> str:
  """Returns the best setting, next to the config as given."""
  best, given = found.best, found.as_given
  if best is None:
    least = min((row.bytes for row in found.rows if row.bytes), default=0)
    least = least or min(one.bytes for one in found.estimates)
    return f"nothing fits: the setting with the least memory needs {size_text(least)} per device"
  line = f"fastest: {describe(best)}, {numbers(found, best)}"
  if best.given:
    return f"{line}; it is the config as given"
  if given is None:
    return line
  if given.seconds is None:
    return f"{line}; the config as given {given.failed or 'does not fit'}"
  factor = given.seconds_per_token / best.seconds_per_token
  return f"{line}; {factor:.2f} times as fast as the config as given ({step_text(given.seconds)})"


def describe(row: Tried) -> str:
  """Returns the mesh and what else a setting says."""
  one = row.estimate
  texts = [one.mesh_text, f"rematerialization {one.rematerialization}"]
  if one.microbatches > 1:
    texts.append(f"{one.microbatches} microbatches")
  return ", ".join([*texts, *others(row)])


def others(row: Tried) -> list[str]:
  """Returns the overrides of a setting besides mesh, rematerialization and microbatches."""
  counts = (search_space.MICROBATCHES, search_space.OF_A_PIPELINE)
  known = (search_space.REMATERIALIZATION, *counts)
  pairs = row.estimate.setting.items()
  return [f"{k}={v}" for k, v in pairs if k not in known and not k.startswith("mesh.")]


def settings(row: Tried, *, short: bool = False) -> str:
  """Returns what a setting has besides mesh and microbatches; `short`: keys without sections."""
  others_of = [one.partition(".")[2] if short else one for one in others(row)]
  return ", ".join([row.estimate.rematerialization, *others_of])


def numbers(found: Found, row: Tried) -> str:
  """Returns time, speed and memory of a setting that fits."""
  texts = [
    f"{step_text(row.seconds)} per step",
    f"{found.rate(row):,.0f} {found.unit}/s per device",
    size_text(row.bytes),
  ]
  if (cost := found.cost(row)) is not None:
    texts.append(f"{cost:,.2f} for {units.number(found.budget)} {found.unit}")
  return ", ".join(texts)


def columns(found: Found) -> list[str]:
  """Returns the titles of the table."""
  titles = ["", "mesh", "microbatches", "memory", "step", f"{found.unit}/s per device"]
  more = [*(["cost"] if found.price else []), *([] if found.source == FORMULA else ["by formula"])]
  return [*titles, *more]


def cells(found: Found, place: int, row: Tried) -> list[str]:
  """Returns a row of the table; `place` counts from 1."""
  mark = "*" if row.front else " "
  one, fits = row.estimate, row.seconds is not None
  given = "as given " if row.given else ""
  texts = [f"{given}{place}{mark}", one.mesh_text, str(one.microbatches)]
  texts.append(size_text(row.bytes) if row.bytes else "")
  texts.append(step_text(row.seconds) if fits else ("failed" if row.failed else "does not fit"))
  texts.append(f"{found.rate(row):,.0f}" if fits else "")
  if found.price:
    texts.append(f"{found.cost(row):,.2f}" if fits else "")
  if found.source == FORMULA:
    return texts
  return [*texts, f"{size_text(one.bytes)}, {step_text(one.seconds)}"]


def step_text(seconds: float) -> str:
  """Returns the time of a step, precise enough to compare settings: `1,404 ms`."""
  return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else units.seconds(seconds)


def _table(found: Found, rows: Mapping[int, Tried]) -> tuple[Table, str]:
  """Returns the table, and what its rows have in common: those columns are left out."""
  titles = [*columns(found), SETTINGS]
  texts = [[*cells(found, place, row), settings(row, short=True)] for place, row in rows.items()]
  same = {
    title: column[0]
    for title, column in zip(titles, zip(*texts, strict=True), strict=True)
    if title in ("mesh", "microbatches", SETTINGS) and len({*column}) == 1 < len(column)
  }
  table = plain_table()
  for title in (one for one in titles if one not in same):
    table.add_column(title, justify="left" if title in ("mesh", SETTINGS) else "right")
  for row in texts:
    table.add_row(*(text for title, text in zip(titles, row, strict=True) if title not in same))
  same = {title: text for title, text in same.items() if (title, text) != ("microbatches", "1")}
  return table, ", ".join(f"{title} {text}" for title, text in same.items())


def overrides(row: Tried) -> str:
  """Returns overrides to copy, or that there are none; and why a setting failed."""
  text = search_space.text(row.estimate.setting) or "none: the config as given"
  return f"{text} (failed: {row.failed})" if row.failed else text


def nearest(found: Found) -> list[str]:
  """Returns what would fit, where nothing does."""
  if found.fits:
    return []
  lines = []
  for more, topology, size in found.nearest:
    where = f"--topology={topology} " if topology else ""
    words = f"{where}{search_space.text(more)}"
    lines.append(f"would fit, with {size_text(size)} per device by formula: {words}")
  return lines or [
    "no change of rematerialization, offloading, rows or devices that was tried fits"
  ]


def tried_line(count: int, one: Tried, source: str) -> str:
  """Returns what was found of a setting, as it is found."""
  if one.failed:
    result = f"failed: {one.failed}"
  elif one.seconds is None:
    result = f"does not fit, {size_text(one.bytes)}"
  else:
    result = f"{step_text(one.seconds)} per step, {size_text(one.bytes)}"
  return f"{count} by {source}: {describe(one)}: {result}"


def summary(found: Sequence[Found], command: str) -> list[str]:
  """Returns the fastest of all topologies, the cheapest if prices are known, and commands."""
  ran = [(one, one.best) for one in found if one.fits]
  if not ran:
    return ["nothing fits on any of them"] if len(found) > 1 else []
  lines = []
  if len(found) > 1:
    fast, row = min(ran, key=lambda pair: pair[0].hours(pair[1]))
    hours = f"{units.number(fast.hours(row))} hours for {units.number(fast.budget)} {fast.unit}"
    lines.append(f"fastest of all: {heading(fast)}, {hours}")
    if all(one.price for one, _ in ran):
      cheap, row = min(ran, key=lambda pair: pair[0].cost(pair[1]))
      lines.append(f"cheapest of all: {heading(cheap)}, {cheap.cost(row):,.2f}")
  for one, row in ran:
    words = search_space.text({**row.estimate.setting, **one.over})
    lines.append(f"to train on {one.topology}: {command} {words}".rstrip())
  return lines


# ------------------------------ as a page ------------------------------

LETTER, LINE = 8, 16  # of the labels, in pixels
FARTHEST = 1.6  # of the fastest: slower settings are left out of the picture
GIB = 2**30


def html(found: Sequence[Found], *, title: str, command: str = "") -> str:
  """Returns the page.

  Args:
    found: of each topology.
    title: of the page.
    command: that wrote it.
  """
  return render(
    "search.html.j2",
    title=title,
    command=command,
    topologies=[_topology(one, f"search{number}") for number, one in enumerate(found)],
  )


def _topology(found: Found, name: str) -> dict[str, Any]:
  return {
    "heading": heading(found),
    "counts": counts(found),
    "note": found.note,
    "fits": found.fits,
    "verdict": verdict(found),
    "source": SOURCES[found.source],
    "picture": picture(found, name),
    "columns": columns(found),
    "rows": [
      {
        "cells": cells(found, place, row),
        "rematerialization": settings(row),
        "failed": row.failed,
        "overrides": search_space.text(row.estimate.setting),
      }
      for place, row in enumerate(found.rows, start=1)
    ],
    "nearest": nearest(found),
    "refused": list(found.refused.items())[:REASONS],
  }


def picture(found: Found, name: str = "search") -> Markup:
  """Returns memory against the time of a step, with a line for the Pareto front; "" of nothing.

  Small points are by formula; large ones were compiled or run, and are numbered as in the table.

  Args:
    found: on a topology.
    name: unique on the page: a prefix of ids.
  """
  rows = [row for row in found.rows if row.seconds is not None]
  if not rows:
    return Markup("")
  per_step = rows[0].estimate.tokens  # with several batch sizes, all as if with the fastest one's
  most = FARTHEST * rows[0].seconds_per_token * per_step
  faint = [
    (one.bytes / GIB, one.seconds_per_token * per_step)
    for one in found.estimates
    if one.fits(found.limit) and one.seconds_per_token * per_step <= most
  ]
  bold = [(row.bytes / GIB, row.seconds_per_token * per_step) for row in rows]
  front = sorted(point for point, row in zip(bold, rows, strict=True) if row.front)
  titles = {}
  with matplotlib.rc_context(charts.SETTINGS):
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    charts.plain_axes(axes, "both")
    axes.plot(*zip(*faint, strict=True), ".", color=charts.INK, alpha=0.45) if faint else None
    axes.plot(*zip(*front, strict=True), color=charts.ACCENT)
    for place, (point, row) in enumerate(zip(bold, rows, strict=True), start=1):
      titles[f"setting{place}"] = f"{place}: {describe(row)}, {numbers(found, row)}"
      color = charts.ACCENT if row.front else charts.INK
      over = 3 if row.front else 2.5  # others at about the same place
      axes.plot(*point, "o", color=color, markersize=8, zorder=over, gid=f"setting{place}")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: step_text(y)))
    axes.set_xlabel("peak memory of a device, GiB")
    figure.draw_without_rendering()
    for number, some in _labels(axes.transData.transform(bold).tolist()):
      offset = {"xytext": (7, 4), "textcoords": "offset points"}
      axes.annotate(_label(some), bold[number], **offset)
  label = f"memory and time of a step on {found.topology}"
  return charts.for_page(figure, label, name, titles)


def _labels(places: Sequence[tuple[float, float]]) -> list[tuple[int, list[int]]]:
  """Returns (where a label is, its points from 1): of those that would overlap one for all."""
  found: list[tuple[int, list[int]]] = []
  for number in sorted(range(len(places)), key=lambda i: places[i]):
    x, y = places[number]
    for first, some in found:
      left, up = places[first]
      if abs(y - up) < LINE and x - left < LETTER * (1 + len(_label(some))):
        some.append(number + 1)
        break
    else:
      found.append((number, [number + 1]))
  return found


def _label(some: Sequence[int]) -> str:
  """Returns `1-3, 7` of 1, 2, 3 and 7, in any order."""
  return grid.numbers_text(some)[0]
