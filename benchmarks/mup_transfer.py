"""The best learning rate at two widths, with and without muP.

  python -m benchmarks.mup_transfer

Trains the recipe `lm` on one device, at width 64 and at 4 times its widths, for each learning rate
on the same batches, and prints the mean loss of the last steps: the table of docs/optimizers.md.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks.timing import prepared, table, trained
from configs import single
from configs.schema import finalize
from training import coordinate_check
from training.setup import Job
from training.splits import training_batches
from training.state import State
from training.step import Program

_STEPS = flags.DEFINE_integer("steps", 100, "Of each run.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Initializations of each run.")

BASE, WIDTHS = 64, (64, 256)
RATES = tuple(2.0**power for power in range(-10, -3))
LAST = 10  # steps, whose mean loss is reported
SMALL = {
  "model.layers": 2,
  "data.sequence_length": 64,
  "data.global_batch_size": 16,
  "optimizer.learning_rate": 1.0,  # a run's own is a factor of the updates
}


def make_job(width: int, base_width: int, steps: int) -> Job:
  """Returns the job of a width; its optimizer's peak learning rate is 1."""
  config = single.get_config("lm")
  config.update_from_flattened_dict({**SMALL, "training.steps": steps})
  resolved = finalize.finalize(config, "cpu")
  schedule = {key: config.optimizer[key] for key in ("schedule", "warmup_steps", "final_fraction")}
  config = coordinate_check.of_width(config, resolved, width)
  with config.unlocked():
    config.optimizer.update(schedule)
    config.model.base_width = base_width
  return prepared(finalize.finalize(config, "cpu"))


def train_step(program: Program, state: State, batch, rate: jax.Array):
  """Returns the state and the metrics of a step whose learning rate is multiplied by `rate`."""
  inner = program.optimizer

  def update(grads, optimizer_state, params):
    updates, optimizer_state = inner.update(grads, optimizer_state, params)
    scaled = jax.tree.map(lambda x: x * rate, updates)
    return optax.apply_updates(params, scaled), optimizer_state

  return dataclasses.replace(program, update=update).train_step(state, batch)


def losses(job: Job, rates: Sequence[float], seeds: int) -> list[float]:
  """Returns the mean loss of the last steps at each learning rate."""
  batches, steps = training_batches(job.config), job.config.training.steps
  rate = jax.ShapeDtypeStruct((), jnp.float32)
  step = job.compile(
    functools.partial(train_step, job.program), job.state, job.batch, rate
  ).function
  batch = lambda number: batches.batch(number, job.batch_shardings)  # noqa: E731
  found = []
  for value in rates:
    last = []
    for seed in range(seeds):
      state = job.compile_init().function(jax.random.key(seed))
      last += trained(step, state, batch, steps, jnp.float32(value))[1][-LAST:]
    found.append(float(np.mean(last)))
    print(f"width {job.config.model.model_size}, {value:.4f}: {found[-1]:.3f}", flush=True)
  return found


def main(_: Sequence[str]) -> None:
  """Prints the table."""
  columns = {
    f"width {BASE}": make_job(BASE, 0, _STEPS.value),
    f"width {WIDTHS[1]}": make_job(WIDTHS[1], 0, _STEPS.value),
    f"width {WIDTHS[1]}, muP": make_job(WIDTHS[1], BASE, _STEPS.value),
  }
  found = {title: losses(job, RATES, _SEEDS.value) for title, job in columns.items()}
  rows = []
  for row, rate in enumerate(RATES):
    losses_of = (
      f"**{of[row]:.3f}**" if of[row] == min(of) else f"{of[row]:.3f}" for of in found.values()
    )
    rows.append([f"{rate:.4f}", *losses_of])
  print(table(["learning rate", *found], rows))


if __name__ == "__main__":
  app.run(main)
