"""Findings, and what a check of a program says: text, JSON, a page and an exit code."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import jax
import numpy as np

from runtime import units

NOTHING, WRONG, REFUSED = 0, 3, 2  # exit codes
SHOWN = 8  # lines of a table


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something that is wrong.

  Attributes:
    what: one sentence.
    where: the tensor, and the line of the source as far as it is known.
    numbers: name -> value; bytes end in `_bytes`.
    cause: the likely one.
    lines: a table or a drawing.
  """

  what: str
  where: str
  numbers: Mapping[str, float | int | str]
  cause: str
  lines: Sequence[str] = ()

  def facts(self) -> dict[str, str]:
    """Returns title -> text, without empty ones."""
    numbers = ", ".join(
      f"{name.removesuffix('_bytes').replace('_', ' ')} {_number(name, value)}"
      for name, value in self.numbers.items()
    )
    found = {"where": self.where, "numbers": numbers, "likely": self.cause}
    return {title: text for title, text in found.items() if text}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One check on one mesh: its findings, what it looked at (`note`), or why it was skipped."""

  check: str
  mesh: str
  findings: Sequence[Finding] = ()
  note: str = ""
  skipped: str = ""
  lines: Sequence[str] = ()

  @property
  def verdict(self) -> str:
    return _count(self.findings) or ("skipped" if self.skipped else "nothing found")


@dataclasses.dataclass(frozen=True)
class Report:
  """All checks of a file."""

  file: str
  outcomes: Sequence[Outcome]

  @property
  def findings(self) -> list[tuple[Outcome, Finding]]:
    return [(outcome, finding) for outcome in self.outcomes for finding in outcome.findings]

  @property
  def exit_code(self) -> int:
    return WRONG if self.findings else NOTHING


def counted(count: int, one: str, more: str) -> str:
  """Returns `1 leaf` or `3 leaves`."""
  return f"{count} {one if count == 1 else more}"


def _count(findings: Sequence) -> str:
  return counted(len(findings), "finding", "findings") if findings else ""


def _number(name: str, value: object) -> str:
  if isinstance(value, int | float | np.number) and name.endswith("bytes"):
    return units.size(float(value))
  return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)


def _versions() -> str:
  return f"jax {jax.__version__}, numpy {np.__version__}, {jax.default_backend()}"


Section = tuple[str, Sequence[Sequence[str]], Sequence[str]]  # title, rows of a table, a drawing


def _sections(report: Report) -> Iterator[Section]:
  """Yields a table of the checks, then each finding."""
  rows = [(one.check, one.mesh, one.verdict, one.skipped or one.note) for one in report.outcomes]
  yield f"{report.file} ({_versions()})", rows, ()
  for number, (one, finding) in enumerate(report.findings, 1):
    title = f"{number}. {one.check}, {one.mesh}: {finding.what}"
    yield title, [*finding.facts().items()], finding.lines


def text(report: Report) -> str:
  """Returns the report for a terminal."""
  lines: list[str] = []
  for title, rows, drawing in _sections(report):
    indent = "   " if lines else ""
    widths = [max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]]
    lines += ["", title] if lines else [title, ""]
    for *cells, last in rows:
      padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
      head = indent + "".join(padded)
      lines.append(textwrap.fill(head + last, 100, subsequent_indent=" " * len(head)))
    lines += [f"   {line}" for line in drawing]
  return "\n".join([*lines, "", _count(report.findings) or "Nothing found."])


def as_json(report: Report) -> str:
  """Returns the report as JSON: file, versions, outcomes and findings with all of their fields."""
  outcomes = [dataclasses.asdict(one) | {"verdict": one.verdict} for one in report.outcomes]
  content = {
    "file": report.file,
    "versions": _versions(),
    "exit_code": report.exit_code,
    "outcomes": [{k: v for k, v in one.items() if k != "findings"} for one in outcomes],
    "findings": [
      {"check": one.check, "mesh": one.mesh} | dataclasses.asdict(finding)
      for one, finding in report.findings
    ],
  }
  return json.dumps(content, indent=2, default=float)


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top; font-size: .9rem }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; font-size: .85rem }
h2 { font-size: 1.1rem; border-left: 4px solid #b3261e; padding-left: .8rem }
"""


def page(report: Report) -> str:
  """Returns one file of HTML, without links to others: the report, and every check's drawing."""
  drawings = [(f"{one.check}, {one.mesh}", (), one.lines) for one in report.outcomes if one.lines]
  body = "".join(map(_html, (*_sections(report), *drawings)))
  count = _count(report.findings) or "Nothing found."
  return (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light '
    f'dark"><title>{escape(report.file)}</title><style>{_STYLE}</style><h1>{count}</h1>{body}\n'
  )


def _html(section: Section) -> str:
  title, rows, drawing = section
  cells = "".join("<tr><td>" + "<td>".join(map(escape, row)) for row in rows)
  lines = "<pre>" + escape("\n".join(drawing)) + "</pre>" if drawing else ""
  return f"<h2>{escape(title)}</h2><table>{cells}</table>{lines}"
