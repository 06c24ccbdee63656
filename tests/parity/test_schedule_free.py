"""Schedule-free AdamW on meshes: as on one device, and resumed on another."""

import functools

import jax
import numpy as np
import pytest

from partitioning.rules import named_leaves
from planning import terms
from tests.helpers.jobs import first_state, make_job
from tests.parity.budgets import INVOLUNTARY, Step, job_of, of_sources, said_while
from tests.parity.updates import assert_equal
from tests.training.checkpointing.states import moved
from training.state import State

STEPS = 3
MESHES = ("dp8, ZeRO-1", "fsdp8", "dp2_fsdp2_tp2")
KEYS = {
  "optimizer.name": "schedule_free_adamw",
  "optimizer.warmup_steps": 2,
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
}


@functools.cache
def compiled(mesh):
  """Returns the job, a step by gradients that it is given, and its program.

  The step also returns where it takes its gradients, which here are random numbers times that.
  """
  with jax.enable_x64(True):
    job = make_job("single", "lm", **KEYS) if mesh == "single" else job_of(mesh, **KEYS)
    placed = job.state_shardings

    def step(state, factors):
      point = job.program.gradient_point(state)
      grads = job.program.laid_out(jax.tree.map(lambda x, y: x * y, point, factors))
      params, optimizer, _ = job.program.updated(state, grads)
      return State(state.step + 1, params, optimizer, state.variables), point

    def compile_it():
      ways = {"in_shardings": (placed, placed.params), "out_shardings": (placed, placed.params)}
      return job.compile(step, job.state, job.state.params, **ways).function

    function, said = said_while(compile_it)
    return job, function, Step(job, function.as_text(), said)


def take(mesh, state, count):
  """Takes steps by factors that depend on the step alone; returns the state and the last point."""
  job, step, _ = compiled(mesh)
  for _ in range(count):
    random = np.random.default_rng(int(state.step))
    leaves, structure = jax.tree.flatten(job.state.params)
    factors = jax.tree.unflatten(structure, [random.standard_normal(x.shape) for x in leaves])
    state, point = step(state, jax.device_put(factors, job.state_shardings.params))
  return state, point


@functools.cache
def trained(mesh):
  """Returns the last point, parameters and optimizer state after the steps, on the host."""
  with jax.enable_x64(True):
    return on_host(*take(mesh, first_state(compiled(mesh)[0]), STEPS))


def on_host(state, point):
  tree = {"point": point, "params": state.params, "optimizer": state.optimizer}
  leaves = named_leaves(jax.device_get(tree))
  return {name: x for name, x in leaves.items() if x.dtype == np.float64}


@pytest.mark.parametrize("mesh", MESHES)
def test_it_trains_as_on_one_device_and_its_state_is_sharded_as_the_parameters(mesh):
  assert_equal(trained(mesh), trained("single"))
  job, _, ours = compiled(mesh)
  assert INVOLUNTARY not in ours.said
  placed = job.placements["optimizer"]
  for name, parameter in job.placements["parameters"].items():
    for tree in ("iterates", "second_moment"):
      found = placed[f"optimizer/{tree}/{name}"]
      assert found.letters == parameter.letters
      if "ZeRO" not in mesh:
        assert found.spec == parameter.spec, name


@pytest.mark.parametrize("mesh", MESHES)
def test_only_zero_1_sends_something_the_iterates_and_the_updated_parameters(mesh):
  job, _, ours = compiled(mesh)
  assert ours.sent() == of_sources(job, terms.updated_parameters)
  assert bool(ours.sent()) == ("ZeRO" in mesh)


def test_it_is_saved_and_resumes_on_another_mesh(tmp_path):
  with jax.enable_x64(True):
    state, _ = take("fsdp8", first_state(compiled("fsdp8")[0]), STEPS - 1)
    state = moved(tmp_path, STEPS - 1, state, compiled("dp2_fsdp2_tp2")[0])
    resumed = on_host(*take("dp2_fsdp2_tp2", state, 1))
  assert_equal(resumed, trained("single"))
