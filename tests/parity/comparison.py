"""Training on a mesh beside training on one device: what the tests of parity share.

Norm and bounds are the design's: relative L2 per tensor, 1e-5 in float32 at highest matmul
precision, 1e-12 in float64, where rounding cannot hide a wrong reduction. The floor keeps
tensors that are mathematically zero from being judged by their rounding.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from partitioning.rules import named_leaves
from tests.jobs import host_batch, make_job, place
from training.job import Job

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
STEPS = 3

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


@dataclasses.dataclass(frozen=True)
class Trained:
  """What three steps gave.

  Attributes:
    job: what was trained.
    text: the compiled step.
    gradients: of the first step, raw: before clipping and optimizer.
    losses: of each step.
    norms: likewise, the global norm that clipping uses.
    parameters: after the last step.
  """

  job: Job
  text: str
  gradients: dict[str, np.ndarray]
  losses: list[float]
  norms: list[float]
  parameters: dict[str, np.ndarray]


def train(recipe: str, dtype: str, overrides: dict[str, Any]) -> Trained:
  """Takes three SGD steps on random batches whose rows weigh differently."""
  with jax.enable_x64(dtype == "float64"):
    given = {key: value for key, value in PLAIN.items() if recipe == "lm" or "data." not in key}
    job = make_job("single", recipe, **{**given, "training.parameter_dtype": dtype, **overrides})

    def probe(state, batch):
      key = jax.random.key(job.config.seed)
      gradients, _ = job.program.gradients(state.params, batch, key)
      return gradients, *job.program.train_step(state, batch)

    shardings = job.state_shardings
    compiled = job.compile(
      probe,
      job.state,
      job.batch,
      in_shardings=(shardings, job.batch_shardings),
      out_shardings=(shardings.params, shardings, None),
    ).function
    state, losses, norms = job.initial_state(), [], []
    for step in range(STEPS):
      gradients, state, metrics = compiled(state, place(job, host_batch(job, seed=step)))
      if step == 0:
        first = {name: np.asarray(leaf) for name, leaf in named_leaves(gradients).items()}
      losses.append(float(metrics["loss"]))
      norms.append(float(metrics["grad_norm"]))
      job.check_placed(state)
    parameters = {name: np.asarray(leaf) for name, leaf in named_leaves(state.params).items()}
  return Trained(job, compiled.as_text(), first, losses, norms, parameters)


@functools.cache
def reference(recipe: str, dtype: str, featured: bool = False) -> Trained:
  """Returns what one device gives."""
  return train(recipe, dtype, FEATURES if featured else {})


def assert_equal(ours: Trained, wanted: Trained, dtype: str) -> None:
  """Compares loss, every raw gradient, the norm that clips, and the parameters."""
  bound = BOUNDS[dtype]
  np.testing.assert_allclose(ours.losses, wanted.losses, rtol=bound, err_msg="losses")
  assert_close(ours.gradients, wanted.gradients, bound)
  np.testing.assert_allclose(ours.norms, wanted.norms, rtol=bound, err_msg="norms")
  assert_close(ours.parameters, wanted.parameters, bound)
  assert max(wanted.norms) > 0.5, "the clipping must act, or its norm is not compared"


def assert_close(ours: dict, wanted: dict, bound: float) -> None:
  """Compares by relative L2 per tensor, with a floor for tensors that are zero."""
  assert ours.keys() == wanted.keys()
  everything = math.sqrt(sum(float(np.sum(np.square(x))) for x in wanted.values()))
  wrong = {}
  for name, value in wanted.items():
    assert ours[name].dtype == value.dtype
    floor = np.finfo(value.dtype).eps * everything
    distance = np.linalg.norm(ours[name] - value) / max(np.linalg.norm(value), floor)
    if not distance <= bound:
      wrong[name] = distance
  assert not wrong, wrong
