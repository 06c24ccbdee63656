"""The barrier before each step: all processes have their batch, and all stop at the same step.

A process that waits in a collective for one that never arrives cannot recover: its state was
donated to a step that does not end. So there is a barrier before each step, outside JAX's
computations, where a process still has the state of the last step.
"""

from processes.coordination import Group
from processes.preemption import StopRequest

# Never reached: before that, the watchdog ends a run that hangs, and names who is behind.
_FOR_EVER_SECONDS = 7 * 24 * 3600


class Lockstep:
  """The barriers before the steps of training and the batches of evaluation."""

  def __init__(self, group: Group, stop: StopRequest):
    """Takes the processes, and this one's stop request."""
    self._group, self._stop = group, stop

  @property
  def stopping(self) -> bool:
    """Returns whether this process is asked to stop; the others may not know yet."""
    return bool(self._stop)

  def enter(self) -> bool:
    """A barrier; returns whether all processes take the next step, the same on all of them.

    All call it before every step, in the same order. A stop that any process knows of is known to
    all after the barrier.
    """
    if self._group.alone:
      return not self.stopping
    return self._group.all_true("step", not self.stopping, timeout_seconds=_FOR_EVER_SECONDS)
