r"""Compares the order of predicted and measured step times of meshes, on simulated CPU devices.

  python -m benchmarks.plan_order [--rounds=5]

A decoder of 4 layers and width 256 on a dozen meshes of 8 devices. Each is planned by its compiled
program, then its steps are timed, alternating between meshes. Prints predicted and measured
seconds, Spearman's rank correlation of the two, and the share of pairs predicted in the right
order, among those measured at least 10 % apart (the order of others varies from run to run); exits
with 1 if that is below 0.8.
"""

import itertools
import statistics
import time

from absl import app, flags
from scipy import stats

from benchmarks.step_overhead import LLAMA, ROUNDS
from benchmarks.timing import in_turns
from configs import single
from planning import plan
from planning.search import stepper

flags.set_default(ROUNDS, 5)  # steps of each mesh that are timed, one a round

LEAST, APART = 0.8, 1.1
MESHES = (
  {"data": 8},
  {"fsdp": 8},
  {"tensor": 8},
  {"context": 8},
  {"data": 4, "fsdp": 2},
  {"data": 4, "tensor": 2},
  {"data": 4, "context": 2},
  {"data": 2, "tensor": 4},
  {"fsdp": 4, "tensor": 2},
  {"fsdp": 2, "tensor": 4},
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"fsdp": 2, "context": 2, "tensor": 2},
)


def planned(mesh: dict[str, int]) -> plan.Plan:
  """Returns the plan of a mesh, for the simulated devices."""
  config = single.get_config("lm")
  config.update_from_flattened_dict({**LLAMA, "model.kv_heads": 8})
  config.mesh.update(mesh)
  return plan.make(config, None, simulate=True)


def main(argv: list[str]) -> int:
  """Plans and measures every mesh; returns the exit code."""
  del argv
  plans = [planned(mesh) for mesh in MESHES]
  steps = {str(mesh): stepper(one.job) for mesh, one in zip(MESHES, plans, strict=True)}
  seconds = in_turns(steps, ROUNDS.value, time.perf_counter).values()
  measured = [*map(statistics.median, seconds)]
  predicted = [one.step_seconds[1] for one in plans]
  for mesh, said, took in sorted(
    zip(MESHES, predicted, measured, strict=True), key=lambda row: row[2]
  ):
    name = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    print(f"{name:<32} predicted {said:6.3f} s  measured {took:6.3f} s  ratio {said / took:.2f}")
  print(f"rank correlation {stats.spearmanr(predicted, measured).statistic:.2f}")
  right = [
    predicted[slow] > predicted[fast]
    for fast, slow in itertools.permutations(range(len(MESHES)), 2)
    if measured[slow] >= APART * measured[fast]
  ]
  print(f"of {len(right)} pairs at least 10 % apart, {sum(right)} were predicted in that order")
  return 0 if sum(right) >= LEAST * len(right) else 1


if __name__ == "__main__":
  app.run(main)
