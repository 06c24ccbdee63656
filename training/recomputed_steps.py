"""Detects a device that computes wrong: some steps are computed again, each part elsewhere.

Replicas can be compared (training/replica_check.py); what only one device holds or computes cannot.
So every so many steps the state and the batch are copied first, each device's part to the next
device of its process; the same step is compiled for the devices in that order, and must give the
same bits. A process with one device computes its part twice on it, which finds what passes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from input_pipeline.ramp import Shape
from runtime import forms
from runtime.printable import few
from training.bad_steps import TrainingStoppedError
from training.replica_check import compile_digests, named_state
from training.setup import Job

_MOST = 8  # arrays, and devices of each, in a message


class StepsDifferError(TrainingStoppedError):
  """A step gave other bits when it was computed again; the same message on every process."""


def elsewhere(mesh: Mesh) -> Mesh:
  """Returns the mesh with the devices of each process moved on by one place."""
  moved = devices = list(mesh.devices.flat)
  for process in {device.process_index for device in devices}:
    places = [n for n, device in enumerate(devices) if device.process_index == process]
    source = dict(zip(places, [*places[1:], places[0]], strict=True))
    moved = [devices[source[n]] if n in source else device for n, device in enumerate(moved)]
  return Mesh(np.array(moved).reshape(mesh.devices.shape), mesh.axis_names, mesh.axis_types)


def copied(tree: Any, mesh: Mesh, other: Mesh) -> Any:
  """Returns a copy of arrays: the part of each device of a mesh is on the device of its place."""
  to = dict(zip(mesh.devices.flat, other.devices.flat, strict=True))

  def one(array: jax.Array) -> jax.Array:
    kind = array.sharding.memory_kind
    sharding = NamedSharding(other, array.sharding.spec, memory_kind=kind)
    parts = [
      jax.device_put(
        part.data, SingleDeviceSharding(to[part.device], memory_kind=kind), may_alias=False
      )
      for part in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

  return jax.tree.map(one, tree)


class RecomputedSteps:
  """Computes every so many steps twice, and compares the states that they leave."""

  def __init__(self, job: Job, every: int, done: int):
    """Compiles the step for the devices in their other order, and the digests in both orders.

    Args:
      job: the run's.
      every: steps from one that is computed twice to the next.
      done: steps; those of the run's ramp after them are compiled.
    """
    self._every, self._job = every, job
    # No programs that are stored: they are for the devices in the order of the run.
    self._other = dataclasses.replace(job, mesh=elsewhere(job.mesh), executables=None)
    self._left: np.ndarray | None = None  # the digests of the step that was computed first
    ramp = job.batches.ramp
    self._compiled: dict[Shape, Callable] = {}
    for *_, shape in ramp.stages(job.batches.steps, done):
      if shape not in self._compiled:
        step = self._other.compile_train_step(*([] if shape == ramp.last else [shape]))
        self._compiled[shape] = step.function
    self._digests = [
      compile_digests(named_state(one.placed_state), one.mesh, one.compile)
      for one in (self._job, self._other)
    ]

  def before_step(self, step: int, state: Any, batch: Any) -> None:
    """Computes a step elsewhere, if it is one of those, from copies.

    Args:
      step: that is about to be computed, counted from 1.
      state: before it.
      batch: of it.
    """
    compiled = self._compiled.get(self._job.batches.ramp.shape(step - 1))
    if step % self._every or compiled is None:  # None: rolled back to a stage before this start
      return
    after, _ = compiled(*copied((state, batch), self._job.mesh, self._other.mesh))
    self._left = self._of(1, after)

  def after_step(self, step: int, state: Any) -> None:
    """Compares the state after a step with the one that the same step has left elsewhere.

    Raises:
      StepsDifferError: they differ.
    """
    if self._left is None:
      return
    first, again, self._left = self._of(0, state), self._left, None
    if (first != again).any():
      raise StepsDifferError(self._text(step, first != again))

  def _of(self, which: int, state: Any) -> np.ndarray:
    """Returns the digests of a state: uint32 [place in the mesh, array]."""
    return np.asarray(self._digests[which]([*named_state(state).values()]))

  def _text(self, step: int, differs: np.ndarray) -> str:
    """Returns the message: which arrays, and which devices computed the parts that differ."""
    ours, theirs = (one.mesh.devices.flat for one in (self._job, self._other))
    pairs = [f"{a.id} and {b.id}" for a, b in zip(ours, theirs, strict=True)]
    lines = [
      f"{name}: devices {few([pairs[place] for place in np.flatnonzero(column)], _MOST)}"
      for name, column in zip(named_state(self._job.placed_state), differs.T, strict=True)
      if column.any()
    ]
    return (
      f"step {step}: computed twice from the same state and batch, it gave other bits:"
      + "".join(f"\n  {line}" for line in forms.first(lines, _MOST))
      + "\nThe first of a pair had that part in the run, the second when it was computed again. "
      "It is not known which is wrong, and a wrong gradient reaches all parts. This step is not "
      "saved. Run the same command again to resume from the last checkpoint; a device that several "
      "such messages name is to be left out. Where the first step that is computed twice differs, "
      "an operation of this platform adds in no fixed order: "
      "training.recompute_every_steps=0 turns the comparison off."
    )
