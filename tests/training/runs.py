"""Runs in this process, with rows that give bad numbers, and what they leave."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath

from input_pipeline.batches import EvaluationBatches, TrainingBatches
from input_pipeline.ramp import Ramp
from input_pipeline.row_source import Source, array_source
from processes.coordination import current
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from tests.helpers.jobs import make_job
from training import loop, restore
from training.checkpointing import integrity, reading
from training.setup import Job
from training.splits import Data

BATCH, STEPS = 8, 19
KEYS = {
  "data.global_batch_size": BATCH,
  "training.steps": STEPS,
  "optimizer.warmup_steps": 0,
  "metrics.every_steps": 1,
  "metrics.tensorboard": False,
  "checkpoint.every_steps": 5,
  "checkpoint.keep": 100,
  "evaluation.every_steps": 10,
}
ROLL_BACK = {"training.on_bad_step": "roll_back"}
# Of how a run went, what another one of the same data cannot have.
TIMES = (
  "step_seconds",
  "data_wait_seconds",
  "examples_per_second",
  "tokens_per_second",
  "goodput",
  "seconds",
  "time",
  "boot",
  "uptime",
)


class QuickJob(Job):
  """A job that compiles nothing which another one has compiled."""

  _programs = {}  # noqa: RUF012 (of all jobs)

  def compile(self, function, *arguments, **more):
    """Returns what was compiled for a job that computes the same."""
    config = self.config
    batch = tuple(x.shape for x in jax.tree.leaves(arguments[1:2]))
    key = (function.__name__, self.mesh.size, batch, config.training.steps, str(config.optimizer))
    if key not in self._programs:
      self._programs[key] = super().compile(function, *arguments, **more)
    return self._programs[key]


@functools.cache
def job(strategy: str = "dp8", /, **overrides) -> Job:
  """Returns a small classifier; the overrides must not change a step, but for the optimizer.

  Prepared once for all tests, which change nothing of it.
  Data parallelism is over two devices: over eight, a run takes a third longer.
  """
  fewer = {"mesh.data": 2} if strategy == "dp8" else {}
  return quick(make_job(strategy, "mlp", **{**KEYS, **fewer, **overrides}))


def quick(made: Job) -> Job:
  """Returns a job that shares what was compiled with others; see `job`."""
  fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
  return QuickJob(**fields)


def source(factors: dict[int, float] | None = None) -> Source:
  """Returns random rows; one in each of these batches is multiplied by a factor."""
  random = np.random.default_rng(0)
  rows = BATCH * (STEPS + 10)
  arrays = {
    "inputs": random.standard_normal((rows, 13)).astype(np.float32),
    "targets": random.integers(0, 10, rows, np.int32),
    "weights": np.ones(rows, np.float32),
  }
  order = TrainingBatches(array_source("rows", arrays), global_batch_size=BATCH, seed=0)
  for batch, factor in (factors or {}).items():
    arrays["inputs"][order.row_ids(batch)[3]] *= np.float32(factor)
  return array_source("rows", arrays)


def train(
  workdir: pathlib.Path,
  rows: Source,
  *,
  prepared: Job | None = None,
  stop: StopRequest | None = None,
  held_out: Source | None = None,
  accept: Sequence[str] = (),
  **overrides,
) -> loop.End:
  """Trains as the application does, from the newest checkpoint on."""
  started = time.monotonic()
  prepared = prepared or job(**overrides)
  folder = epath.Path(workdir)
  batch = prepared.config.data.global_batch_size
  held_out = EvaluationBatches(held_out or source(), global_batch_size=batch)
  ramp = Ramp.of(prepared.config.data)
  data = Data(TrainingBatches(rows, global_batch_size=batch, seed=0, ramp=ramp), held_out)
  folder.mkdir(parents=True, exist_ok=True)
  checkpoints = restore.RunCheckpoints(prepared, folder)
  record, newest = checkpoints.check_resume(rows, accept)
  start = checkpoints.begin(record, newest=newest)
  start.checkpointer.start_writing()
  with Watchdog(current(), StopRequest() if stop is None else stop) as watch:
    return loop.train(data, start, watch, started=started)


def saved(workdir: pathlib.Path) -> list[int]:
  """Returns the steps that are saved."""
  return integrity.steps(epath.Path(workdir) / integrity.FOLDER)


def lines(workdir: pathlib.Path) -> list[dict]:
  """Returns the lines of metrics.jsonl without what depends on the time."""
  found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def numbers(workdir: pathlib.Path) -> list[dict]:
  """Returns the lines about steps and evaluations."""
  return [line for line in lines(workdir) if {"loss", "eval_loss"} & line.keys()]


def rollbacks(workdir: pathlib.Path) -> list[dict]:
  """Returns the lines about rollbacks."""
  return [line for line in lines(workdir) if "rolled_back" in line]


def arrays(workdir: pathlib.Path, step: int, prepared: Job) -> list[np.ndarray]:
  """Returns all arrays of a checkpoint."""
  abstract, folder = vars(prepared.placed_state), epath.Path(workdir) / integrity.FOLDER
  tree = reading.read_arrays(reading.check(folder / str(step), integrity.FULL), abstract)
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same(workdir: pathlib.Path, other: pathlib.Path, prepared: Job | None = None) -> None:
  """Asserts that two runs have the same numbers, and the same checkpoints.

  Of those that both have, the first and the last are compared: what a step in between has changed
  is in the last one too.

  Args:
    workdir: of one; what it has saved is finite.
    other: of the other.
    prepared: the job of one of the two.
  """
  assert numbers(workdir) == numbers(other)
  kept = [integrity.steps(epath.Path(folder) / integrity.FOLDER) for folder in (workdir, other)]
  assert max(kept[0]) == max(kept[1]) == STEPS
  both = set(kept[0]).intersection(kept[1])
  for step in {min(both), max(both)}:
    ours, theirs = (arrays(folder, step, prepared or job()) for folder in (workdir, other))
    for one, two in zip(ours, theirs, strict=True):
      assert np.isfinite(one).all()
      assert one.tobytes() == two.tobytes(), step
