"""The result of a search as an HTML page; `templates/search.html.j2` renders it."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from planning import search_space
from planning.search_results import Found
from reports import charts, search_text
from reports.html import render

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
    "heading": search_text.heading(found),
    "counts": search_text.counts(found),
    "note": found.note,
    "fits": found.fits,
    "verdict": search_text.verdict(found),
    "source": search_text.SOURCES[found.source],
    "picture": picture(found, name),
    "columns": search_text.columns(found),
    "rows": [
      {
        "cells": search_text.cells(found, place, row),
        "rematerialization": search_text.settings(row),
        "failed": row.failed,
        "overrides": search_space.text(row.estimate.setting),
      }
      for place, row in enumerate(found.rows, start=1)
    ],
    "nearest": search_text.nearest(found),
    "refused": list(found.refused.items())[: search_text.REASONS],
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
      titles[f"setting{place}"] = (
        f"{place}: {search_text.describe(row)}, {search_text.numbers(found, row)}"
      )
      color = charts.ACCENT if row.front else charts.INK
      over = 3 if row.front else 2.5  # others at about the same place
      axes.plot(*point, "o", color=color, markersize=8, zorder=over, gid=f"setting{place}")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: search_text.step_text(y)))
    axes.set_xlabel("peak memory of a device, GiB")
    figure.draw_without_rendering()
    for number, some in _labels(axes.transData.transform(bold).tolist()):
      offset = {"xytext": (7, 4), "textcoords": "offset points"}
      axes.annotate(numbers_text(some), bold[number], **offset)
  label = f"memory and time of a step on {found.topology}"
  return charts.for_page(figure, label, name, titles)


def _labels(places: Sequence[tuple[float, float]]) -> list[tuple[int, list[int]]]:
  """Returns (where a label is, its points from 1): of those that would overlap one for all."""
  found: list[tuple[int, list[int]]] = []
  for number in sorted(range(len(places)), key=lambda i: places[i]):
    x, y = places[number]
    for first, some in found:
      left, up = places[first]
      if abs(y - up) < LINE and x - left < LETTER * (1 + len(numbers_text(some))):
        some.append(number + 1)
        break
    else:
      found.append((number, [number + 1]))
  return found


def numbers_text(some: Sequence[int]) -> str:
  """Returns `1-3,7` of 1, 2, 3 and 7, in any order."""
  runs: list[list[int]] = []
  for number in sorted(some):
    if runs and runs[-1][-1] == number - 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
