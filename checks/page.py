"""The page of a report: one file of HTML, without links to others."""

from html import escape

from checks import report

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #ddd;
  vertical-align: top }
pre { overflow-x: auto; background: #f5f5f2; padding: .8rem; font-size: .85rem; line-height: 1.25 }
section { border-left: 4px solid #b3261e; padding-left: 1rem; margin: 2rem 0 }
.wrong { color: #b3261e; font-weight: 600 } .quiet { color: #666 } dt { color: #666 }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #1b1b1b } pre { background: #262626 }
  td, th { border-color: #444 } .quiet, dt { color: #999 } .wrong { color: #ff8a80 }
}
"""


def html(found: report.Report) -> str:
  """Returns the page: a table of the checks, and a section for each finding."""
  rows = "".join(map(_row, found.outcomes))
  sections = "".join(_section(i, *pair) for i, pair in enumerate(found.findings, 1))
  drawings = "".join(
    f"<h2>{escape(one.check)}, {escape(one.mesh)}</h2><pre>{_lines(one.lines)}</pre>"
    for one in found.outcomes
    if one.lines
  )
  title = f"Checks of {escape(found.file)}"
  return (
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    f'<h1>{title}</h1><p class="quiet">{escape(report.versions())}</p>'
    f"<table><tr><th>check<th>mesh<th>result<th>what was compared</tr>{rows}</table>"
    f"{sections or '<p>Nothing found.</p>'}{drawings}</html>\n"
  )


def _row(one: report.Outcome) -> str:
  verdict = f'<td class="{"wrong" if one.findings else "quiet"}">{escape(one.verdict)}'
  cells = f"<td>{escape(one.check)}<td>{escape(one.mesh)}{verdict}"
  return f"<tr>{cells}<td>{escape(one.skipped or one.note)}</tr>"


def _section(number: int, outcome: report.Outcome, one: report.Finding) -> str:
  facts = {"where": one.where, "numbers": report.numbers_text(one), "likely cause": one.cause}
  rows = "".join(f"<dt>{title}<dd>{escape(text)}" for title, text in facts.items() if text)
  lines = f"<pre>{_lines(one.lines)}</pre>" if one.lines else ""
  head = f"{number}. {escape(one.what)}"
  kind = f'<p class="quiet">{escape(outcome.check)}, {escape(outcome.mesh)}</p>'
  return f"<section><h2>{head}</h2>{kind}<dl>{rows}</dl>{lines}</section>"


def _lines(lines) -> str:
  return escape("\n".join(lines))
