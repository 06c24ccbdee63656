"""The application's side of benchmarks/gpu.py and nanogpt_cpu.py: its step, as a run compiles it.

`python -m benchmarks.gpu` starts it as `python -m benchmarks.gpu_ours`.
"""

import contextlib
import pathlib
import time

import jax
import numpy as np

from benchmarks import gpu_protocol
from configs import single
from configs.schema import finalize, validate
from models import model_spec
from partitioning.rules import named_leaves
from runtime import chips, devices
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
    "activation": m.activation,
    "biases": m.biases != "none",
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
    self._description, self._batch = description, gpu_protocol.train_batch(description)
    self._evaluate = None if description["text"] is None else self._job.compile_eval_step().function
    self._done = 0

  def _placed(self, pair: tuple[np.ndarray, np.ndarray]) -> dict[str, jax.Array]:
    """Returns a batch on the device."""
    fields = dict(zip(("tokens", "targets"), pair, strict=True))
    fields["weights"] = np.ones(pair[0].shape, np.float32)
    found = {
      name: fields.get(name, np.zeros(array.shape, array.dtype))
      for name, array in self._job.batch.items()
    }
    return jax.device_put(found, self._job.batch_shardings)

  def run(self, steps: int, trace: str = "", validate: bool = False) -> dict:
    """Runs some steps; see benchmarks/gpu_protocol.py."""
    with jax.profiler.trace(trace) if trace else contextlib.nullcontext():
      found = self._run(steps)
    if validate:
      batches = map(self._placed, gpu_protocol.validation_batches(self._description))
      sums = [self._evaluate(self._state.params, batch) for batch in batches]
      losses = [float(one["loss"] / one["weight"]) for one in sums]
      found["validation"] = sum(losses) / len(losses)
    return found

  def _run(self, steps: int) -> dict:
    jax.block_until_ready(self._state)
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
      self._state, metrics = self._step(self._state, self._placed(self._batch(self._done)))
      if self._job.devices.simulated:  # as in a run
        jax.block_until_ready(metrics)
      self._done += 1
    last = float(metrics["loss"])  # waits for the device
    seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"seconds": seconds, "processor": processor, "loss": last}

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
        rows * model_spec(job.config).train_flops_per_example(causal=causal)
        for causal in (False, True)
      ],
      "peak_flops": chips.peak_flops(device),
      "chosen": {one.key: one.value for one in job.choices},
      "compiler_options": job.compiler_defaults,
    }


if __name__ == "__main__":
  gpu_protocol.serve(Side)
