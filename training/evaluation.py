"""Evaluation: the held-out split once through, the remainder padded with weight 0."""

import dataclasses
import math
from typing import Any

import jax

from input_pipeline.batches import EvaluationBatches
from input_pipeline.prefetch import Prefetcher
from processes.lockstep import Lockstep
from processes.watchdog import EVALUATION, SAVING, Watchdog
from training.job import Job


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """A compiled evaluation step over a split.

  Attributes:
    job: whose model is evaluated.
    batches: the held-out split.
    step: the compiled `(params, batch) -> sums`.
    watch: is told of every batch.
    lockstep: where the processes meet before every batch.
  """

  job: Job
  batches: EvaluationBatches
  step: Any
  watch: Watchdog
  lockstep: Lockstep

  def __call__(self, params: Any, *, steps: int = 0) -> dict[str, float] | None:
    """Returns `eval_loss` and what the objective adds to it; None where a stop came in between.

    Args:
      params: the parameters, placed as the job's.
      steps: batches to go through; 0 for the whole split.
    """
    count = min(steps, len(self.batches)) if steps else len(self.batches)
    shardings = self.job.batch_shardings
    totals: dict[str, float] = {}
    with Prefetcher(lambda i: self.batches.batch(i, shardings), start=0, stop=count) as prefetched:
      for i in range(count):
        self.watch.at(f"evaluation batch {i + 1}: waiting for it", EVALUATION, begins=True)
        batch = prefetched.get(i, cancelled=lambda: self.lockstep.stopping)
        self.watch.at(f"evaluation batch {i + 1}: waiting for the other processes", EVALUATION)
        if not self.lockstep.enter():
          # What comes now may take long; and the reader may be what does not come back.
          self.watch.at("stopping", SAVING)
          prefetched.close(timeout_seconds=0)
          return None
        self.watch.at(f"evaluation batch {i + 1}: computing", EVALUATION)
        # Added up in Python's float64, in order: the same on every mesh but for rounding.
        sums = jax.device_get(self.step(params, batch))
        for name, value in sums.items():
          totals[name] = totals.get(name, 0.0) + float(value)
    return means(totals, self.job.config.training.loss)


def means(totals: dict[str, float], loss: str) -> dict[str, float]:
  """Returns the metrics of an evaluation line from sums over rows."""
  mean = totals["loss"] / totals["weight"]
  metrics = {"eval_loss": mean}
  if loss == "next_token":
    metrics["eval_bits_per_byte"] = mean / math.log(2)  # a token is a byte
  if "correct" in totals:
    metrics["eval_accuracy"] = totals["correct"] / totals["weight"]
  return metrics
