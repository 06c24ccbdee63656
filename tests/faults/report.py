"""The results of the rows: kept as JSON, and written as a section of a page."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from tests.docs.pages import write_section
from tests.faults.frame import Row, Trial, rows

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
RESULTS, PAGE = DOCS / "reliability.json", DOCS / "reliability.md"

INTRODUCTION = """\
## Faults that were tried on real runs

Written by `python -m tests.faults --write`; do not edit.

Each trial starts the unmodified application as 2 or 4 processes on this machine, with a small
decoder. It disturbs the run from outside, by signals and by changes on its disk, and starts it
again with the same command. A row that is expected to take longer than an hour is run with fewer
trials than planned. A row that was not run says so.

**Same** means, compared with an undisturbed run: every line of `metrics.jsonl` has the same loss,
gradient norm and evaluation to the last bit, every step appears once and in order, and the SHA-256
of every array of every tenth checkpoint, parameters and optimizer state, is the same. The examples
of a step follow from the step alone; another row would change the bits of its loss.

```
make test-faults                                    # all rows
python -m tests.faults --row=4                      # one row
python -m tests.faults --row=4 --trials=1 --seed=7  # trial 7 of it again
```
"""


@dataclasses.dataclass(frozen=True)
class Result:
  """What became of a row when it was last run.

  Attributes:
    done: trials.
    passed: trials.
    seconds: that they took.
    seed: the number of the first.
    date: of the day, as 2025-01-31.
    machine: what it ran on.
    failures: a line for each trial that failed.
  """

  done: int
  passed: int
  seconds: float
  seed: int
  date: str
  machine: str
  failures: tuple[str, ...] = ()


def result(trials: Sequence[Trial], seed: int) -> Result:
  """Returns what became of a row that was run now and here."""
  return Result(
    done=len(trials),
    passed=sum(trial.passed for trial in trials),
    seconds=round(sum(trial.seconds for trial in trials), 1),
    seed=seed,
    date=datetime.date.today().isoformat(),
    machine=machine(),
    failures=tuple(f"{t.name}: {t.note}" for t in trials if not t.passed),
  )


def machine() -> str:
  """Returns what kind of machine this is; it has no name."""
  cores, memory = os.cpu_count(), round(psutil.virtual_memory().total / 2**30)
  versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
  return (
    f"{cores} cores ({platform.machine()}), {memory} GiB, {platform.system()} "
    f"{platform.release().partition('-')[0]}, Python {platform.python_version()}, {versions}"
  )


def read() -> dict[int, Result]:
  """Returns row -> what became of it when it was last run; {} where no row was."""
  found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  return {
    int(number): Result(**{**values, "failures": tuple(values["failures"])})
    for number, values in found.items()
  }


def write(results: Mapping[int, Result]) -> None:
  """Merges the results of some rows into those of the others, and rewrites the section."""
  known = {**read(), **results}
  texts = {number: dataclasses.asdict(known[number]) for number in sorted(known)}
  RESULTS.write_text(json.dumps(texts, indent=1) + "\n")
  write_section(PAGE, page(known))


def seconds_each(row: Row, results: Mapping[int, Result]) -> float:
  """Returns what a trial of a row takes: as measured last, or the plan's guess."""
  known = results.get(row.number)
  return max(known.seconds / known.done, 0.1) if known and known.done else row.seconds


# ------------------------------ the section ------------------------------


def page(results: Mapping[int, Result]) -> str:
  """Returns the section of docs/reliability.md about all rows."""
  machines = list(dict.fromkeys(results[number].machine for number in sorted(results)))
  heads = "| # | fault | passes when | planned | done | passed | minutes | date | machine |"
  lines = [INTRODUCTION, heads, "|" + " --- |" * 9]
  lines += [_line(row, results.get(row.number), machines) for row in rows()]
  if machines:
    lines += ["", "### Machines", ""]
    lines += [f"- {_letter(index)}: {text}" for index, text in enumerate(machines)]
  lines += ["", "### The rows", ""]
  lines += [f"- Row {row.number}. {row.note}" for row in rows() if row.note]
  failed = [(row, results[row.number]) for row in rows() if _failed(results.get(row.number))]
  if failed:
    lines += ["", "### What failed", ""]
    lines += [f"- Row {row.number}, {text}" for row, found in failed for text in found.failures]
  return "\n".join(lines) + "\n"


def _line(row: Row, found: Result | None, machines: list[str]) -> str:
  planned = f"| {row.number} | {row.fault} | {row.passes} | {row.trials} |"
  if found is None:
    return f"{planned} not run | | | | |"
  minutes = f"{found.seconds / 60:.1f}"
  letter = _letter(machines.index(found.machine))
  passed = f"{found.passed}" if found.passed == found.done else f"**{found.passed}**"
  return f"{planned} {found.done} | {passed} | {minutes} | {found.date} | {letter} |"


def _failed(found: Result | None) -> bool:
  return found is not None and found.passed < found.done


def _letter(index: int) -> str:
  return "abcdefghijklmnopqrstuvwxyz"[index]
