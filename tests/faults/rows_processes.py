"""Rows 7, 8 and 17: data sets of every remainder, processes that differ, other numbers of them."""

import json
import math
import pathlib

from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import STEPS, Run
from tests.processes import differences, rows, starting
from tests.processes.command_lines import MLP, losses

SCRIPT = pathlib.Path(rows.__file__)

# ------------------------------ remainders ------------------------------

PARTS = ("training", "evaluation")
ENDS_EARLY = 2  # trials
ENDED_SECONDS = 45


@row(
  7,
  fault="data sets of every remainder 0-15, dropping or padding; one iterator that ends early",
  passes="equal steps everywhere, no hang; padded loss within 1e-6 of one process",
  trials=34,
  seconds=4,
  note="A trial is a remainder in training (nothing is dropped: the rest of an epoch shares a "
  "batch with the next) or in evaluation (padded), on 1, 2 and 4 processes.",
)
def remainders(attempt: Attempt) -> None:
  """Compares data sets of each remainder, on 2 and 4 processes, with one process."""
  which = attempt.number % (len(PARTS) * rows.BATCH + ENDS_EARLY)
  if which < len(PARTS) * rows.BATCH:
    remainder, part = which // len(PARTS), PARTS[which % len(PARTS)]
    attempt.does = f"{2 * rows.BATCH + remainder} rows, batches of {rows.BATCH}, {part}"
    [alone] = attempt.once(_remainders, 1)
    check = _trained if part == "training" else _evaluated
    for count in (2, 4):
      processes = attempt.once(_remainders, count)
      check([process[remainder] for process in processes], alone[remainder], remainder)
  else:
    attempt.does = f"2 processes, the data of process {which % 2} end early"
    _ends_early(attempt, which % 2)


def _remainders(folder: pathlib.Path, count: int) -> list[list[dict]]:
  del folder
  printed = starting.well(count, "remainders", script=SCRIPT)
  return [json.loads(out.splitlines()[-1])["remainders"] for out in printed]


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


def _ends_early(attempt: Attempt, whose: int) -> None:
  """Lets one process find no more data: all end, and go on once it is there again."""
  with Run(attempt.workdir, slow=whose, flags=same.KEPT) as run:
    run.wait_for(f"step {attempt.chance.randint(10, STEPS // 2)}/")
    when = run.stall("end")
    run.ends(1)
    attempt.seen.append(f"all ended after {max(run.ended) - when:.1f} s")
    assert max(run.ended) - when < ENDED_SECONDS, f"{max(run.ended) - when:.1f} s"
    assert f"process {whose}" in run.text(), "it is not named"
  attempt.ends_as(attempt.clean(2, same.KEPT), flags=same.KEPT)


# ------------------------------ differences ------------------------------


@row(
  8,
  fault="a process that differs: batch shape, config, dtype, seed, code version, mesh",
  passes="refused before the first collective within 15 s, the key named",
  trials=10,
  seconds=8,
  usual=19,
  note="19 kinds of difference; the first ten are those of the plan. On a machine with more work "
  "than processors the 15 s are as many times longer.",
)
def that_differ(attempt: Attempt) -> None:
  """Starts two processes that differ; odd trials let process 0 be the one that does."""
  kinds = [*differences.KINDS]
  turn, which = divmod(attempt.number, len(kinds))
  differs = (which + turn) % 2
  attempt.does = f"process {differs} differs: {kinds[which]}"
  attempt.once(_goes_well)
  kind = differences.KINDS[kinds[which]]
  ended = differences.tried(starting.start, kind, attempt.folder, differs)
  attempt.seen.append(f"refused after {max(process.seconds for process in ended):.1f} s")


def _goes_well(folder: pathlib.Path) -> None:
  """Checks that the same command goes well where nothing differs, and prepares its data."""
  starting.well(2, *MLP, f"--workdir={folder / 'well'}")


# ------------------------------ numbers of processes ------------------------------

# Twelve devices, so that four, three and two processes share them out evenly.
TWELVE = (*MLP, "--config.mesh.data=12", "--config.data.global_batch_size=12")
COUNTS, ELASTIC_STEPS, RELATIVE = (4, 3, 2, 4), 11, 1e-5


@row(
  17,
  fault="elastic: 4 -> 3 -> 2 -> 4 processes (global batch 12)",
  passes="each step sees the examples of the fixed run; loss within 1e-5 of it",
  trials=10,
  seconds=40,
)
def elastic_run(attempt: Attempt) -> None:
  """Goes on with 4, 3, 2 and 4 processes, beside one process that makes all steps.

  The loss of a step is that of its rows under the parameters so far: other rows show in it. Each
  trial has another seed, and so other rows, and the changes at other steps, none at the end of an
  epoch.
  """
  attempt.does, number = "4, 3, 2, 4 processes", attempt.number
  command, workdir = (*TWELVE, f"--config.seed={number}"), attempt.workdir
  ends = [2 + number % 3, 4 + number % 2, 7 + number % 3, ELASTIC_STEPS]
  for count, steps in zip(COUNTS, ends, strict=True):
    starting.well(count, *command, f"--workdir={workdir}", f"--config.training.steps={steps}")
  fixed, all_steps = attempt.folder / "fixed", f"--config.training.steps={ELASTIC_STEPS}"
  starting.well(1, *command, f"--workdir={fixed}", all_steps)
  found, expected = losses(workdir), losses(fixed)
  assert [*found] == [*expected] == [*range(1, ELASTIC_STEPS + 1)], (found, expected)
  for step, loss in expected.items():
    assert abs(found[step] - loss) <= RELATIVE * abs(loss), (
      f"step {step}: {found[step]}, not {loss}"
    )
  assert len({*expected.values()}) == ELASTIC_STEPS
