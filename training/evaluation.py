"""Evaluation on the whole evaluation split, or on a random sample of it with its standard error.

The sample is the same at each evaluation, on any mesh (`input_pipeline.batches.EvaluationBatches`).
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epy

from input_pipeline.batches import EvaluationBatches, Prefetcher
from processes.coordination import Lockstep
from processes.watchdog import EVALUATION, SAVING, STARTING, Watchdog
from training.metrics import log_lines
from training.setup import Job
from training.state import State, merged
from training.tasks import TASKS, Totals

with epy.lazy_imports():  # of runs that average parameters
  from training import averages

_READER = "prefetch of the evaluation"

Before = Callable[[str, int, int], bool]  # (what, number of the batch, of how many) -> go on?
# ((parameters, variables), before) -> metric -> (value, standard error); None if it was stopped.
TaskScores = Callable[[tuple[Any, Any], Before], dict[str, tuple[float, float | None]] | None]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The result of an evaluation.

  Attributes:
    metrics: `eval_loss` and the task's other metrics, of the split or as estimated from a sample.
    errors: metric -> standard error of the estimate; of the whole split there are none.
    examples: number of examples that were evaluated.
    split_examples: that the split has.
    ranking: the metrics by which checkpoints are ranked: of the first `ranking_examples` examples
      only, so that every evaluation of a run compares the same ones.
    ranking_examples: their number.
  """

  metrics: dict[str, float]
  errors: dict[str, float]
  examples: int
  split_examples: int
  ranking: dict[str, float]
  ranking_examples: int

  def line(self) -> dict[str, float]:
    """Returns its line in `metrics.jsonl`."""
    errors = {log_lines.standard_error(name): error for name, error in self.errors.items()}
    share = self.examples / self.split_examples
    return {
      **self.metrics,
      **errors,
      log_lines.EXAMPLES: self.examples,
      log_lines.SHARE: share,
    }

  def adding(self, metrics: Mapping[str, float], errors: Mapping[str, float]) -> "Evaluation":
    """Returns this one with further metrics, of the same examples or of tasks."""
    both = {"metrics": self.metrics | metrics, "errors": self.errors | errors}
    return dataclasses.replace(self, **both)

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
    numbers = "  ".join(
      f"{name} {value:.4f}" + (f" ± {self.errors[name]:.4f}" if name in self.errors else "")
      for name, value in self.metrics.items()
    )
    of = log_lines.examples_text(self.line())
    drawn = ", drawn at random" if self.examples < self.split_examples else ""
    return f"evaluation after step {step} ({of}{drawn}): {numbers}"


def between_batches(
  watch: Watchdog, lockstep: Lockstep, progress: Callable[[int, int], None] | None
) -> Before:
  """Returns what is called before each batch of tasks: the barrier of the processes."""

  def before(what: str, number: int, count: int) -> bool:
    watch.at(f"{what}, batch {number + 1}: waiting for the other processes", EVALUATION)
    if not lockstep.enter():
      watch.at("stopping", SAVING)
      return False
    generates = not what.startswith("scoring")  # as long as it takes
    watch.at(f"{what}, batch {number + 1}", STARTING if generates else EVALUATION)
    if progress is not None:
      progress(number, count)
    return True

  return before


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
    rollouts: draws the answers of its batches, of GRPO (`inference.grpo.Rollouts`).
    tasks: that are scored besides.
  """

  job: Job
  batches: EvaluationBatches
  step: Any
  watch: Watchdog
  lockstep: Lockstep
  progress: Callable[[int, int], None] | None = None
  rollouts: Any = None
  tasks: TaskScores | None = None

  def of_state(self, state: State, **steps: int) -> Evaluation | None:
    """Evaluates the parameters, then each average of them, then the tasks.

    Arguments and result are those of a call.

    An average's metrics are named as the others with `/ema_0.999` behind, and rank no checkpoint.
    """
    found = self(state.params, state.variables, **steps)
    program, placed = self.job.program, self.job.state_shardings.params
    for decay in self.job.config.optimizer.ema_decays if found else ():
      average = state.optimizer.averages[averages.key(decay)]
      # With other axis tables for the optimizer's state it is sharded otherwise.
      average = jax.device_put(average, program.split(placed)[0])
      # It is float32 where the parameters are bfloat16.
      average = jax.tree.map(
        lambda x, like: x.astype(like.dtype), average, program.split(state.params)[0]
      )
      params = merged(average, program.split(state.params)[1])
      other = self(params, state.variables, **steps)
      if other is None:
        return None
      named = [
        {f"{n}/ema_{decay:g}": x for n, x in of.items()} for of in (other.metrics, other.errors)
      ]
      found = found.adding(*named)
    if self.tasks is None or found is None:
      return found
    before = between_batches(self.watch, self.lockstep, self.progress)
    scores = self.tasks((state.params, state.variables), before)
    if scores is None:
      return None
    errors = {name: error for name, (_, error) in scores.items() if error is not None}
    return found.adding({name: value for name, (value, _) in scores.items()}, errors)

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
    found: list[dict[str, float]] = []  # the sums of each batch
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
        if self.rollouts is not None:
          batch = self.rollouts.evaluation_batch(params, variables, self.batches.row_ids(i), i)
        self.watch.at(f"evaluation batch {i + 1}: computing", EVALUATION)
        # Summed in Python's float64, in order: the same on every mesh, up to rounding.
        sums = jax.device_get(self.step(params, batch, *([None, variables] if variables else [])))
        found.append({name: float(value) for name, value in sums.items()})
        if self.progress is not None:
          self.progress(i + 1, count)
    taken = [(self.batches.part(i), self.batches.rows(i), sums) for i, sums in enumerate(found)]
    return Evaluation(
      metrics=self._metrics(_added(taken)),
      errors=self._standard_errors(taken),
      examples=self.batches.examples(count),
      split_examples=len(self.batches.source),
      ranking=self._metrics(_added(taken[:ranking_count])),
      ranking_examples=self.batches.examples(ranking_count),
    )

  def _metrics(self, taken: Mapping[str, "_Taken"]) -> dict[str, float]:
    """Returns the metrics of the split, then those of each source of a mixture.

    Args:
      taken: of each source, "" where there is one. It counts by its rows in the split, of which it
        may have given more or fewer than the others.
    """
    task, source = TASKS[self.job.config.task], self.batches.source
    if taken.keys() <= {""}:
      return task.evaluated(taken[""].sums, source.bytes_per_token)
    rates = {part.name: part.bytes_per_token for part in source.parts}
    combined: dict[str, float] = {}
    size = 0.0
    for part, one in taken.items():
      share = self._rows[part] / one.rows
      size += share * one.sums["weight"] * rates[part]
      for name, value in one.sums.items():
        combined[name] = combined.get(name, 0.0) + share * value
    of_parts = {
      f"{name}/{part}": value
      for part, one in taken.items()
      for name, value in task.evaluated(one.sums, rates[part]).items()
    }
    return task.evaluated(combined, size / combined["weight"]) | of_parts

  @functools.cached_property
  def _rows(self) -> dict[str, int]:
    """Returns how many rows the split has, by source."""
    source = self.batches.source
    return {part.name: part.rows for part in source.parts} or {"": len(source)}

  def _standard_errors(self, batches: Sequence["_Batch"]) -> dict[str, float]:
    """Returns the standard error of each metric as an estimate of the whole split's.

    By the delete-one-batch jackknife, in the strata of a mixture's sources, with the correction for
    a sample without replacement (W. G. Cochran, Sampling Techniques, 1977, sections 2.6 and 5.3).
    Nothing of the whole split, and where a single batch leaves it unknown.
    """
    taken, variances = _added(batches), {}
    for part, all_taken in taken.items():
      left = 1 - all_taken.rows / self._rows[part]
      if left == 0:
        continue
      without = [all_taken.less(rows, sums) for name, rows, sums in batches if name == part]
      if any(one.sums["weight"] <= 0 for one in without):
        return {}
      each = [self._metrics({**taken, part: one}) for one in without]
      for name in each[0]:
        spread = statistics.pvariance([metrics[name] for metrics in each])
        variances[name] = variances.get(name, 0.0) + left * (len(each) - 1) * spread
    return {name: math.sqrt(variance) for name, variance in variances.items()}


_Batch = tuple[str, int, Totals]  # its source, rows and sums


@dataclasses.dataclass
class _Taken:
  """How many rows of a source were evaluated, and the sums over them."""

  rows: int
  sums: dict[str, float]

  def less(self, rows: int, sums: Totals) -> "_Taken":
    """Returns it without some of the rows."""
    return _Taken(self.rows - rows, {name: x - sums[name] for name, x in self.sums.items()})


def _added(batches: Sequence[_Batch]) -> dict[str, _Taken]:
  """Returns what was taken of each source, summed in the order of the batches."""
  taken: dict[str, _Taken] = {}
  for part, rows, sums in batches:
    one = taken.setdefault(part, _Taken(0, dict.fromkeys(sums, 0.0)))
    one.rows += rows
    for name, value in sums.items():
      one.sums[name] += value
  return taken
