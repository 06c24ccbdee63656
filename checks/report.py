"""Findings, and what a check of a program says: text, JSON and an exit code."""

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from runtime.collectives import size_text

NOTHING, WRONG, REFUSED = 0, 3, 2  # exit codes


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
    if self.findings:
      return f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}"
    return "skipped" if self.skipped else "nothing found"


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


def number_text(name: str, value: object) -> str:
  if isinstance(value, int | float | np.number) and name.endswith("bytes"):
    return size_text(float(value))
  return f"{value:.3g}" if isinstance(value, float | np.floating) else str(value)


def numbers_text(finding: Finding) -> str:
  return ", ".join(
    f"{name.removesuffix('_bytes').replace('_', ' ')} {number_text(name, value)}"
    for name, value in finding.numbers.items()
  )


def versions() -> str:
  return f"jax {jax.__version__}, numpy {np.__version__}, {jax.default_backend()}"


def text(report: Report) -> str:
  """Returns the report for a terminal: a table of the checks, then each finding."""
  lines = [f"{report.file} ({versions()})", ""]
  rows = [(one.check, one.mesh, one.verdict, one.skipped or one.note) for one in report.outcomes]
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  for row in rows:
    head = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
    lines.append(f"{head}  {row[3]}".rstrip())
  for number, (one, finding) in enumerate(report.findings, 1):
    lines += ["", f"{number}. {one.check}, {one.mesh}: {finding.what}"]
    facts = {"where": finding.where, "numbers": numbers_text(finding), "likely": finding.cause}
    for title, fact in facts.items():
      if fact:
        indent = " " * 12
        lines.append(textwrap.fill(f"   {title:<9}{fact}", 100, subsequent_indent=indent))
    lines += [f"   {line}" for line in finding.lines]
  found = len(report.findings)
  lines += ["", f"{found} finding{'s' if found != 1 else ''}" if found else "Nothing found."]
  return "\n".join(lines)


def as_json(report: Report) -> str:
  """Returns the report as JSON: file, versions, outcomes and findings with all of their fields."""
  content = {
    "file": report.file,
    "versions": versions(),
    "exit_code": report.exit_code,
    "outcomes": [
      {"check": one.check, "mesh": one.mesh, "verdict": one.verdict}
      | {"note": one.note, "skipped": one.skipped, "lines": list(one.lines)}
      for one in report.outcomes
    ],
    "findings": [
      {"check": one.check, "mesh": one.mesh} | dataclasses.asdict(finding)
      for one, finding in report.findings
    ],
  }
  return json.dumps(content, indent=2, default=float)
