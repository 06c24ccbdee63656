"""Detects bits of the state that change in memory between two updates.

The memory of a device holds parameters and optimizer state for the whole of a step, and only its
end, the update, writes them. So a step digests what it leaves, in the program that computes it, and
the next one what its update reads, by the digests with which replicas are compared
(training/replica_check.py). No array is gathered, and data that only one device holds is covered.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from input_pipeline.ramp import Shape
from runtime import forms
from training.bad_steps import TrainingStoppedError
from training.replica_check import (
  compile_digests,
  device_text,
  digest_program,
  gathered,
  named_state,
)
from training.setup import Compiled, Job
from training.state import State

_MOST_LINES = 8


class StateChangedError(TrainingStoppedError):
  """The state has changed since it was computed; the same message on every process."""


class KeptState:
  """Compares what each update reads of the state with what the one before has left."""

  def __init__(self, job: Job, *, late: bool):
    """Compiles the digests of a state that is about to be saved.

    Args:
      job: the run's.
      late: the digests of a step are read a step late, so that the device never waits for the host.
    """
    self._job, self._late = job, late
    leaves = named_state(job.placed_state)
    self._names, self._program = [*leaves], digest_program(leaves, job.mesh)
    self._now = compile_digests(leaves, job.mesh, job.compile)
    self._left: jax.Array | None = None
    self._pending: list[tuple[int, jax.Array, jax.Array]] = []

  def forget(self) -> None:
    """Begins anew, with a state that no step of this run has just left."""
    self._left, self._pending = None, []

  def compile_train_step(self, shape: Shape | None = None) -> Compiled:
    """Compiles `(state, batch) -> (state, (metrics, digests read, digests left))`."""
    aside = [gathered(self._job.mesh)] * 2
    return self._job.compile_train_step(shape, step=self._step, aside=aside)

  def _step(self, state: State, batch: Any) -> tuple[State, tuple]:
    read = []

    def before_update(state: State, norm: jax.Array, scale: jax.Array) -> jax.Array:
      # What the compiler cannot know: the norm, which is known when all gradients are, is never
      # below 0, and neither is this sum. So the state is digested after most of its time in memory,
      # and before the update writes over it.
      arrays = {name: jnp.where(norm < -1, 0, x) for name, x in named_state(state).items()}
      found = self._program([*arrays.values()])
      read.append(found)
      some = jnp.sum(found.astype(scale.dtype))
      return jnp.where(some < -1, 0, scale)

    program = dataclasses.replace(self._job.program, before_update=before_update)
    after, metrics = program.train_step(state, batch)
    return after, (metrics, read[0], self._program([*named_state(after).values()]))

  def after_step(self, step: int, found: tuple) -> Any:
    """Returns the metrics of a step; compares the digests of it, or of the one before.

    Args:
      step: the steps done.
      found: what the compiled step has returned beside the state.

    Raises:
      StateChangedError: what an update has read is not what was left.
    """
    metrics, read, left = found
    if self._late:
      self._compare()
    if self._left is not None:
      self._pending.append((step, self._left, read))
    self._left = left
    if not self._late:
      self._compare()
    return metrics

  def before_save(self, step: int, state: State) -> None:
    """Compares a state that is about to be saved; raises as above."""
    if self._left is not None:
      now = self._now([*named_state(state).values()])
      self._pending.append((step + 1, self._left, now))
    self._compare()

  def _compare(self) -> None:
    pending, self._pending = self._pending, []
    for step, left, read in pending:
      differs = np.asarray(left) != np.asarray(read)
      if differs.any():
        raise StateChangedError(self._text(step, differs))

  def _text(self, step: int, differs: np.ndarray) -> str:
    """Returns the message: which arrays, and on which devices.

    Args:
      step: that has read them, counted from 1.
      differs: [device of the mesh, array].
    """
    devices = [*self._job.mesh.devices.flat]
    lines = [
      f"{name}: {device_text([devices[place] for place in np.flatnonzero(column)])}"
      for name, column in zip(self._names, differs.T, strict=True)
      if column.any()
    ]
    return (
      f"step {step - 1}: bits of its state have changed in memory before step {step} took it:"
      + "".join(f"\n  {line}" for line in forms.first(lines, _MOST_LINES))
      + "\nNothing of this is saved. Run the same command again to resume from the last "
      "checkpoint; leave out a device that several such messages name. training.check_memory=False "
      "turns the check off"
    )
