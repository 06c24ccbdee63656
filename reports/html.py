"""HTML pages by Jinja2: every value is escaped, and a page needs no other file.

A page follows the reader's light or dark setting, and prints with everything unfolded. The
templates are in reports/templates; their style is in base.html.j2.
"""

import datetime
import pathlib
from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup, escape

from reports import grid
from runtime import units

# More rows, columns or panels of a drawing than these are left out, with a count.
MOST = {"rows": 16, "columns": 10, "panels": 6}


def _panels(sheet: grid.Sheet) -> list[grid.Panel]:
  return sheet.visible(**MOST)


def _breakable(text: str) -> Markup:
  """Returns text in which a line may break after a slash."""
  return escape(text).replace("/", Markup("/<wbr>"))


def words(command: str) -> Markup:
  """Returns a command in which a line may only break between words, or within a very long one."""
  span = Markup('<span class="word">{}</span>')
  return Markup(" ").join(span.format(word) for word in command.split(" "))


def _joined(text: str) -> str:
  """Returns text in which no line breaks before a percent sign."""
  return text.replace(" %", "\N{NO-BREAK SPACE}%")


_ENVIRONMENT = jinja2.Environment(
  loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
  autoescape=True,  # the default depends on the suffix, and .j2 would not be escaped
  undefined=jinja2.StrictUndefined,
  trim_blocks=True,
  lstrip_blocks=True,
)
_ENVIRONMENT.filters.update(
  panels=_panels, breakable=_breakable, hue=grid.hue, joined=_joined, words=words
)


def render(template: str, *, title: str, command: str = "", **values: Any) -> str:
  """Returns a page.

  Args:
    template: `layout.html.j2`.
    title: of the page.
    command: that wrote it.
    **values: for the template.
  """
  now = datetime.datetime.now(datetime.UTC)
  date = f"{now:%Y-%m-%d %H:%M} UTC"
  return _ENVIRONMENT.get_template(template).render(
    title=title, command=command, date=date, **values
  )


SMALL = 0.1  # of the limit: what takes less is drawn to its own scale


def memory_bar(
  parts: Mapping[str, float],
  limit: float | None = None,
  peak: float | None = None,
  *,
  beside: float = 0.0,
) -> dict[str, Any]:
  """Returns the bar for the macro `memory_bar` of a page.

  Args:
    parts: name -> bytes that are in memory together. A part has the color of its place.
    limit: of a device, in bytes; None where it is unknown.
    peak: measured, or by the compiler, where it is known besides the parts: a second line.
    beside: bytes of the longest bar beside this one, which has the same scale.
  """
  used = max(sum(parts.values()), peak or 0.0)
  within = limit is not None and max(used, beside) >= SMALL * limit
  most = max(used, beside, limit if within else 0.0) or 1.0
  text = units.size(used)
  if limit is not None:
    text += f" of {units.size(limit)} ({100 * used / limit:.3g} %)"
    text += "" if within else "; the bar is enlarged"
  return {
    "text": text,
    "parts": [
      {"name": name, "text": units.size(size), "percent": 100 * size / most, "number": number}
      for number, (name, size) in enumerate(parts.items())
    ],
    "limit": 100 * limit / most if within else None,
    "limit_text": "" if limit is None else f"memory of a device: {units.size(limit)}",
    "peak": None if peak is None else 100 * peak / most,
    "peak_text": "" if peak is None else f"peak: {units.size(peak)}",
  }
