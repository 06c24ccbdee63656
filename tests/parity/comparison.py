"""Training on a mesh beside training on one device: what the tests of parity share.

What compares is what `main.py compare` compares with; here are the jobs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from input_pipeline.ramp import Ramp
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from training.parity import BOUNDS, STEPS, Trained, beyond, differences, take_steps
from training.setup import Job

PLAIN = {
  "training.matmul_precision": "highest",
  "optimizer.name": "sgd",
  "optimizer.learning_rate": 0.05,
  "optimizer.warmup_steps": 0,
  "optimizer.clip_norm": 0.5,
  "data.sequence_length": 24,
}
# What changes what is computed, all at once: beside it stands one device with the same.
FEATURES = {
  "model.tied_embeddings": True,
  "model.separate_documents": True,
  "training.rematerialization": "full",
  "training.z_loss": 0.01,
}


# Every axis, every pair and the triple, on 8 devices.
MESHES = {
  "data8": {"mesh.data": 8},
  "fsdp8": {"mesh.fsdp": 8},
  "tensor8": {"mesh.tensor": 8},
  "data4_fsdp2": {"mesh.data": 4, "mesh.fsdp": 2},
  "data2_fsdp4": {"mesh.data": 2, "mesh.fsdp": 4},
  "data4_tensor2": {"mesh.data": 4, "mesh.tensor": 2},
  "fsdp4_tensor2": {"mesh.fsdp": 4, "mesh.tensor": 2},
  "fsdp2_tensor4": {"mesh.fsdp": 2, "mesh.tensor": 4},
  "data2_fsdp2_tensor2": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
}
SEQUENCE_PARALLEL = {"partitioning.sequence_parallel": True}
COLLECTIVE_MATMUL = {**SEQUENCE_PARALLEL, "partitioning.collective_matmul": True}
ADAPTERS = {"lora.rank": 3, "lora.alpha": 5.0}
# ZeRO-1: the optimizer's state is split over data, the parameters are not.
ZERO_1 = {"partitioning.optimizer.model": ("fsdp", "data"), "optimizer.momentum": 0.9}


@dataclasses.dataclass(frozen=True)
class Run:
  """A job, and what three steps of it gave."""

  job: Job
  trained: Trained


def train(
  recipe: str,
  dtype: str,
  overrides: dict[str, Any],
  drawn: Callable[[Job, int], dict[str, np.ndarray]] = host_batch,
  file: str = "single",
) -> Run:
  """Takes three SGD steps on random batches whose rows weigh differently.

  Args:
    recipe: of the job.
    dtype: of the parameters.
    overrides: dotted keys.
    drawn: job, step -> a global batch.
    file: of configs/.
  """
  with jax.enable_x64(dtype == "float64"):
    given = {key: value for key, value in PLAIN.items() if recipe == "lm" or "data." not in key}
    job = make_job(file, recipe, **{**given, "training.parameter_dtype": dtype, **overrides})
    if len({*Ramp.of(job.config.data).stages(STEPS)}) > 1:
      return Run(job, _through_stages(job))
    batch = lambda step: place(job, drawn(job, step))  # noqa: E731
    return Run(job, take_steps(job, batch, first_state(job)))


def _through_stages(job: Job) -> Trained:
  """Takes three steps, each of the program for its stage of the ramps; without gradients."""
  ramp, state, losses, norms = Ramp.of(job.config.data), first_state(job), [], []
  for step in range(STEPS):
    shape = ramp.shape(step)
    compiled = job.compile_train_step(shape).function
    arrays = job.batches.abstract(job.legend, shape)
    batch = place(job, host_batch(dataclasses.replace(job, batch=arrays), seed=step))
    state, metrics = compiled(state, batch)
    losses.append(float(metrics["loss"]))
    norms.append(float(metrics["grad_norm"]))
  return Trained("", {}, losses, norms, named_leaves(jax.device_get(state.params), "params/"))


@functools.cache
def reference(recipe: str, dtype: str, featured: bool = False) -> Run:
  """Returns what one device gives."""
  return train(recipe, dtype, FEATURES if featured else {})


def assert_equal(ours: Run, wanted: Run, dtype: str) -> None:
  """Compares loss, every raw gradient, the norm that clips, and the parameters."""
  wrong = beyond(differences(ours.trained, wanted.trained), BOUNDS[dtype])
  assert not wrong, wrong
  assert max(wanted.trained.norms) > 0.5, "the clipping must act, or its norm is not compared"
