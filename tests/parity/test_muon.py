"""Muon on meshes: as on one device, resumed on another, and what its update sends."""

import functools
from collections import defaultdict

import jax
import numpy as np
import pytest

from checkpointing.checkpointer import Checkpointer
from partitioning.rules import named_leaves
from planning import analytic
from tests.checkpointing.states import CONFIG, RECORD, abstract, tree_of
from tests.helpers.jobs import first_state, make_job
from tests.parity.budgets import (
  INVOLUNTARY,
  MUON,
  UPDATES,
  Step,
  job_of,
  said_while,
)
from tests.parity.theory import theory, theory_of_muon
from training.parity import BOUNDS
from training.state import State

STEPS = 2
MESHES = [name for name in UPDATES if name != "dp8"]  # of which a complete step is compiled
FLOAT64 = {
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
  "optimizer.schedule": "constant",  # others compute in float32
  "optimizer.warmup_steps": 0,
}


@functools.cache
def compiled(mesh):
  """Returns the job, the compiled update in float64, and what the compiler said."""
  with jax.enable_x64(True):
    if mesh == "single":
      job = make_job("single", "lm", **MUON, **FLOAT64)
    else:
      job = job_of(mesh, **MUON, **FLOAT64)
    placed = job.state_shardings

    def update(state, grads):
      params, optimizer, _ = job.program.updated(state, job.program.laid_out(grads))
      return State(state.step + 1, params, optimizer, state.variables)

    def compile_it():
      ways = {"in_shardings": (placed, placed.params), "out_shardings": placed}
      return job.compile(update, job.state, job.state.params, **ways).function

    function, said = said_while(compile_it)
    return job, function, Step(job, function.as_text(), said)


def take(mesh, state, count):
  """Takes steps by gradients that depend on the step alone; returns the state."""
  job, update, _ = compiled(mesh)
  for _ in range(count):
    random = np.random.default_rng(int(state.step))
    leaves, structure = jax.tree.flatten(job.state.params)
    grads = jax.tree.unflatten(structure, [random.standard_normal(x.shape) for x in leaves])
    state = update(state, jax.device_put(grads, job.state_shardings.params))
  return state


@functools.cache
def trained(mesh):
  """Returns parameters and optimizer state after the steps, on the host."""
  with jax.enable_x64(True):
    return on_host(take(mesh, first_state(compiled(mesh)[0]), STEPS))


def on_host(state):
  leaves = named_leaves(jax.device_get({"params": state.params, "optimizer": state.optimizer}))
  return {name: x for name, x in leaves.items() if x.dtype == np.float64}


def assert_equal(ours, wanted):
  """Compares each tensor by its relative L2 distance."""
  assert ours.keys() == wanted.keys()
  far = {n: np.linalg.norm(ours[n] - x) / np.linalg.norm(x) for n, x in wanted.items()}
  assert {name: d for name, d in far.items() if not d <= BOUNDS["float64"]} == {}


@pytest.mark.parametrize("mesh", MESHES)
def test_muon_trains_as_on_one_device(mesh):
  assert_equal(trained(mesh), trained("single"))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_update_sends_what_theory_says(mesh):
  job, _, ours = compiled(mesh)
  wanted = {key: (row.arrays, 2 * row.bytes) for key, row in theory_of_muon(job).items()}
  assert ours.sent() == wanted  # of 8 bytes each, not 4
  assert INVOLUNTARY not in ours.said


def test_a_step_sends_what_its_gradients_and_its_update_send():
  job = job_of("dp8", **MUON)
  ours = Step(job, job.compile_train_step().function.as_text(), "")
  assert ours.sent() == {key: (row.arrays, row.bytes) for key, row in theory(ours.job).items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_plan_without_a_compiler_counts_the_same(mesh):
  job = compiled(mesh)[0]
  found = defaultdict(int)
  for term in analytic.terms(job):
    if term.kind == "all-to-all" or "orthogonalized" in term.why or "updated" in term.why:
      found[term.kind, term.axes] += round(term.runs * term.elements * term.itemsize)
  assert found == {key: 2 * row.bytes for key, row in theory_of_muon(job).items()}


@pytest.mark.parametrize("mesh", ["fsdp8", "dp8, ZeRO-1"])
def test_the_state_has_one_number_for_each_of_muons_parameters(mesh):
  job = compiled(mesh)[0]
  placed = job.placements["optimizer"]
  momenta = {n: p for n, p in placed.items() if "/momentum/" in n}
  assert len(momenta) == 7
  for name, momentum in momenta.items():
    parameter = name.partition("/momentum/")[2]
    assert momentum.shape == job.placements["parameters"][parameter].shape
    assert not any(n != name and n.endswith(parameter) for n in placed)
    assert any(axes for axes in momentum.spec), name


def test_muon_is_saved_and_resumes_on_another_mesh(tmp_path):
  with jax.enable_x64(True):
    state = take("fsdp8", first_state(compiled("fsdp8")[0]), STEPS - 1)
    with Checkpointer(tmp_path) as checkpointer:
      checkpointer.save(STEPS - 1, tree_of(state), config=CONFIG, record=RECORD)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
      _, tree = checkpointer.restore(abstract(compiled("tp8")[0]))
    resumed = on_host(take("tp8", State(**tree), 1))
  assert_equal(resumed, trained("single"))
