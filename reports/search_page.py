"""The result of a search as an HTML page; `templates/search.html.j2` renders it."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from planning import search_space
from planning.search_results import Found
from reports import search_picture, search_text
from reports.html import render


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
    topologies=[_topology(one) for one in found],
  )


def _topology(found: Found) -> dict[str, Any]:
  return {
    "heading": search_text.heading(found),
    "counts": search_text.counts(found),
    "note": found.note,
    "fits": found.fits,
    "verdict": search_text.verdict(found),
    "source": search_text.SOURCES[found.source],
    # Its numbers and escaped texts are our own.
    "picture": Markup(search_picture.svg(found)),
    "columns": search_text.columns(found),
    "rows": [
      {
        "cells": search_text.cells(found, place, row),
        "rematerialization": ", ".join([row.estimate.rematerialization, *search_text.others(row)]),
        "failed": row.failed,
        "overrides": search_space.text(row.estimate.setting),
      }
      for place, row in enumerate(found.rows, start=1)
    ],
    "nearest": search_text.nearest(found),
    "refused": list(found.refused.items())[: search_text.REASONS],
  }
