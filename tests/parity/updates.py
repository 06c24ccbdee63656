"""Updates of an optimizer alone, or train steps, in float64, the same on all meshes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.budgets import Step, job_of, said_while
from tests.training.checkpointing.states import moved
from training.parity import BOUNDS
from training.state import State

FLOAT64 = {
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "optimizer.schedule": "constant",  # others compute in float32
  "optimizer.warmup_steps": 0,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
  """Runs of the small `lm` job on meshes.

  Attributes:
    keys: overrides of the config.
    steps: that `trained` takes.

  What is cached lives as long as the process: instances are constants of test files.
  """

  keys: Mapping[str, Any]
  steps: int

  def first(self, mesh):
    """Returns the state before the first step."""
    return first_state(self.compiled(mesh)[0])

  def take(self, mesh, state, count):
    """Takes steps by inputs that depend on the step alone; returns the state."""
    job, update, _ = self.compiled(mesh)
    for _ in range(count):
      state = update(state, self.inputs(job, int(state.step)))
    return state

  @functools.cache  # noqa: B019
  def trained(self, mesh):
    """Returns parameters and optimizer state after the steps, on the host."""
    with jax.enable_x64(True):
      return on_host(self.take(mesh, self.first(mesh), self.steps))

  def resumed(self, folder, before, after):
    """Returns the same of a run whose last step is on another mesh, behind a checkpoint."""
    with jax.enable_x64(True):
      state = self.take(before, self.first(before), self.steps - 1)
      state = moved(folder, self.steps - 1, state, self.compiled(after)[0])
      return on_host(self.take(after, state, 1))


class Updates(Runs):
  """Updates by random gradients."""

  @functools.cache  # noqa: B019
  def compiled(self, mesh):
    """Returns the job, the compiled update, and what the compiler said."""
    with jax.enable_x64(True):
      keys = {**self.keys, **FLOAT64}
      job = make_job("single", "lm", **keys) if mesh == "single" else job_of(mesh, **keys)
      placed = job.state_shardings

      def update(state, grads):
        params, optimizer, _ = job.program.updated(state, job.program.laid_out(grads))
        return State(state.step + 1, params, optimizer, state.variables)

      def compile_it():
        ways = {"in_shardings": (placed, placed.params), "out_shardings": placed}
        return job.compile(update, job.state, job.state.params, **ways).function

      function, said = said_while(compile_it)
      return job, function, Step(job, function.as_text(), said)

  def inputs(self, job, step):
    """Returns the gradients of a step."""
    random = np.random.default_rng(step)
    leaves, structure = jax.tree.flatten(job.state.params)
    grads = jax.tree.unflatten(structure, [random.standard_normal(x.shape) for x in leaves])
    return jax.device_put(grads, job.state_shardings.params)


class TrainSteps(Runs):
  """Train steps of a shipped strategy, in float64."""

  @functools.cache  # noqa: B019
  def compiled(self, strategy):
    """Returns the job, the step from states and batches to states, and its text."""
    wide = {"training.parameter_dtype": "float64", "training.matmul_precision": "highest"}
    with jax.enable_x64(True):
      job = make_job(strategy, "lm", **wide, **self.keys)
      step = job.compile_train_step().function
    return job, lambda state, batch: step(state, batch)[0], Step(job, step.as_text(), "")

  def inputs(self, job, step):
    """Returns the batch of a step."""
    return place(job, host_batch(job, seed=step))


def on_host(state):
  """Returns name -> array of parameters and optimizer state, those in float64."""
  leaves = named_leaves(jax.device_get({"params": state.params, "optimizer": state.optimizer}))
  return {name: x for name, x in leaves.items() if x.dtype == np.float64}


def assert_equal(ours, wanted):
  """Compares each tensor by its relative L2 distance."""
  assert ours.keys() == wanted.keys()
  far = {
    name: np.linalg.norm(ours[name] - x) / max(np.linalg.norm(x), 1e-30)
    for name, x in wanted.items()
    if not np.array_equal(ours[name], x)
  }
  assert {name: d for name, d in far.items() if not d <= BOUNDS["float64"]} == {}
