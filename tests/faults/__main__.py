"""Tries the plan of faults, or some rows of it.

python -m tests.faults [--row=N ...] [--trials=M] [--seed=S] [--folder=DIR] [--write]

Each trial is told as it ends, with the number that makes it the same again (--trials=1
--seed=NUMBER). Of one that fails, the last lines of what its processes printed are shown, and its
folder stays.

Exit codes: 0 all trials passed; 1 some failed; 2 bad usage.
"""

import argparse
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

from tests.faults import frame, report
from tests.faults.frame import Row, Trial, last_lines

_CLOCKS = 0.1  # seconds by which the times of files may be behind the clock


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Returns the options; exits with 2 and one message where they are wrong."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.faults",
    usage=argparse.SUPPRESS,
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  plan = {row.number: row for row in frame.rows()}
  parser.add_argument("--row", type=int, action="append", choices=plan, help="which; all")
  parser.add_argument("--trials", type=int, help="of each row; as planned, an hour at most")
  parser.add_argument("--seed", type=int, default=0, help="the number of the first trial; 0")
  parser.add_argument("--folder", type=pathlib.Path, help="for the runs; a temporary one")
  parser.add_argument("--write", action="store_true", help="the results to docs/reliability.md")
  options = parser.parse_args(arguments)
  if options.trials is not None and options.trials < 1:
    parser.error(f"--trials={options.trials}: at least 1")
  if options.seed < 0:
    parser.error(f"--seed={options.seed}: at least 0")
  options.rows = [row for row in plan.values() if row.number in (options.row or plan)]
  unseeded = [row.number for row in options.rows if not row.seeded]
  if options.seed and unseeded:
    rows = ", ".join(map(str, unseeded))
    parser.error(f"--seed={options.seed}: the trials of row {rows} have no number to begin with")
  return options


def tell_plan(rows: Sequence[Row], counts: dict[int, int], known: dict[int, report.Result]) -> None:
  """Prints what is about to be done, and how long it takes on a machine that does nothing else."""
  whole = 0.0
  for row in rows:
    seconds = counts[row.number] * report.seconds_each(row, known)
    whole += seconds
    fewer = f" of {row.trials} planned" if counts[row.number] < row.trials else ""
    trials = f"{counts[row.number]} trials{fewer}"
    print(f"row {row.number:2}: {trials}, about {seconds / 60:.0f} min: {row.fault}", flush=True)
  print(f"about {whole / 60:.0f} min in all", flush=True)


def tried(row: Row, count: int, seed: int, folder: pathlib.Path) -> list[Trial]:
  """Makes the trials of a row, telling each as it ends; what the row itself raises is a failure."""
  trials, began = [], time.monotonic()
  more = {"seed": seed} if row.seeded else {}
  try:
    for trial in row.make(count, folder, **more):
      trials.append(trial)
      _tell(row, trial, len(trials), count, folder)
    failure = "" if trials else "the row has made no trial"
  except Exception:  # whatever it is, it is told, and the next row is tried
    failure = traceback.format_exc()
  if failure:
    seconds = time.monotonic() - began - sum(trial.seconds for trial in trials)
    trials.append(Trial("the row itself", False, failure, seconds))
    _tell(row, trials[-1], len(trials), count, folder)
  return trials


def _tell(row: Row, trial: Trial, number: int, count: int, folder: pathlib.Path) -> None:
  verdict = "passed" if trial.passed else "FAILED"
  note = f" ({trial.note})" if trial.note else ""
  where = f"row {row.number}, trial {number}" + (f" of {count}" if number <= count else "")
  print(f"{where}: {verdict} in {trial.seconds:.1f} s: {trial.name}{note}", flush=True)
  if not trial.passed and (said := last_lines(folder, time.time() - trial.seconds - _CLOCKS)):
    print(f"{said}\n----- kept: {folder}", flush=True)


def table(found: dict[int, report.Result]) -> str:
  """Returns the numbers of rows, a line each."""
  lines = ["row  done  passed  minutes"]
  lines += [
    f"{number:3}  {one.done:4}  {one.passed:6}  {one.seconds / 60:7.1f}"
    for number, one in found.items()
  ]
  return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
  """Tries the rows; returns the exit code."""
  assert __debug__, "python -O checks nothing"
  options = parse(arguments)
  known = report.read()
  counts = {
    row.number: options.trials or row.default(report.seconds_each(row, known))
    for row in options.rows
  }
  tell_plan(options.rows, counts, known)
  folder = options.folder or pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
  found = {}
  for row in options.rows:
    print(f"\nrow {row.number}: {row.fault}\npasses when: {row.passes}", flush=True)
    own = folder / f"row-{row.number}"
    own.mkdir(parents=True)
    found[row.number] = report.result(
      tried(row, counts[row.number], options.seed, own), options.seed
    )
    if options.write:  # after each row: a plan that is broken off has not been for nothing
      report.write({row.number: found[row.number]})
    if found[row.number].passed == found[row.number].done:
      shutil.rmtree(own)
  print(f"\n{table(found)}", flush=True)
  return int(any(one.passed < one.done for one in found.values()))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
