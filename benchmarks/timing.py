"""What benchmarks share: jobs of a recipe, functions that are timed in turns, numbers as text."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import single
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes
from planning.search import example
from runtime.devices import Devices
from training.setup import Job, prepare


def resolved(recipe: str, keys: Mapping[str, Any]) -> ConfigDict:
  """Returns the resolved config of a recipe for CPUs, with these keys."""
  config = single.get_config(recipe)
  config.update_from_flattened_dict(dict(keys))
  return finalize.finalize(config, "cpu")


def job_of(recipe: str, keys: Mapping[str, Any]) -> Job:
  """Returns the job of a recipe on simulated devices, as many as its mesh asks for."""
  config = resolved(recipe, keys)
  sizes = resolve_sizes(config.mesh, None)
  validate.check(config, sizes)
  return prepare(config, Devices("cpu", True, sizes, {}))


def stepper(job: Job, step: Callable | None = None) -> Callable[[], dict[str, jax.Array]]:
  """Returns a function that takes a train step on a batch of random rows; it returns the metrics.

  Args:
    job: whose step it is.
    step: compiled; None: it is compiled here.
  """
  step = step or job.compile_train_step().function
  batch = jax.device_put(example(job.batch, job.config.model), job.batch_shardings)
  kept = [job.initial_state()]

  def take() -> dict[str, jax.Array]:
    kept[0], metrics = jax.block_until_ready(step(kept[0], batch))
    return metrics

  return take


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
