"""No process enters a step before all have its batch, and all stop before the same one.

A process that waits in a collective for one that never comes cannot be reached: its state is given
away to a step that does not end. So the processes meet before each step, outside of JAX's
computations, where they can still turn back with the state of the last one.
"""

from processes.coordination import Group
from processes.preemption import StopRequest

# Never reached: the watchdog ends a run that hangs before, and names who is behind.
_FOR_EVER_SECONDS = 7 * 24 * 3600


class Lockstep:
  """The meetings before the steps of training and the batches of evaluation."""

  def __init__(self, group: Group, stop: StopRequest):
    """Takes the processes, and what asks this one to stop."""
    self._group, self._stop = group, stop

  @property
  def stopping(self) -> bool:
    """Returns whether this process is asked to stop; the others may not know yet."""
    return bool(self._stop)

  def enter(self) -> bool:
    """Returns whether all take the next step, the same on every process; waits for the last.

    Called before every step, as often and in the same order by all. At the barrier a stop that any
    process knows of is known to all.
    """
    if self._group.alone:
      return not self.stopping
    return self._group.all_true("step", not self.stopping, timeout_seconds=_FOR_EVER_SECONDS)
