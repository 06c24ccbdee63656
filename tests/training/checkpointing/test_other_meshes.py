"""A run that moves to another mesh: the steps after the restore give the losses it would have had.

The bound is the design's for float32 at highest matmul precision: 1e-5, relative. Two steps are
taken: the loss of the first depends on the parameters alone, that of the second on the optimizer's
restored moments and count as well.
"""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training.checkpointing.states import CONFIG, RECORD, abstract, tree_of
from training.checkpointing.checkpointer import Checkpointer
from training.setup import Job
from training.state import State

BOUND = 1e-5
SAVED, LAST = 3, 5  # steps
PRECISE = {"training.matmul_precision": "highest"}
OTHER = "dp4_tp2"


@functools.cache
def prepared(strategy: str) -> tuple[Job, Callable]:
  """Returns the job of a strategy, and its compiled train step."""
  job = make_job(strategy, "lm", **PRECISE)
  return job, job.compile_train_step().function


def step_from(strategy: str, state: State, last: int) -> tuple[State, list[tuple[float, float]]]:
  """Takes the steps up to `last`; returns the state and each one's (loss, gradient norm)."""
  job, train_step = prepared(strategy)
  numbers = []
  for step in range(int(state.step), last):
    state, metrics = train_step(state, place(job, host_batch(job, seed=step)))
    numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
  return state, numbers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns the folder of a dp8 run saved after step 3, and the numbers of the steps after it."""
  job, _ = prepared("dp8")
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  state, _ = step_from("dp8", first_state(job), SAVED)
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(SAVED, tree_of(state), config=CONFIG, record=RECORD)
  return folder, step_from("dp8", state, LAST)[1]


def test_the_next_losses_are_those_of_the_mesh_that_saved(run):
  folder, wanted = run
  job, _ = prepared(OTHER)
  with Checkpointer(folder, read_only=True) as checkpointer:
    step, tree = checkpointer.restore(abstract(job))
  assert step == SAVED
  _, numbers = step_from(OTHER, State(**tree), LAST)
  np.testing.assert_allclose(numbers, wanted, rtol=BOUND)


def test_a_step_of_another_state_would_be_noticed(run):
  folder, wanted = run
  job, _ = prepared(OTHER)
  with Checkpointer(folder, read_only=True) as checkpointer:
    _, tree = checkpointer.restore(abstract(job))
  fresh = first_state(job)
  lost = State(tree["step"], tree["params"], fresh.optimizer)  # a restore without the optimizer
  _, numbers = step_from(OTHER, lost, LAST)
  first, second = (np.abs(np.divide(a, b) - 1) for a, b in zip(numbers, wanted, strict=True))
  assert first.max() < BOUND
  assert second.max() > 10 * BOUND
