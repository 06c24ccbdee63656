"""Small jobs for the tests: shipped strategies and recipes, with distinct prime-ish sizes."""

import importlib

import jax
import numpy as np

from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes
from partitioning.rules import named_leaves
from runtime.devices import Devices
from tests.helpers.compiling import FAST
from training.replica_check import ReplicaCheck
from training.setup import Job, prepare
from training.state import State, wide

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
  "vit": {
    "model.input_size": 432,  # 12 x 12 x 3
    "model.channels": 3,
    "model.patch_size": 3,
    "model.layers": 2,
    "model.dropout_rate": 0.0,
    "model.model_size": 40,
    "model.feedforward_size": 56,
    "model.heads": 8,
    "model.output_size": 10,
    "data.global_batch_size": 24,
  },
  "mlp_tutorial": {
    "model.input_size": 13,
    "model.model_size": 40,
    "model.feedforward_size": 56,
    "data.global_batch_size": 16,
  },
}


def make_job(strategy: str, recipe: str, /, **overrides) -> Job:
  """Returns a prepared small job; `overrides` are dotted keys."""
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  for key, value in {
    **SMALL["lm" if recipe == "lm_bpe" or "model=lm" in recipe else recipe],
    "compiler_options": FAST,
    **overrides,
  }.items():
    config.update_from_flattened_dict({key: value})
  slices = {axis: size for axis, size in config.mesh_dcn.items() if size != 1}
  sizes = resolve_sizes(config.mesh, None, slices)
  config = finalize.finalize(config, "cpu")
  validate.check(config, sizes)
  return prepare(config, Devices("cpu", True, sizes, slices))


def replica_check(job: Job) -> ReplicaCheck:
  """Returns the check of the replicas of a job's state, as a run has it."""
  every = job.config.training.replica_check_every_steps
  return ReplicaCheck(job.placed_state, job.mesh, job.compile, every=every, late=False)


def first_state(job: Job) -> State:
  """Returns a first state that is the same numbers on every mesh and in every dtype.

  Drawn by NumPy: to compile the program that draws a model's own takes as long as a train step.
  Scales and biases are random too, where models begin with ones and zeros.
  """
  histories = named_leaves(job.state.variables)
  known = all(name.endswith("/amax_history") for name in histories)
  assert known, "what a model's own variables begin with, only the model knows"
  variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), job.state.variables)
  names, structure = list(named_leaves(job.state.params)), jax.tree.structure(job.state.params)
  random = np.random.default_rng(job.config.seed)
  unscaled = 0 if job.config.model.get("norm_scale_from_one") else 1
  leaves = []
  for name, leaf in zip(names, jax.tree.leaves(job.state.params), strict=True):
    values = random.standard_normal(leaf.shape)
    if name.endswith("/scale"):
      values = unscaled + values / 10
    elif name.endswith("/bias"):
      values /= 10
    elif name.endswith("taps"):
      values /= 2  # of a convolution of 4 tokens
    else:
      values *= 0.16  # of a kernel with 40 inputs
    leaves.append(values.astype(leaf.dtype))
  params = jax.tree.unflatten(structure, leaves)
  optimizer = jax.jit(lambda params: job.program.optimizer.init(wide(params)))(
    job.program.split(params)[0]
  )
  state = State(np.zeros((), np.int32), params, optimizer, variables)
  return jax.device_put(jax.device_get(state), job.state_shardings)


def zipf(random: np.random.Generator, limit: int, shape: tuple[int, ...]) -> np.ndarray:
  """Draws ids below a limit as text has tokens: the r-th most common one has a share of 1 / r.

  The most common is the last.
  """
  shares = 1 / np.arange(limit, 0, -1)
  return random.choice(limit, shape, p=shares / shares.sum()).astype(np.int32)


def host_batch(job: Job, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns a random global batch whose rows weigh differently, some tokens nothing.

  Tokens come as in text, so that many share a row of the table; classes come equally often.
  """
  random = np.random.default_rng(seed)
  vocabulary = job.config.model.get("vocabulary_size")
  batch = {}
  for name, array in job.batch.items():
    if name == "weights":
      values = random.integers(0, 3, array.shape).astype(array.dtype)
      values.flat[0] = 1
    elif name == "segments":
      starts = random.random(array.shape) < 0.2
      values = np.cumsum(starts, axis=1, dtype=np.int32) - starts[:, :1]
    elif array.dtype == np.int32 and vocabulary:
      values = zipf(random, vocabulary, array.shape)
    elif array.dtype == np.int32:
      values = random.integers(0, job.config.model.output_size, array.shape, np.int32)
    else:
      values = random.standard_normal(array.shape).astype(array.dtype)
    batch[name] = values
  return batch


def place(job: Job, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
  """Returns the batch, laid out as the job's."""
  return jax.device_put(batch, job.batch_shardings)
