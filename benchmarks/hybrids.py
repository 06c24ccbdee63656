"""Tokens/s and memory of the variants of configs/experiments/hybrids.py. Prints a table.

  taskset -c 0 python -m benchmarks.hybrids

Compiles each variant's train step for one row of 2,048 and of 16,384 tokens, on one CPU device; the
temporaries are the compiler's. Steps of the short rows are then taken in turn, of all variants
before any has another. Their time is the processor's, which other programs on the core do not have.
"""

import time

import jax
from absl import app

from configs.experiments import hybrids
from configs.schema import finalize
from partitioning.mesh_sizes import resolve_sizes
from partitioning.rules import size_text
from runtime.devices import Devices
from training import setup

LENGTHS = (2048, 16_384)
ROUNDS = 5


def job_of(variant: str, length: int) -> setup.Job:
  """Returns the job of a variant with one row of a length."""
  config = hybrids.get_config(variant)
  config.data.update(sequence_length=length, global_batch_size=1)
  config = finalize.finalize(config, "cpu")
  return setup.prepare(config, Devices("cpu", True, resolve_sizes(config.mesh, 1)))


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  temporaries, steps, states, batches = {}, {}, {}, {}
  for variant in hybrids.WIDTHS:
    for length in LENGTHS:
      job = job_of(variant, length)
      step = job.compile_train_step().function
      temporaries[variant, length] = step.memory_analysis().temp_size_in_bytes
      if length == LENGTHS[0]:
        steps[variant], states[variant] = step, job.initial_state()
        tokens = {name: jax.numpy.zeros(x.shape, x.dtype) for name, x in job.batch.items()}
        batches[variant] = jax.device_put(tokens, job.batch_shardings)
    print(variant, *(size_text(temporaries[variant, length]) for length in LENGTHS), flush=True)

  best = dict.fromkeys(steps, float("inf"))
  for _ in range(ROUNDS):
    for variant, step in steps.items():
      began = time.process_time()
      states[variant], metrics = step(states[variant], batches[variant])
      jax.block_until_ready(metrics)
      best[variant] = min(best[variant], time.process_time() - began)
  print("| variant | tokens per second of a processor | temporaries, 2,048 | 16,384 |")
  print("| --- | --- | --- | --- |")
  for variant, seconds in best.items():
    sizes = (size_text(temporaries[variant, length]) for length in LENGTHS)
    print(f"| {variant} | {LENGTHS[0] / seconds:,.0f} | {' | '.join(sizes)} |")


if __name__ == "__main__":
  app.run(main)
