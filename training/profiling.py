"""A trace of some steps, which xprof (TensorBoard's profiler) and Perfetto open."""

import jax
from etils import epath
from ml_collections import ConfigDict

from processes.group import current
from training.reporting import say


class Profile:
  """Traces the steps that `profile.start_step` and `profile.steps` name; a context manager."""

  def __init__(self, keys: ConfigDict, folder: epath.Path):
    """Traces nothing yet; `keys.start_step` is counted from 0."""
    # Process 0 alone: those of one host would write to one file.
    count = keys.steps if current().first else 0
    self._steps = range(keys.start_step, keys.start_step + count)
    self._folder = folder
    self._running = False

  def __enter__(self) -> "Profile":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Writes the trace, if one is running."""
    self._end()

  def before(self, step: int) -> None:
    """Starts or ends the trace; is called before each step with its number."""
    if step in self._steps and not self._running:
      jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
      self._running = True
    elif step not in self._steps:
      self._end()

  def _end(self) -> None:
    if self._running:
      self._running = False
      jax.profiler.stop_trace()
      say(f"trace in {self._folder}")
