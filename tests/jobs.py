"""Small jobs for the tests: shipped strategies and recipes, with distinct prime-ish sizes."""

import importlib

import jax
import numpy as np

from configs import base
from partitioning.mesh import resolve_sizes
from training.devices import Devices
from training.job import Job, prepare

STRATEGIES = ("single", "dp8", "dp4_tp2", "tp8", "fsdp8", "fsdp", "dp2_fsdp2_tp2")

# Every size differs from every other, and every axis of 8 divides what it must.
SMALL = {
  "lm": {
    "model.layers": 2,
    "model.model_size": 40,
    "model.feedforward_size": 56,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.head_size": 6,
    "model.vocabulary_size": 61,
    "model.vocabulary_multiple": 72,
    "data.sequence_length": 12,
    "data.global_batch_size": 16,
  },
  "mlp": {
    "model.input_size": 13,
    "model.model_size": 40,
    "model.feedforward_size": 56,
    "model.output_size": 10,
    "data.global_batch_size": 16,
  },
  "mlp_tutorial": {
    "model.input_size": 13,
    "model.model_size": 40,
    "model.feedforward_size": 56,
    "data.global_batch_size": 16,
  },
}


# LLVM's effort changes neither the partitioning nor the collectives, only the tests' time.
FAST_COMPILES = {"compiler_options": "xla_backend_optimization_level=0"}


def make_job(strategy: str, recipe: str, /, **overrides) -> Job:
  """Returns a prepared small job; `overrides` are dotted keys."""
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  for key, value in {**SMALL[recipe], **FAST_COMPILES, **overrides}.items():
    config.update_from_flattened_dict({key: value})
  slices = {axis: size for axis, size in config.mesh_dcn.items() if size != 1}
  sizes = resolve_sizes(config.mesh, None, slices)
  config = base.finalize(config, "cpu")
  base.check(config, sizes)
  return prepare(config, Devices("cpu", True, sizes, slices))


def host_batch(job: Job, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns a random global batch whose rows weigh differently, some tokens nothing."""
  random = np.random.default_rng(seed)
  limit = job.config.model.get("vocabulary_size") or job.config.model.output_size
  batch = {}
  for name, array in job.batch.items():
    if name == "weights":
      values = random.integers(0, 3, array.shape).astype(array.dtype)
      values.flat[0] = 1
    elif array.dtype == np.int32:
      values = random.integers(0, limit, array.shape, np.int32)
    else:
      values = random.standard_normal(array.shape).astype(array.dtype)
    batch[name] = values
  return batch


def place(job: Job, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
  """Returns the batch, laid out as the job's."""
  return jax.device_put(batch, job.batch_shardings)
