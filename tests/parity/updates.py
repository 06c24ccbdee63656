"""Updates of an optimizer alone, in float64, by the same random gradients on all meshes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job
from tests.parity.budgets import Step, job_of, said_while
from training.parity import BOUNDS
from training.state import State

FLOAT64 = {
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "optimizer.schedule": "constant",  # others compute in float32
  "optimizer.warmup_steps": 0,
}


@dataclasses.dataclass(frozen=True)
class Updates:
  """Some steps of the small `lm` job on meshes.

  Attributes:
    keys: overrides of the config, as items.
    steps: that `trained` takes.

  What is cached lives as long as the process: instances are constants of test files.
  """

  keys: tuple[tuple[str, Any], ...]
  steps: int

  @functools.cache  # noqa: B019
  def compiled(self, mesh):
    """Returns the job, the compiled update, and what the compiler said."""
    with jax.enable_x64(True):
      keys = {**dict(self.keys), **FLOAT64}
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

  def first(self, mesh):
    """Returns the state before the first step."""
    return first_state(self.compiled(mesh)[0])

  def take(self, mesh, state, count):
    """Takes steps by gradients that depend on the step alone; returns the state."""
    job, update, _ = self.compiled(mesh)
    for _ in range(count):
      random = np.random.default_rng(int(state.step))
      leaves, structure = jax.tree.flatten(job.state.params)
      grads = jax.tree.unflatten(structure, [random.standard_normal(x.shape) for x in leaves])
      state = update(state, jax.device_put(grads, job.state_shardings.params))
    return state

  @functools.cache  # noqa: B019
  def trained(self, mesh):
    """Returns parameters and optimizer state after the steps, on the host."""
    with jax.enable_x64(True):
      return on_host(self.take(mesh, self.first(mesh), self.steps))


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
