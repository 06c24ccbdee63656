"""`python -m checks FILE.py`: checks the train step that a file gives.

Exit codes: 0 nothing was found; 3 something is wrong; 2 refused: the file gives no program, or an
option is wrong; 1 the program itself failed.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence

from checks import budget, equality, invariance, leaks, replication, report
from checks.case import Case
from checks.program import DescriptionError, load, parse_sizes

# Name -> (a mesh, the first one) -> what was found; None where there is nothing to look at.
CHECKS: dict[str, Callable[[Case, Case], report.Outcome | None]] = {
  "replication": replication.check,
  "equality": equality.check,
  "budget": budget.check,
  "leaks": leaks.check,
  "invariance": invariance.check,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Checks a file, and returns the exit code."""
  try:
    options = _parser().parse_args(argv)
  except SystemExit as error:  # of argparse, after its message
    return report.REFUSED if error.code else report.NOTHING
  try:
    chosen = [name for name in options.only.split(",") if name] or list(CHECKS)
    if unknown := [name for name in chosen if name not in CHECKS]:
      known = ", ".join(CHECKS)
      raise ValueError(f"--only={options.only}: there is no {unknown[0]}; there are {known}")
    sizes = [parse_sizes(text) for text in options.mesh]
    for file in filter(None, (options.json, options.html)):
      if not pathlib.Path(file).resolve().parent.is_dir():
        raise ValueError(f"{file}: its folder does not exist")
    cases = [Case(one) for one in load(options.file, sizes, attached=options.attached)]
  except ValueError as error:
    if options.debug:
      raise
    print(f"refused: {error}", file=sys.stderr)
    return report.REFUSED
  try:
    outcomes = [CHECKS[name](case, cases[0]) for name in chosen for case in cases]
  except DescriptionError as error:
    print(f"refused: {error}", file=sys.stderr)
    return report.REFUSED
  found = report.Report(options.file, [one for one in outcomes if one])
  print(report.text(found))
  for file, written in ((options.json, report.as_json), (options.html, report.page)):
    if file:
      pathlib.Path(file).write_text(written(found))
  return found.exit_code


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("checks", description=__doc__.partition("\n")[0])
  parser.add_argument("file", metavar="FILE.py", help="it defines program(mesh)")
  parser.add_argument(
    "--mesh",
    action="append",
    default=[],
    help="sizes of the mesh axes, data=2,tensor=4; 1 is one device; repeatable, instead of the "
    "file's MESHES; the first is what the others are compared with",
  )
  parser.add_argument("--only", default="", help=f"some of the checks: {','.join(CHECKS)}")
  parser.add_argument("--json", help="write the findings as JSON to this file")
  parser.add_argument("--html", help="write the page to this file")
  parser.add_argument(
    "--attached", action="store_true", help="run on the devices at hand, not on simulated ones"
  )
  parser.add_argument("--debug", action="store_true", help="show the traceback of a refusal")
  return parser


if __name__ == "__main__":
  sys.exit(main())
