r"""Compares the setting that `search` chooses with 29 others, timed on simulated devices.

  python -m benchmarks.search_accuracy [--rounds=3] [--settings=30]

A decoder of 2 layers and width 128 on 8 simulated devices. `search` does what its verb does:
formulas, then short runs of the best. The settings are those that it ran, then the best of each
mesh by formula, then others in the order of the formulas. Each is timed in alternating rounds, on
the wall clock and in processor time (of all threads of this process, which other processes
lengthen less); the least of all steps counts. Prints the settings and the ratio of the chosen one
to the fastest in both; exits with 1 if neither is at most 1.05.
"""

import math
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from benchmarks.step_overhead import ROUNDS
from commands import search_process
from configs import dp8
from planning import aot, search, search_results
from planning.search import stepper
from planning.search_results import Estimate
from runtime import compilation_cache
from training.setup import Job

flags.set_default(ROUNDS, 3)
SETTINGS = flags.DEFINE_integer("settings", 30, "How many are timed.")
COMPILATIONS = flags.DEFINE_integer("compilations", 8, "How many of them search may run.")

MODEL = {
  "model.layers": 2,
  "model.model_size": 128,
  "model.feedforward_size": 344,
  "model.heads": 8,
  "model.kv_heads": 8,
  "data.sequence_length": 128,
  "data.global_batch_size": 32,
  "compiler_options": "xla_backend_optimization_level=1",  # 30 programs, in less time
}
STEPS = 3  # of each round, after the first
MOST = 1.05


def settings(found: search_results.Found, count: int) -> list[Estimate]:
  """Returns the settings that are timed: those that were run, one of each mesh, the next best."""
  order = sorted(found.estimates, key=lambda one: (one.seconds_per_token, one.bytes))
  first: dict[str, Estimate] = {}
  for one in order:
    first.setdefault(one.mesh_text, one)
  ran = [row.estimate for row in found.rows]
  every = {one.key: one for one in [*ran, *first.values(), *order]}
  return list(every.values())[:count]


def measured(jobs: Sequence[Job], rounds: int) -> np.ndarray:
  """Returns the least (wall, processor) seconds of each job, in alternating rounds."""
  steps = {number: stepper(job, aot.compile_to_run(job)[1]) for number, job in enumerate(jobs)}
  least = np.full((len(jobs), 2), math.inf)
  for _ in range(rounds):
    for number, step in steps.items():
      step()  # after those of the others
      for _ in range(STEPS):
        began = time.perf_counter(), time.process_time()
        step()
        taken = time.perf_counter() - began[0], time.process_time() - began[1]
        least[number] = np.minimum(least[number], taken)
  return least


def main(argv: list[str]) -> int:
  """Searches, times the settings and compares; returns the exit code."""
  del argv
  config = dp8.get_config("lm")
  config.update_from_flattened_dict(MODEL)
  if config.compilation_cache_dir:
    compilation_cache.use(config.compilation_cache_dir)
  asked = search_process.Asked(
    config, "search_accuracy", compilations=COMPILATIONS.value, simulate=True
  )
  found = search_process.of_topology(asked, None)
  formulas = search.Formulas(aot.target_of(config, simulate=True), found.limit)
  some = settings(found, SETTINGS.value)
  least = measured([formulas.job(one.setting) for one in some], ROUNDS.value)
  chosen = [one.key for one in some].index(found.best.estimate.key)
  for number in np.argsort(least[:, 0]):
    one, (wall, processor) = some[number], least[number]
    mark = "chosen" if number == chosen else ""
    print(
      f"{one.mesh_text:<32} {one.rematerialization:<54} {1e3 * wall:7.1f} ms, "
      f"{1e3 * processor:7.1f} ms of processor time, by formula {1e3 * one.seconds:6.1f} ms {mark}"
    )
  ratios = least[chosen] / least.min(axis=0)
  spread = least.max(axis=0) / least.min(axis=0)
  print(f"of {len(some)} settings, the slowest takes {spread[0]:.2f} times as long as the fastest")
  print(f"the chosen one: {ratios[0]:.3f} of the fastest, {ratios[1]:.3f} in processor time")
  return 0 if ratios.min() <= MOST else 1


if __name__ == "__main__":
  app.run(main)
