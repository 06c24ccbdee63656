"""A run that moves to another mesh: the steps after the restore give the losses it would have had.

The bound is the design's for float32 at highest matmul precision: 1e-5, relative. Two steps are
taken: the loss of the first depends on the parameters alone, that of the second on the optimizer's
restored moments and count as well.
"""

import numpy as np
import pytest

from checkpointing.checkpointer import Checkpointer
from tests.checkpointing.states import CONFIG, RECORD, abstract, tree_of
from tests.helpers.jobs import host_batch, make_job, place
from training.setup import Job
from training.state import State

BOUND = 1e-5
SAVED, LAST = 3, 5  # steps
PRECISE = {"training.matmul_precision": "highest"}


def step_from(job: Job, state: State, last: int) -> tuple[State, list[tuple[float, float]]]:
  """Takes the steps up to `last`; returns the state and each one's (loss, gradient norm)."""
  train_step = job.compile_train_step().function
  numbers = []
  for step in range(int(state.step), last):
    state, metrics = train_step(state, place(job, host_batch(job, seed=step)))
    numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
  return state, numbers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns the folder of a dp8 run saved after step 3, and the numbers of the steps after it."""
  job = make_job("dp8", "lm", **PRECISE)
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  state, _ = step_from(job, job.initial_state(), SAVED)
  with Checkpointer(folder) as checkpointer:
    checkpointer.save(SAVED, tree_of(state), config=CONFIG, record=RECORD)
  return folder, step_from(job, state, LAST)[1]


@pytest.mark.parametrize("strategy", ["dp4_tp2", "fsdp8", "single"])
def test_the_next_losses_are_those_of_the_mesh_that_saved(strategy, run):
  folder, wanted = run
  job = make_job(strategy, "lm", **PRECISE)
  with Checkpointer(folder, read_only=True) as checkpointer:
    step, tree = checkpointer.restore(abstract(job))
  assert step == SAVED
  _, numbers = step_from(job, State(**tree), LAST)
  np.testing.assert_allclose(numbers, wanted, rtol=BOUND)


def test_a_step_of_another_state_would_be_noticed(run):
  folder, wanted = run
  job = make_job("single", "lm", **PRECISE)
  with Checkpointer(folder, read_only=True) as checkpointer:
    _, tree = checkpointer.restore(abstract(job))
  fresh = job.initial_state()
  lost = State(tree["step"], tree["params"], fresh.optimizer)  # a restore without the optimizer
  _, numbers = step_from(job, lost, LAST)
  first, second = (np.abs(np.divide(a, b) - 1) for a, b in zip(numbers, wanted, strict=True))
  assert first.max() < BOUND
  assert second.max() > 10 * BOUND
