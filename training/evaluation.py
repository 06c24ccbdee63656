"""Evaluation: batches of the evaluation split in order, the remainder padded with weight 0."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from input_pipeline.batches import EvaluationBatches
from input_pipeline.prefetch import Prefetcher
from processes.coordination import current
from processes.step_barrier import Lockstep
from processes.watchdog import EVALUATION, SAVING, Watchdog
from training import averages
from training.metrics.writer import evaluated
from training.setup import Job
from training.state import State, merged
from training.tasks import TASKS

_READER = "prefetch of the evaluation"


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The result of an evaluation.

  Attributes:
    metrics: `eval_loss` and the task's other metrics, over all evaluated batches.
    examples: number of examples in these batches.
    whole: whether these are all examples of the split.
    ranking: the metrics by which checkpoints are ranked: of the first `ranking_examples` examples
      only, so that every evaluation of a run compares the same ones.
    ranking_examples: their number.
  """

  metrics: dict[str, float]
  examples: int
  whole: bool
  ranking: dict[str, float]
  ranking_examples: int

  def line(self) -> dict[str, float]:
    """Returns its line in `metrics.jsonl`."""
    return {**self.metrics, "eval_examples": self.examples}

  def beside(self, other: "Evaluation", name: str) -> "Evaluation":
    """Returns this one, with the metrics of another one of the same examples under a name."""
    more = {f"{metric}/{name}": value for metric, value in other.metrics.items()}
    return dataclasses.replace(self, metrics=self.metrics | more)

  def compared(self, fingerprint: str) -> dict[str, Any]:
    """Returns what a checkpoint stores to be ranked: metrics, and the examples that they are over.

    Args:
      fingerprint: of the split's rows.
    """
    over = {"data": fingerprint, "examples": self.ranking_examples}
    return {"metrics": self.ranking, "metrics_over": over}

  def bad(self) -> str:
    """Returns what is wrong with the metrics; "" where they are finite."""
    wrong = {name: value for name, value in self.metrics.items() if not math.isfinite(value)}
    return ", ".join(f"{name} is {value}" for name, value in wrong.items())

  def text(self, step: int) -> str:
    """Returns a line for people."""
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
    of = "the whole split" if self.whole else "a part of the split"
    return f"evaluation after step {step} ({of}): {numbers}"


def is_logged(job: Job, workdir: epath.Path, step: int) -> bool:
  """Returns whether a step's evaluation is in metrics.jsonl; all processes call it.

  A network file system may not show the file to all of them at once.
  """
  seconds = job.config.processes.start_timeout_seconds
  return current().all_true("evaluated", evaluated(workdir, step), timeout_seconds=seconds)


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """A compiled evaluation step over a split.

  Attributes:
    job: whose model is evaluated.
    batches: of the evaluation split.
    step: the compiled `(params, batch) -> sums`.
    watch: is notified of every batch.
    lockstep: the barrier before every batch.
    progress: is called with the number of batches done, and of all; None shows nothing.
  """

  job: Job
  batches: EvaluationBatches
  step: Any
  watch: Watchdog
  lockstep: Lockstep
  progress: Callable[[int, int], None] | None = None

  def of_state(self, state: State, **steps: int) -> Evaluation | None:
    """Evaluates the parameters, then each average of them; arguments and result as of a call.

    An average's metrics are named as the others with `/ema_0.999` behind, and rank no checkpoint.
    """
    found = self(state.params, state.variables, **steps)
    program, placed = self.job.program, self.job.state_shardings.params
    for decay in self.job.config.optimizer.ema_decays:
      if found is None:
        return None
      average = state.optimizer.averages[averages.key(decay)]
      # With other axis tables for the optimizer's state it is sharded otherwise.
      average = jax.device_put(average, program.split(placed)[0])
      # It is float32 where the parameters are bfloat16.
      average = jax.tree.map(
        lambda x, like: x.astype(like.dtype), average, program.split(state.params)[0]
      )
      params = merged(average, program.split(state.params)[1])
      other = self(params, state.variables, **steps)
      found = found and other and found.beside(other, f"ema_{decay:g}")
    return found

  def __call__(
    self, params: Any, variables: Any = None, *, steps: int = 0, ranking_steps: int = 0
  ) -> Evaluation | None:
    """Evaluates; returns None if it was stopped.

    Args:
      params: the parameters, placed as the job's.
      variables: the model's other variables, where it has any.
      steps: batches to take, of each source of a mixture; 0 for the whole split.
      ranking_steps: how many of them checkpoints are compared by; 0 for all that are taken.
    """
    count = self.batches.count(steps)
    ranking_count = min(self.batches.count(ranking_steps), count)
    shardings = self.job.batch_shardings
    totals: dict[str, dict[str, float]] = {}  # name of a mixture's source -> sums
    ranking: dict[str, dict[str, float]] = {}
    with Prefetcher(
      lambda i: self.batches.batch(i, shardings), start=0, stop=count, name=_READER
    ) as prefetched:
      for i in range(count):
        where = f"evaluation batch {i + 1}: waiting for it"
        self.watch.at(where, EVALUATION, begins=True, reader=_READER)
        batch = prefetched.get(i, cancelled=lambda: self.lockstep.stopping)
        self.watch.at(f"evaluation batch {i + 1}: waiting for the other processes", EVALUATION)
        if not self.lockstep.enter():
          # This may take long, and the reader may be what hangs.
          self.watch.at("stopping", SAVING)
          prefetched.close(timeout_seconds=0)
          return None
        self.watch.at(f"evaluation batch {i + 1}: computing", EVALUATION)
        # Summed in Python's float64, in order: the same on every mesh, up to rounding.
        sums = jax.device_get(self.step(params, batch, *([None, variables] if variables else [])))
        of_part = totals.setdefault(self.batches.part(i), {})
        for name, value in sums.items():
          of_part[name] = of_part.get(name, 0.0) + float(value)
        if i + 1 == ranking_count:
          ranking = copy.deepcopy(totals)
        if self.progress is not None:
          self.progress(i + 1, count)
    return Evaluation(
      metrics=self._metrics(totals),
      examples=self.batches.examples(count),
      whole=count == len(self.batches),
      ranking=self._metrics(ranking),
      ranking_examples=self.batches.examples(ranking_count),
    )

  def _metrics(self, totals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics over all rows, then those of each source of a mixture."""
    task, source = TASKS[self.job.config.task], self.batches.source
    rates = {part.name: part.bytes_per_token for part in source.parts}
    combined: dict[str, float] = {}
    size = 0.0
    for part, sums in totals.items():
      size += sums["weight"] * rates.get(part, source.bytes_per_token)
      for name, value in sums.items():
        combined[name] = combined.get(name, 0.0) + value
    of_parts = {
      f"{name}/{part}": value
      for part, sums in totals.items()
      if part
      for name, value in task.evaluated(sums, rates[part]).items()
    }
    if totals.keys() <= {""}:
      return task.evaluated(combined, source.bytes_per_token)
    return task.evaluated(combined, size / combined["weight"]) | of_parts
