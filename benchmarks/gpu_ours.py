"""The application's side of benchmarks/gpu.py: its train step, as a run compiles it.

`python -m benchmarks.gpu` starts it as `python -m benchmarks.gpu_ours`.
"""

import contextlib
import pathlib
import time

import jax
import numpy as np

from analysis import chips
from benchmarks import gpu_protocol
from configs import single
from configs.schema import finalize, validate
from models.decoder_flops import train_flops_per_example
from partitioning.rules import named_leaves
from runtime import devices
from training import setup
from training.setup import Job


def prepare(recipe: str, overrides: dict, one: devices.Devices | None = None) -> Job:
  """Returns the job of a recipe on one device; None: the one that is there."""
  config = single.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  if one is None:
    [one] = devices.start(config.mesh.to_dict(), slices=[config.mesh_dcn.to_dict()])
  config, choices = finalize.with_choices(
    config, one.platform, one.sizes, devices.compute_capability(one)
  )
  validate.check(config, one.sizes)
  return setup.prepare(config, one, choices)


def sizes(job: Job, family: str) -> dict:
  """Returns the sizes of a job's model as benchmarks/gpu_protocol.py has them."""
  m = job.config.model
  return {
    "family": family,
    "width": m.model_size,
    "layers": m.layers,
    "heads": m.heads,
    "kv_heads": m.kv_heads,
    "head_size": m.head_size,
    "feedforward": m.feedforward_size,
    "vocabulary": job.state.params["embed"]["table"].shape[0],
    "length": job.config.data.sequence_length,
    "rotary_base": m.rotary_base,
    "epsilon": m.norm_epsilon,
  }


def save(job: Job, folder: pathlib.Path) -> None:
  """Writes the parameters that both sides start from, one .npy file each."""
  for name, array in named_leaves(job.initial_state().params).items():
    np.save(folder / f"{name.replace('/', '.')}.npy", np.asarray(array))


class Side:
  """A job, its state and its batches."""

  def __init__(self, description: dict):
    """Compiles the step and initializes the state; see benchmarks/gpu_protocol.py."""
    self._job = prepare(description["recipe"], description["overrides"])
    description["sizes"] = self._sizes = sizes(self._job, description["family"])
    save(self._job, pathlib.Path(description["parameters"]))
    self._step = self._job.compile_train_step().function
    self._state = self._job.initial_state()
    fields = [
      {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
      for tokens, targets in gpu_protocol.batches(description)
    ]
    self._batches = [
      {
        name: jax.device_put(
          one.get(name, np.zeros(array.shape, array.dtype)), self._job.batch_shardings[name]
        )
        for name, array in self._job.batch.items()
      }
      for one in fields
    ]
    self._done = 0

  def run(self, steps: int, trace: str = "") -> dict:
    """Runs some steps; returns their seconds and the last loss."""
    with jax.profiler.trace(trace) if trace else contextlib.nullcontext():
      return self._run(steps)

  def _run(self, steps: int) -> dict:
    jax.block_until_ready(self._state)
    began = time.perf_counter()
    for _ in range(steps):
      batch = self._batches[self._done % len(self._batches)]
      self._state, metrics = self._step(self._state, batch)
      self._done += 1
    last = float(metrics["loss"])  # waits for the device
    return {"seconds": time.perf_counter() - began, "loss": last}

  def facts(self) -> dict:
    """Returns versions, sizes, what was chosen, and the FLOPs of a step and of the device."""
    job, device = self._job, self._job.mesh.devices.flat[0]
    counted = named_leaves(job.state.params).values()
    rows = job.config.data.global_batch_size
    return {
      "library": f"jax {jax.__version__}",
      "device": device.device_kind,
      "parameters": sum(int(np.prod(array.shape)) for array in counted),
      "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
      "sizes": self._sizes,
      "rows": rows,
      "flops": [
        rows * train_flops_per_example(job.config, causal=causal) for causal in (False, True)
      ],
      "peak_flops": chips.peak_flops(device),
      "chosen": {one.key: one.value for one in job.choices},
      "compiler_options": job.compiler_defaults,
    }


if __name__ == "__main__":
  gpu_protocol.serve(Side)
