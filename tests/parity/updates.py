"""Updates of an optimizer alone, by gradients that are the same on all meshes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state
from tests.parity.budgets import Step, job_of, said_while
from tests.training.checkpointing.states import moved
from training.parity import BOUNDS
from training.state import State, wide

FLOAT64 = {"training.parameter_dtype": "float64", "training.matmul_precision": "highest"}
CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}  # others are in float32


@dataclasses.dataclass(frozen=True, eq=False)
class Updates:
  """Updates of a small job on meshes: gradients are random numbers times where they are taken.

  Attributes:
    keys: overrides of the config.
    steps: that `trained` takes.
    recipe: of the job.
    x64: whether arrays are in float64.

  What is cached lives as long as the process: instances are constants of test files.
  """

  keys: Mapping[str, Any]
  steps: int
  recipe: str = "lm"
  x64: bool = True

  @functools.cache  # noqa: B019
  def compiled(self, mesh):
    """Returns the job, the compiled update, and its text with what the compiler said."""
    with jax.enable_x64(self.x64):
      job = job_of(mesh, recipe=self.recipe, **self.keys)
      placed, factors = job.state_shardings, jax.eval_shape(wide, job.state.params)

      def update(state, factors):
        point = job.program.gradient_point(state)
        grads = jax.tree.map(lambda x, y: x.astype(y.dtype) * y, point, factors)
        params, optimizer, _ = job.program.updated(state, job.program.laid_out(grads))
        return State(state.step + 1, params, optimizer, state.variables), point

      def compile_it():
        ways = (placed, placed.params)
        how = {"in_shardings": ways, "out_shardings": ways}
        return job.compile(update, job.state, factors, **how).function

      function, said = said_while(compile_it)
      return job, function, Step(job, function.as_text(), said)

  def first(self, mesh):
    """Returns the state before the first update."""
    with jax.enable_x64(self.x64):
      return first_state(self.compiled(mesh)[0])

  def take(self, mesh, state, count):
    """Takes updates by factors that depend on the step alone; returns the state, all on the host.

    Of float64 jobs without what is in another dtype.
    """
    with jax.enable_x64(self.x64):
      point = {}
      for _ in range(count):
        state, point = self._next(mesh, state)
      tree = {"params": state.params, "optimizer": state.optimizer, "point": point}
      leaves = named_leaves(jax.device_get(tree))
    return {n: x for n, x in leaves.items() if x.dtype == np.float64 or not self.x64}

  def _next(self, mesh, state):
    job, update, _ = self.compiled(mesh)
    random = np.random.default_rng(int(state.step))
    leaves, structure = jax.tree.flatten(job.state.params)
    dtype = np.float64 if self.x64 else np.float32
    factors = [random.standard_normal(x.shape).astype(dtype) for x in leaves]
    placed = jax.device_put(structure.unflatten(factors), job.state_shardings.params)
    return update(state, placed)

  @functools.cache  # noqa: B019
  def trained(self, mesh):
    """Returns the last point, parameters and optimizer state after the updates."""
    return self.take(mesh, self.first(mesh), self.steps)

  def resumed(self, folder, before, after, last=1):
    """Returns the same of a run whose `last` updates are on another mesh, behind a checkpoint."""
    state, step = self.first(before), self.steps - last
    with jax.enable_x64(self.x64):
      for _ in range(step):
        state, _ = self._next(before, state)
      state = moved(folder, step, state, self.compiled(after)[0])
    return self.take(after, state, last)


def assert_equal(ours, wanted):
  """Compares each tensor by its relative L2 distance."""
  assert ours.keys() == wanted.keys()
  far = {
    name: np.linalg.norm(ours[name] - x) / max(np.linalg.norm(x), 1e-30)
    for name, x in wanted.items()
    if not np.array_equal(ours[name], x)
  }
  assert {name: d for name, d in far.items() if not d <= BOUNDS["float64"]} == {}
