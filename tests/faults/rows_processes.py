"""Rows 7, 8 and 17: data sets of every remainder, processes that differ, other numbers of them."""

import functools
import json
import math
import pathlib
from collections.abc import Iterator

from tests.faults import same
from tests.faults.harness import Run
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried
from tests.processes import differences, elastic, rows, starting
from tests.processes.command_lines import MLP

SCRIPT = pathlib.Path(rows.__file__)

# ------------------------------ remainders ------------------------------

PARTS = ("training", "evaluation")
ENDS_EARLY = 2  # trials
ENDED_SECONDS = 45


def row_7(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Compares data sets of each remainder, on 2 and 4 processes, with one process."""
  clean = Undisturbed(folder, *same.KEPT)

  @functools.cache
  def ended(count: int) -> list[starting.Ended]:
    return starting.start(count, "remainders", script=SCRIPT)

  def remainders(count: int) -> list[list[dict]]:
    printed = starting.printed(ended(count))
    return [json.loads(out.splitlines()[-1])["remainders"] for out in printed]

  def one(attempt: Attempt) -> None:
    which = attempt.number % (len(PARTS) * rows.BATCH + ENDS_EARLY)
    if which < len(PARTS) * rows.BATCH:
      remainder, part = which // len(PARTS), PARTS[which % len(PARTS)]
      attempt.does = f"{2 * rows.BATCH + remainder} rows, batches of {rows.BATCH}, {part}"
      [alone] = remainders(1)
      check = _trained if part == "training" else _evaluated
      for count in (2, 4):
        check([process[remainder] for process in remainders(count)], alone[remainder], remainder)
      return
    whose = which % 2
    attempt.does = f"2 processes, the data of process {whose} end early"
    _ends_early(attempt, clean, whose)

  return tried(7, range(seed, seed + trials), folder, one)


def _trained(processes: list[dict], alone: dict, remainder: int) -> None:
  steps = math.ceil(rows.EPOCHS * (2 * rows.BATCH + remainder) / rows.BATCH)
  for found in processes:
    assert len(found["losses"]) == steps, f"{len(found['losses'])} steps instead of {steps}"
    assert found["losses"] == processes[0]["losses"], "the processes differ"
    for loss, expected in zip(found["losses"], alone["losses"], strict=True):
      assert abs(loss - expected) <= 1e-5 * abs(expected), f"{loss}, one process {expected}"


def _evaluated(processes: list[dict], alone: dict, remainder: int) -> None:
  for found in processes:
    assert found["batches"] == (3 if remainder else 2), found["batches"]
    assert found["eval_loss"] == processes[0]["eval_loss"], "the processes differ"
    difference = abs(found["eval_loss"] - alone["eval_loss"])
    assert difference <= 1e-6, f"{found['eval_loss']}, one process {alone['eval_loss']}"


def _ends_early(attempt: Attempt, clean: Undisturbed, whose: int) -> None:
  """Lets one process find no more data: all end, and go on once it is there again."""
  step = attempt.chance.randint(10, clean.steps // 2)
  with Run(attempt.workdir, slow=whose, steps=clean.steps, flags=same.KEPT) as run:
    run.wait_for(f"step {step}/")
    when = run.end_data()
    assert run.end() == [1, 1], run.codes
    attempt.seen.append(f"all ended after {max(run.ended) - when:.1f} s")
    assert max(run.ended) - when < ENDED_SECONDS, f"{max(run.ended) - when:.1f} s"
    assert f"process {whose}" in run.text(), "it is not named"
    assert run.left_behind() == []
  with Run(attempt.workdir, steps=clean.steps, flags=same.KEPT) as run:
    assert run.end() == [0, 0], run.codes
  same.check(attempt.workdir, clean.of(2).record)


# ------------------------------ differences ------------------------------


def row_8(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Starts two processes that differ; odd trials let process 0 be the one that does."""
  kinds = [*differences.KINDS]

  @functools.cache
  def goes_well() -> None:
    """Checks that the same command goes well where nothing differs, and prepares its data."""
    starting.well(2, *MLP, f"--workdir={folder / 'well'}")

  def one(attempt: Attempt) -> None:
    turn, which = divmod(attempt.number, len(kinds))
    differs = (which + turn) % 2
    attempt.does = f"process {differs} differs: {kinds[which]}"
    goes_well()
    kind = differences.KINDS[kinds[which]]
    ended = differences.tried(starting.start, kind, attempt.folder, differs)
    attempt.seen.append(f"refused after {max(process.seconds for process in ended):.1f} s")

  return tried(8, range(seed, seed + trials), folder, one)


# ------------------------------ numbers of processes ------------------------------


def row_17(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Goes on with 4, 3, 2 and 4 processes, beside one process that makes all steps."""

  def one(attempt: Attempt) -> None:
    attempt.does = "4, 3, 2, 4 processes"
    elastic.check(starting.well, attempt.folder, attempt.number)

  return tried(17, range(seed, seed + trials), folder, one)
