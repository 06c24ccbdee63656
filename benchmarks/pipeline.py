"""A pipeline's ticks beside the same layers without a pipeline, on simulated CPU devices.

  python -m benchmarks.pipeline [--pipeline_rounds=5]

Both programs are complete train steps of one decoder on the same batch. The plain one runs on one
device, accumulates the gradients of as many microbatches, and computes each layer's forward pass
again (rematerialization=full), as stages do. The devices of the pipeline share the cores of this
machine, so processor time is what all stages have computed together: of P = M v + S - 1 ticks each
costs what a microbatch costs without a pipeline, plus what the pipeline adds. Steps take turns; a
row has the medians of processor time, the cost of a tick over that of a microbatch, and what
`plan` predicts for the ratio of the steps, from the compiled programs.
"""

import statistics

import jax
import numpy as np
from absl import app, flags

from benchmarks.timing import in_turns, job_of, table
from planning import prediction
from planning.search import stepper
from training.setup import Job

_ROUNDS = flags.DEFINE_integer("pipeline_rounds", 5, "Timed steps of each program.", 1)

STAGES, MICROBATCHES, LENGTH, WIDTH = 4, 16, 256, 256
SCHEDULES = {
  "1f1b": {"training.pipeline": "1f1b"},
  "1f1b, conditional ends": {
    "training.pipeline": "1f1b",
    "training.pipeline_ends": "conditional",
  },
  "interleaved, 2 chunks": {"training.pipeline": "interleaved"},
  "gpipe": {"training.pipeline": "gpipe"},
}


def decoder(**keys) -> Job:
  """Returns the job of a decoder with two layers for each of two chunks per stage."""
  shared = {
    "model.layers": 4 * STAGES,
    "model.model_size": WIDTH,
    "model.feedforward_size": 3 * WIDTH,
    "model.heads": 4,
    "model.kv_heads": 4,
    "data.sequence_length": LENGTH,
    "data.global_batch_size": MICROBATCHES,
    "training.attention_kernel": "xla",
    "training.loss_chunks": 1,
  }
  return job_of("lm", {**shared, **keys})


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  jax.config.update("jax_num_cpu_devices", STAGES)
  plain = {"training.gradient_accumulation_steps": MICROBATCHES}
  plain["training.rematerialization"] = "full"
  stages = {"mesh.stage": STAGES, "training.microbatches": MICROBATCHES}
  jobs = {"one device": decoder(**plain)}
  jobs |= {name: decoder(**stages, **keys) for name, keys in SCHEDULES.items()}
  programs = {name: one.compile_train_step().function for name, one in jobs.items()}
  predicted = {
    name: prediction.of_program(programs[name], one.mesh, "cpu")["step_seconds"][1]
    for name, one in jobs.items()
  }
  takes = {name: stepper(one, programs[name]) for name, one in jobs.items()}
  seconds = {k: statistics.median(x) for k, x in in_turns(takes, _ROUNDS.value).items()}
  losses = [float(take()["loss"]) for take in takes.values()]
  assert np.allclose(losses, losses[0], rtol=1e-4), losses
  first = seconds["one device"]
  rows = [["one device", str(MICROBATCHES), f"{first:.2f}", "1.00", "1.00"]]
  for name in SCHEDULES:
    schedule = jobs[name].program.pipeline
    tick = seconds[name] / (schedule.forward_ticks / schedule.chunks) / (first / MICROBATCHES)
    ratios = f"{seconds[name] / first:.2f}, {predicted[name] / predicted['one device']:.2f}"
    cells = [str(schedule.forward_ticks), f"{seconds[name]:.2f}", f"{tick:.2f}", ratios]
    rows.append([name, *cells])
  head = ("schedule", "ticks", "processor s of a step", "tick / microbatch")
  print(table((*head, "step / step, predicted"), rows))


if __name__ == "__main__":
  app.run(main)
