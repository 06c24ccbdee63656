"""Runs of a few steps on the attached devices, to time settings that formulas rank badly."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from planning import aot
from training.setup import Job

STEPS = 5  # of a run, without the first
LEAST_SECONDS = 1.0  # of a run: steps of microseconds are taken more often
MOST_STEPS = 50
SLOWER = 1.05  # of the fastest of two rounds: more than the least times of the same steps differ
_SEED = 0


@dataclasses.dataclass
class Run:
  """A setting on the attached devices.

  Attributes:
    bytes: peak memory of a device, by the compiler; 0 if it failed.
    seconds: of the fastest step; None if it does not fit, or failed.
    failed: why; "" if it did not.
  """

  bytes: int = 0
  seconds: float | None = None
  failed: str = ""


def measure(
  jobs: Sequence[Job],
  limit: float,
  rounds: int = 1,
  progress: Callable[[int], None] = lambda n: None,
) -> list[Run]:
  """Returns memory and seconds per step of each job, of the fastest step of all rounds.

  Other work on the machine makes steps slower, never faster. Rounds alternate between the jobs, so
  that it meets all of them; only one has a state at a time. After two rounds what is `SLOWER` than
  the fastest is not run again, and one job that is left is not either.

  Args:
    jobs: prepared, for the attached devices.
    limit: bytes of a device: what needs more is not run.
    rounds: runs of each job.
    progress: called with the number of each job before its run.
  """
  runs, steps = [Run() for _ in jobs], [None for _ in jobs]
  for turn in range(rounds):
    again = _near(jobs, runs) if turn > 1 else range(len(jobs))
    if turn > 1 and len(again) < 2:
      break
    for number in again:
      job, run = jobs[number], runs[number]
      if run.failed or run.bytes > limit:
        continue
      progress(number)
      try:
        if steps[number] is None:
          program, steps[number] = aot.compile_to_run(job)
          run.bytes = program.peak_bytes
          if steps[number] is None or run.bytes > limit:
            continue
        took = _timed(job, steps[number])
      except (jax.errors.JaxRuntimeError, ValueError) as error:
        run.seconds, run.failed = None, next(iter(str(error).splitlines()), "failed")
        continue
      run.seconds = min(took, run.seconds or math.inf)
  return runs


def _near(jobs: Sequence[Job], runs: Sequence[Run]) -> list[int]:
  """Returns the numbers of the jobs that may be the fastest per row of a batch."""
  each = [
    math.inf if run.seconds is None else run.seconds / job.config.data.global_batch_size
    for job, run in zip(jobs, runs, strict=True)
  ]
  return [number for number, seconds in enumerate(each) if seconds <= SLOWER * min(each) < math.inf]


def _timed(job: Job, step: Callable[..., Any]) -> float:
  """Returns the seconds of the fastest of some steps."""
  state, batch = job.initial_state(), jax.device_put(example(job), job.batch_shardings)
  state, _ = jax.block_until_ready(step(state, batch))  # the first one also allocates
  seconds: list[float] = []
  while len(seconds) < STEPS or (sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_STEPS):
    began = time.perf_counter()
    state, _ = jax.block_until_ready(step(state, batch))
    seconds.append(time.perf_counter() - began)
  return min(seconds)


def example(job: Job) -> Mapping[str, np.ndarray]:
  """Returns a batch of random tokens, classes and values, in which every row counts."""
  random = np.random.default_rng(_SEED)
  classes = job.config.model.get("vocabulary_size") or job.config.model.get("output_size") or 2
  batch = {}
  for name, array in job.batch.items():
    if name == "weights":
      values = np.ones(array.shape)
    elif name in ("segments", "positions"):
      values = np.zeros(array.shape)
    elif np.issubdtype(array.dtype, np.integer):
      values = random.integers(0, classes, array.shape)
    else:
      values = random.standard_normal(array.shape)
    batch[name] = values.astype(array.dtype)
  return batch
