"""Detects silent data corruption: replicas of parameters and optimizer state that differ.

A device that computes wrong results, or a bit flip in its memory, raises no error. Replicas get the
same updates to the bit, so they can be compared.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.rules import named_leaves
from processes.coordination import current
from training import replica_digests
from training.bad_steps import TrainingStoppedError
from training.setup import Job
from training.state import State

_MOST_LINES = _MOST_NAMES = 8
KEY = "training.replica_check_every_steps"


class CopiesDifferError(TrainingStoppedError):
  """Copies of the state differ between devices; the same message on every process.

  Attributes:
    step: the first after which it was seen; the check before found nothing.
    wrong: the devices whose replicas differ from the majority.
  """

  def __init__(self, step: int, found: Sequence[replica_digests.Difference], text: str):
    """Takes what differs after a step, and the message about it."""
    self.step = step
    self.wrong = tuple(dict.fromkeys(device for one in found for device in one.wrong))
    super().__init__(text)


class ReplicaCheck:
  """Compares replicas every `training.replica_check_every_steps` steps, and before every save."""

  def __init__(self, job: Job):
    """Compiles the digests, unless the config turns the check off or nothing is replicated."""
    self._every = job.config.training.replica_check_every_steps
    self._simulated = job.devices.simulated
    self._copies = replica_digests.Copies(_named(job.placed_state) if self._every else {}, job.mesh)
    self._pending: tuple[int, jax.Array] | None = None
    self._checked: int | None = None
    if not self._copies.leaves:
      return
    # A single process reads the rows directly; several processes each need all rows.
    together = PartitionSpec(job.mesh.axis_names) if current().alone else PartitionSpec()
    self._digests = job.compile(
      replica_digests.digest_program(self._copies.leaves, job.mesh),
      list(self._copies.leaves.values()),
      out_shardings=NamedSharding(job.mesh, together),
    ).function

  def after_step(self, step: int, state: State) -> None:
    """Starts a check if one is due, and reads the previous one.

    On accelerators a check is read a step late, so that the device never waits for the host.

    Args:
      step: the steps done.
      state: after them; it may be donated as soon as this returns.

    Raises:
      CopiesDifferError: copies differ.
    """
    self._read()
    self._checked = None  # a run that was rolled back reaches the same step again
    if self._copies.leaves and step % self._every == 0:
      self._begin(step, state)
      if self._simulated:
        self._read()

  def before_save(self, step: int, state: State) -> None:
    """Checks a state that is about to be saved, unless it was checked; raises as above."""
    if self._copies.leaves and self._checked != step:
      self._begin(step, state)
    self._read()

  def _begin(self, step: int, state: State) -> None:
    arrays = _named(state)
    self._pending = step, self._digests([arrays[name] for name in self._copies.leaves])
    self._checked = step

  def _read(self) -> None:
    if self._pending is None:
      return
    (step, digests), self._pending = self._pending, None
    if found := self._copies.differences(np.asarray(digests)):
      raise CopiesDifferError(step, found, _text(step, found, self._copies.leaves))


def _named(state: State) -> dict[str, Any]:
  """Returns the leaves by the names that the layout gives them."""
  optimizer = named_leaves(state.optimizer, "optimizer/")
  variables = named_leaves(state.variables, "variables/")
  return {"step": state.step, **named_leaves(state.params), **optimizer, **variables}


def _text(step: int, found: Sequence[replica_digests.Difference], leaves: Mapping[str, Any]) -> str:
  """Returns the message: which devices, then array by array."""
  lines = [f"  {_line(one, leaves[one.name].shape)}" for one in found]
  if len(lines) > _MOST_LINES:
    lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
  counts = collections.Counter(device for one in found if one.right for device in one.wrong)
  if counts:
    named = _devices([device for device, _ in counts.most_common()])
    verdict = f"{named} {'differs' if len(counts) == 1 else 'differ'} from the other replicas"
  else:
    verdict = "there is no majority, so it is not known which device is wrong"
  return (
    f"step {step}: copies of the state differ, which must be the same to the bit: {verdict}:\n"
    + "\n".join(lines)
    + f"\nThis step is not saved. Run the same command again to resume from the last checkpoint; "
    f"if the same device is named again, leave it out. Where many differ at once after few steps, "
    f"a collective or an operation of this platform may not give the same bits everywhere: {KEY}=0 "
    f"turns this check off"
  )


def _line(one: replica_digests.Difference, shape: Sequence[int]) -> str:
  name = f"{one.name} [{', '.join(map(str, shape))}]"
  if not one.right:
    return f"{name}: the copies on {_devices(one.wrong)} differ"
  return f"{name}: {_devices(one.wrong)} against {_devices(one.right)}"


def _devices(devices: Sequence[jax.Device]) -> str:
  """Returns `device 3 (process 1)` or `devices 3, 5 (process 1), 8 (process 2)`."""
  by_process = collections.defaultdict(list)
  for device in devices[:_MOST_NAMES]:
    by_process[device.process_index].append(str(device.id))
  texts = [
    ", ".join(ids) + ("" if current().alone else f" (process {process})")
    for process, ids in by_process.items()
  ]
  if len(devices) > _MOST_NAMES:
    texts.append(f"{len(devices) - _MOST_NAMES} more")
  return f"device{'s' if len(devices) > 1 else ''} {', '.join(texts)}"
