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
from tests.parity.pipeline_cases import INTERLEAVED, LAYERS, mesh
from tests.training.checkpointing.states import CONFIG, RECORD, abstract, tree_of
from training.checkpointing.checkpointer import Checkpointer
from training.setup import Job
from training.state import State

BOUND = 1e-5
SAVED, LAST = 3, 5  # steps
PRECISE = {"training.matmul_precision": "highest", "optimizer.name": "adamw"}
JOBS = {
  "dp8": ("dp8", {}),
  "dp4_tp2": ("dp4_tp2", {}),
  "interleaved": ("single", {**LAYERS, **mesh(4, stage=2, data=2), **INTERLEAVED}),
  "four stages": ("single", {**LAYERS, **mesh(2, stage=4, tensor=2)}),
}


@functools.cache
def prepared(name: str) -> tuple[Job, Callable]:
  """Returns a job, and its compiled train step."""
  strategy, keys = JOBS[name]
  job = make_job(strategy, "lm", **{**keys, **PRECISE})
  return job, job.compile_train_step().function


def step_from(name: str, state: State, last: int) -> tuple[State, list[tuple[float, float]]]:
  """Takes the steps up to `last`; returns the state and each one's (loss, gradient norm)."""
  job, train_step = prepared(name)
  numbers = []
  for step in range(int(state.step), last):
    state, metrics = train_step(state, place(job, host_batch(job, seed=step)))
    numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
  return state, numbers


@pytest.mark.parametrize(
  ("before", "after"),
  [
    ("dp8", "dp4_tp2"),
    pytest.param("interleaved", "four stages", marks=pytest.mark.long),
  ],
)
def test_the_next_losses_are_those_of_the_mesh_that_saved(before, after, tmp_path):
  state, _ = step_from(before, first_state(prepared(before)[0]), SAVED)
  with Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(SAVED, tree_of(state), config=CONFIG, record=RECORD)
  _, wanted = step_from(before, state, LAST)
  job, _ = prepared(after)
  with Checkpointer(tmp_path, read_only=True) as checkpointer:
    step, tree = checkpointer.restore(abstract(job))
  assert step == SAVED
  # A restore without the optimizer would be noticed.
  fresh = State(tree["step"], tree["params"], first_state(job).optimizer)
  _, lost = step_from(after, fresh, LAST)
  first, second = (np.abs(np.divide(a, b) - 1) for a, b in zip(lost, wanted, strict=True))
  assert first.max() < BOUND
  assert second.max() > 10 * BOUND
  with Checkpointer(tmp_path, read_only=True) as checkpointer:
    _, tree = checkpointer.restore(abstract(job))  # the first was donated
  np.testing.assert_allclose(step_from(after, State(**tree), LAST)[1], wanted, rtol=BOUND)
