"""A pipeline's ticks beside the same layers without a pipeline, on simulated CPU devices.

  python -m benchmarks.pipeline [--pipeline_stages=4] [--pipeline_rounds=5]

Both programs are complete train steps of one decoder on the same batch. The plain one runs on one
device, accumulates the gradients of as many microbatches, and computes each layer's forward pass
again (rematerialization=full), as stages do. The devices of the pipeline share the cores of this
machine, so processor time is what all stages have computed together: of P = M v + S - 1 ticks each
costs what a microbatch costs without a pipeline, plus what the pipeline adds. Steps take turns; a
row has the medians of processor time, the cost of a tick over that of a microbatch, and what
`plan` predicts for the ratio of the steps, from the compiled programs.
"""

import statistics
import time

import jax
import numpy as np
from absl import app, flags

from configs import single
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes
from planning import prediction
from runtime.devices import Devices
from training import setup

_STAGES = flags.DEFINE_integer("pipeline_stages", 4, "Stages.", 2)
_MICROBATCHES = flags.DEFINE_integer("pipeline_microbatches", 16, "Microbatches.", 1)
_LENGTH = flags.DEFINE_integer("pipeline_length", 256, "Tokens of a row.", 1)
_WIDTH = flags.DEFINE_integer("pipeline_width", 256, "Width of the residual.", 8)
_ROUNDS = flags.DEFINE_integer("pipeline_rounds", 5, "Timed steps of each program.", 1)

SCHEDULES = {
  "1f1b": {"training.pipeline": "1f1b"},
  "1f1b, conditional ends": {
    "training.pipeline": "1f1b",
    "training.pipeline_ends": "conditional",
  },
  "interleaved, 2 chunks": {"training.pipeline": "interleaved"},
  "gpipe": {"training.pipeline": "gpipe"},
}


def job_of(**keys) -> setup.Job:
  """Returns the job of a decoder with two layers for each of two chunks per stage."""
  config = single.get_config("lm")
  microbatches = _MICROBATCHES.value
  shared = {
    "model.layers": 4 * _STAGES.value,
    "model.model_size": _WIDTH.value,
    "model.feedforward_size": 3 * _WIDTH.value,
    "model.heads": 4,
    "model.kv_heads": 4,
    "data.sequence_length": _LENGTH.value,
    "data.global_batch_size": microbatches,
    "training.attention_kernel": "xla",
    "training.loss_chunks": 1,
  }
  for key, value in {**shared, **keys}.items():
    config.update_from_flattened_dict({key: value})
  sizes = resolve_sizes(config.mesh, None)
  config = finalize.finalize(config, "cpu")
  validate.check(config, sizes)
  return setup.prepare(config, Devices("cpu", True, sizes))


class Steps:
  """A compiled train step, with its state and a batch."""

  def __init__(self, job: setup.Job):
    """Compiles, and takes a step that is not timed."""
    self.job, self.program = job, job.compile_train_step().function
    random = np.random.default_rng(0)
    arrays = {
      name: np.ones(x.shape, x.dtype)
      if name == "weights"
      else random.integers(0, 2 if name == "segments" else 256, x.shape).astype(x.dtype)
      for name, x in job.batch.items()
    }
    self.batch = jax.device_put(arrays, job.batch_shardings)
    self.state, self.seconds, self.loss = job.initial_state(), [], 0.0
    self._take()

  def _take(self) -> float:
    began = time.process_time()
    self.state, metrics = self.program(self.state, self.batch)
    self.loss = float(metrics["loss"])
    jax.block_until_ready(self.state)
    return time.process_time() - began

  def time(self) -> None:
    """Takes a timed step."""
    self.seconds.append(self._take())

  @property
  def processor_seconds(self) -> float:
    """Returns the median of the timed steps."""
    return statistics.median(self.seconds)

  @property
  def predicted(self) -> float:
    """Returns the seconds that the plan predicts; simulated devices share a machine's speed."""
    return prediction.of_program(self.job, self.program).step_seconds[1]


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  jax.config.update("jax_num_cpu_devices", _STAGES.value)
  count = _MICROBATCHES.value
  plain = {
    "training.gradient_accumulation_steps": count,
    "training.rematerialization": "full",
  }
  stages = {"mesh.stage": _STAGES.value, "training.microbatches": count}
  runs = {"one device": Steps(job_of(**plain))}
  runs |= {name: Steps(job_of(**stages, **keys)) for name, keys in SCHEDULES.items()}
  for _ in range(_ROUNDS.value):
    for run in runs.values():
      run.time()
  first = runs["one device"]
  losses = [run.loss for run in runs.values()]
  assert np.allclose(losses, losses[0], rtol=1e-4), losses
  print("| schedule | ticks | processor s of a step | tick / microbatch | step / step, predicted |")
  print("| --- | --- | --- | --- | --- |")
  each = first.processor_seconds / count
  print(f"| one device | {count} | {first.processor_seconds:.2f} | 1.00 | 1.00 |")
  for name in SCHEDULES:
    run = runs[name]
    schedule = run.job.program.pipeline
    ticks = schedule.forward_ticks / schedule.chunks
    tick = run.processor_seconds / ticks / each
    ratio, predicted = (
      run.processor_seconds / first.processor_seconds,
      run.predicted / first.predicted,
    )
    print(
      f"| {name} | {schedule.forward_ticks} | {run.processor_seconds:.2f} | "
      f"{tick:.2f} | {ratio:.2f}, {predicted:.2f} |"
    )


if __name__ == "__main__":
  app.run(main)
