"""What benchmarks share: jobs of a recipe, short runs, functions timed in turns, tables."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import single
from configs.schema import finalize, validate
from input_pipeline.batches import EvaluationBatches, TrainingBatches
from partitioning.mesh_sizes import resolve_sizes
from runtime.devices import Devices
from training.setup import Job, prepare
from training.state import State


def resolved(recipe: str, keys: Mapping[str, Any]) -> ConfigDict:
  """Returns the resolved config of a recipe for CPUs, with these keys."""
  config = single.get_config(recipe)
  config.update_from_flattened_dict(dict(keys))
  return finalize.finalize(config, "cpu")


def job_of(recipe: str, keys: Mapping[str, Any]) -> Job:
  """Returns the job of a recipe on simulated devices, as many as its mesh asks for."""
  return prepared(resolved(recipe, keys))


def prepared(config: ConfigDict) -> Job:
  """Returns the job of a finalized config on simulated devices, as many as its mesh asks for."""
  sizes = resolve_sizes(config.mesh, None)
  validate.check(config, sizes)
  return prepare(config, Devices("cpu", True, sizes, {}))


def trained(
  step: Callable, state: State, batch: Callable[[int], Any], steps: int, *more: Any
) -> tuple[State, list[float]]:
  """Returns the state after some steps, and the loss of each.

  Args:
    step: (state, batch, *more) -> (state, metrics).
    state: the first one.
    batch: number of a step -> its batch.
    steps: how many.
    *more: arguments of the step.
  """
  losses = []
  for number in range(steps):
    state, metrics = step(state, batch(number), *more)
    losses.append(float(metrics["loss"]))
  return state, losses


def held_out(
  evaluate: Callable, state: State, batches: EvaluationBatches, shardings: Any, count: int
) -> float:
  """Returns the mean loss of the first batches of an evaluation split, in nats per token."""
  total = weight = 0.0
  for number in range(min(count, len(batches))):
    more = [None, state.variables] if state.variables else []
    sums = jax.device_get(evaluate(state.params, batches.batch(number, shardings), *more))
    total, weight = total + float(sums["loss"]), weight + float(sums["weight"])
  return total / weight


class Trainer:
  """Runs of one job, whose programs are compiled once.

  Attributes:
    job: prepared.
    step: its compiled train step.
    initial_state: key -> the first state.
  """

  def __init__(self, job: Job):
    """Compiles the programs."""
    self.job, self.step = job, job.compile_train_step().function
    self.initial_state = job.compile_init().function
    self._evaluate = job.compile_eval_step().function

  def run(self, seed: int, batches: TrainingBatches, steps: int) -> tuple[State, list[float]]:
    """Returns the state after some steps, and the loss of each.

    Args:
      seed: of the parameters.
      batches: that are trained on.
      steps: how many.
    """
    batch = lambda number: batches.batch(number, self.job.batch_shardings)  # noqa: E731
    return trained(self.step, self.initial_state(jax.random.key(seed)), batch, steps)

  def held_out(self, state: State, batches: EvaluationBatches, count: int) -> float:
    """Returns the mean loss of the first batches of an evaluation split, in nats per token."""
    return held_out(self._evaluate, state, batches, self.job.batch_shardings, count)


def in_turns(
  ways: Mapping[str, Callable[[], Any]],
  rounds: int,
  clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
  """Returns the seconds of each function in each round.

  They alternate, so that a drift of the machine affects all of them. A round before the others,
  which compiles and allocates, does not count.
  """
  times: dict[str, list[float]] = {name: [] for name in ways}
  for _ in range(1 + rounds):
    for name, way in ways.items():
      began = clock()
      jax.block_until_ready(way())
      times[name].append(clock() - began)
  return {name: seconds[1:] for name, seconds in times.items()}


def best_seconds(way: Callable[[], Any], rounds: int) -> float:
  """Returns the seconds of the fastest run of a function, after a first one."""
  [seconds] = in_turns({"": way}, rounds, time.perf_counter).values()
  return min(seconds)


def ratio(ours: Iterable[float], others: Iterable[float]) -> float:
  """Returns the median over the rounds of ours / others."""
  return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def spread(
  values: Iterable[float], digits: int = 2, middle: Callable[..., float] = statistics.median
) -> str:
  """Returns `1.68 (1.66 to 1.69)`: the median, or another middle, and the range; "" of nothing."""
  values = list(values)
  if not values:
    return ""
  text = f"{middle(values):.{digits}f}"
  if len(values) == 1:
    return text
  return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  every = (head, ["---"] * len(head), *rows)
  return "\n".join(f"| {' | '.join(cells)} |" for cells in every)
