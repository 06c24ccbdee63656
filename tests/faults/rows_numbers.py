"""Row 14: NaN gradients, and losses far too large, made by rows of the data."""

import collections
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from unittest import mock

import numpy as np
import tensorstore as ts

from configs import base
from input_pipeline.batches import TrainingBatches
from input_pipeline.sources import open_source
from tests.compiling import FAST
from tests.faults import same
from tests.faults.harness import HEARTBEAT_SECONDS, Run, saved
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, tried

SPOILING = pathlib.Path(__file__).parent / "spoiling"
STEPS, BATCH, WINDOW = 60, 24, 6
COMMON = (
  "--config=configs/dp4_tp2.py:mlp",
  f"--config.data.global_batch_size={BATCH}",
  "--config.evaluation.every_steps=15",
  "--config.metrics.every_steps=1",
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


def row_14(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Spoils rows of one or two batches, every other time with a SIGKILL in between.

  Two of three trials give NaN gradients, the third a loss that is far too large.
  """

  def one(attempt: Attempt) -> None:
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
      skipped = _gone_back(attempt, count, bad, huge, killed)
      _told(attempt, count, skipped)
    expected = same.record(attempt.folder / "told")
    assert len(expected.lines) >= STEPS
    same.check(attempt.workdir, expected)

  return tried(14, range(seed, seed + trials), folder, one)


def _gone_back(attempt: Attempt, count: int, bad: list[int], huge: bool, killed: bool) -> list[int]:
  """Makes the run that goes back, and checks what it says; returns what it skips."""
  settings = {"count": count, "launcher": True, "restarts": 2, "steps": STEPS, "common": COMMON}
  with Run(attempt.workdir, **settings, flags=(*same.KEPT, *GOING_BACK)) as run:
    if killed:
      run.wait_for(f"step {attempt.chance.randrange(1, STEPS)}/")
      with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        run.signal(attempt.chance.randrange(count), signal.SIGKILL)
    assert run.end() == [0], run.codes
    attempt.seen.append(f"{run.text().count('launch: restart')} restarts")
  lines = map(json.loads, (attempt.workdir / "metrics.jsonl").read_text().splitlines())
  made = [line for line in lines if "rolled_back" in line]
  attempt.seen.append(f"went back {[(line['rolled_back'], line['step']) for line in made]}")
  assert len(made) == len(bad)
  skipped = sorted(batch for line in made for batch in line["skipped"])
  assert set(bad) <= set(skipped)
  for line in made:
    words = line["why"].split()
    if huge:  # `loss is 1, more than ... above 2, the mean of the last 6`
      loss, mean = float(words[2].strip(",")), float(words[words.index("above") + 1].strip(","))
      assert loss > TIMES_TOO_LARGE * mean, line["why"]
    else:
      assert line["why"] == "loss is nan, grad_norm is nan", line["why"]
  for step in saved(attempt.workdir):
    _check_finite(attempt.workdir / "checkpoints" / str(step))
  return skipped


def _told(attempt: Attempt, count: int, skipped: list[int]) -> None:
  """Makes the run that is told to skip the same batches, and stops at a bad step."""
  told = f"--config.data.skip_batches=({','.join(map(str, skipped))},)"
  settings = {"count": count, "launcher": True, "steps": STEPS, "common": COMMON}
  with Run(attempt.folder / "told", **settings, flags=(*same.KEPT, told)) as run:
    assert run.end() == [0], run.codes


def _check_finite(checkpoint: pathlib.Path) -> None:
  """Reads the arrays of a checkpoint without the project."""
  state = {"driver": "ocdbt", "base": f"file://{(checkpoint / 'state').resolve()}"}
  keys = [key.decode() for key in ts.KvStore.open(state).result().list().result()]
  for name in [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]:
    array = ts.open({"driver": "zarr", "kvstore": state, "path": name}).result().read().result()
    assert np.isfinite(array).all(), f"step {checkpoint.name}: {name} is not finite"


# ------------------------------ the data ------------------------------


def _spoiled(rows: dict[int, list[int]], factor: str) -> dict[str, str]:
  """Returns the variables that multiply rows by a factor: batch -> which of its rows."""
  found = [f"{_digests()[batch][row]}:{factor}" for batch in rows for row in rows[batch]]
  path = f"{SPOILING}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
  return {"PYTHONPATH": path, "FAULTS_ROWS": ",".join(found)}


@functools.cache
def _digests() -> list[list[str]]:
  """Returns the SHA-256 of the rows of each batch that a run may come to."""
  data = base.get_config("mlp").data
  data.input_size, data.target_size = 64, 10
  source = open_source(data, data.train_split, 0)
  batches = TrainingBatches(source, global_batch_size=BATCH, seed=0)
  rows = source.read(np.concatenate([batches.row_ids(batch) for batch in range(STEPS + 2)]))
  digests = [hashlib.sha256(row.tobytes()).hexdigest() for row in rows["inputs"]]
  assert max(collections.Counter(digests).values()) == 1, "a row that comes twice is bad twice"
  return [digests[first : first + BATCH] for first in range(0, len(digests), BATCH)]
