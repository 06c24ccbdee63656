"""Rows 14 and 30: steps and evaluations with bad numbers, made by rows of the data."""

import collections
import contextlib
import functools
import hashlib
import os
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from configs import base
from input_pipeline.batches import TrainingBatches
from input_pipeline.row_source import open_source
from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import HEARTBEAT_SECONDS, SITES, Run, lines_of, saved
from tests.helpers.compiling import FAST
from training.splits import read_as

STEPS, BATCH, WINDOW, EVERY = 60, 24, 6, 15
COMMON = (
  "--config=configs/dp4_tp2.py:mlp",
  f"--config.data.global_batch_size={BATCH}",
  f"--config.evaluation.every_steps={EVERY}",
  "--config.metrics.every_steps=1",
  "--config.metrics.report=False",
  "--config.metrics.tensorboard=false",
  f"--config.compiler_options={FAST}",
  f"--config.processes.heartbeat_seconds={HEARTBEAT_SECONDS}",
)
GOING_BACK = (
  "--config.training.on_bad_step=roll_back",
  "--config.training.bad_step_deviations=12",
  f"--config.training.bad_step_window={WINDOW}",
)
TIMES_TOO_LARGE = 10_000
# Without clipping, a row so large gives a step whose loss and gradient norm are finite, and
# parameters that are too large for another forward pass.
PLAIN = (
  "--config.optimizer.name=sgd",
  "--config.optimizer.learning_rate=0.1",
  "--config.optimizer.clip_norm=0",
  "--config.optimizer.warmup_steps=0",
)
TOO_LARGE = "-1e15"


@row(
  14,
  fault="NaN gradients; a loss 10,000 times too large",
  passes="never checkpointed; roll back and skip gives the same run as one that skips those "
  "batches",
  trials=30,
  seconds=30,
)
def bad_steps(attempt: Attempt) -> None:
  """Spoils rows of one or two batches, every other time with a SIGKILL in between.

  Two of three trials give NaN gradients, the third a loss that is far too large.
  """
  number, chance = attempt.number, attempt.chance
  huge, killed = number % 3 == 2, number % 2 == 1
  count = 4 if number % 5 == 4 else 2
  # A loss is held against others once there are some.
  bad = sorted(chance.sample(range(2 * WINDOW if huge else 0, STEPS), chance.choice((1, 2))))
  what = "a huge loss" if huge else "NaN gradients"
  batches = " and ".join(map(str, bad))
  attempt.does = f"{count} processes, {what} in batch {batches}{', a SIGKILL' if killed else ''}"
  # A loss is not large where the label of a row is guessed all the same: so there are some.
  rows = {batch: chance.sample(range(BATCH), 6 if huge else 1) for batch in bad}
  environment = _spoiled(rows, "-1e8" if huge else "inf")
  with mock.patch.dict(os.environ, environment):
    made = _gone_back(attempt, count, len(bad), killed, GOING_BACK)
    ranges = [rows for line in made for rows in line["skipped_rows"]]
    assert not any(end % BATCH for rows in ranges for end in rows)
    skipped = sorted(row // BATCH for rows in ranges for row in range(*rows, BATCH))
    assert set(bad) <= set(skipped)
    for line in made:
      _check_why(line["why"], huge)
    _told(attempt, count, skipped)
  _check_same(attempt)


@row(
  30,
  fault="an evaluation that gives NaN or infinity after a step with finite numbers",
  passes="never checkpointed; roll back and skip gives the same run as one that skips those "
  "batches",
  trials=20,
  seconds=30,
)
def bad_evaluations(attempt: Attempt) -> None:
  """Spoils rows of the batch before an evaluation, or before two; every other time a SIGKILL."""
  number, chance = attempt.number, attempt.chance
  killed, count = number % 2 == 1, 4 if number % 5 == 4 else 2
  evaluated = sorted(chance.sample(range(EVERY, STEPS + 1, EVERY), chance.choice((1, 2))))
  # Each batch that is skipped moves those behind it by a step.
  bad = [step - 1 + before for before, step in enumerate(evaluated)]
  steps = " and ".join(map(str, evaluated))
  kill = ", a SIGKILL" if killed else ""
  attempt.does = f"{count} processes, bad evaluations after step {steps}{kill}"
  # Several rows: one whose label happens to be predicted all the same has no gradient.
  environment = _spoiled({batch: chance.sample(range(BATCH), 6) for batch in bad}, TOO_LARGE)
  with mock.patch.dict(os.environ, environment):
    flags = ("--config.training.on_bad_step=roll_back", *PLAIN)
    made = _gone_back(attempt, count, len(bad), killed, flags)
    assert [line["rolled_back"] for line in made] == evaluated
    assert [line["step"] for line in made] == [step - same.SAVE_EVERY for step in evaluated]
    for line in made:
      assert line["why"] in ("eval_loss is nan", "eval_loss is inf"), line["why"]
    _told(attempt, count, bad, PLAIN)
  _check_same(attempt)


def _check_why(why: str, huge: bool) -> None:
  """Checks what a rollback gives as its reason."""
  words = why.split()
  if huge:  # `loss is 1, more than ... above 2, the mean of the last 6`
    loss, mean = float(words[2].strip(",")), float(words[words.index("above") + 1].strip(","))
    assert loss > TIMES_TOO_LARGE * mean, why
  else:
    assert why == "loss is nan, grad_norm is nan", why


def _check_same(attempt: Attempt) -> None:
  """Checks that the run that went back has left what the run that was told has left."""
  expected = same.record(attempt.folder / "told")
  assert len(expected.lines) >= STEPS
  same.check(attempt.workdir, expected)


def _gone_back(
  attempt: Attempt, count: int, times: int, killed: bool, flags: Sequence[str]
) -> list[dict[str, Any]]:
  """Makes the run that goes back so many times; returns the lines that say so."""
  settings = {"count": count, "launcher": True, "restarts": 2, "steps": STEPS, "common": COMMON}
  with Run(attempt.workdir, **settings, flags=(*same.KEPT, *flags)) as run:
    if killed:
      run.wait_for(f"step {attempt.chance.randrange(1, STEPS)}/")
      with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        run.signal(attempt.chance.randrange(count), signal.SIGKILL)
    run.ends(0)
    attempt.seen.append(f"{run.text().count('launch: restart')} restarts")
  made = [line for line in lines_of(attempt.workdir) if "rolled_back" in line]
  attempt.seen.append(f"went back {[(line['rolled_back'], line['step']) for line in made]}")
  assert len(made) == times
  for step in saved(attempt.workdir):
    for name, array in same.arrays(attempt.workdir / "checkpoints" / str(step)).items():
      assert np.isfinite(array).all(), f"step {step}: {name} is not finite"
  return made


def _told(attempt: Attempt, count: int, skipped: list[int], flags: Sequence[str] = ()) -> None:
  """Makes the run that is told to skip the same batches, and stops at a bad step."""
  told = f"--config.data.skip_batches=({','.join(map(str, skipped))},)"
  settings = {"count": count, "launcher": True, "steps": STEPS, "common": COMMON}
  with Run(attempt.folder / "told", **settings, flags=(*same.KEPT, *flags, told)) as run:
    run.ends(0)


# ------------------------------ the data ------------------------------


def _spoiled(rows: dict[int, list[int]], factor: str) -> dict[str, str]:
  """Returns the variables that multiply rows by a factor: batch -> which of its rows."""
  found = [f"{_digests()[batch][row]}:{factor}" for batch in rows for row in rows[batch]]
  return {"PYTHONPATH": str(SITES / "spoiling"), "FAULTS_ROWS": ",".join(found)}


@functools.cache
def _digests() -> list[list[str]]:
  """Returns the SHA-256 of the rows of each batch that a run may come to."""
  config = base.get_config("mlp")
  config.data.input_size, config.data.target_size = 64, 10
  source = open_source(read_as(config.data, config.task), config.data.train_split, 0)
  batches = TrainingBatches(source, global_batch_size=BATCH, seed=0)
  rows = source.read(np.concatenate([batches.row_ids(batch) for batch in range(STEPS + 2)]))
  digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows["inputs"]]
  assert max(collections.Counter(digests).values()) == 1, "a row that comes twice is bad twice"
  return [digests[first : first + BATCH] for first in range(0, len(digests), BATCH)]
