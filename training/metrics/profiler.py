"""A trace of some steps, which xprof (TensorBoard's profiler) and Perfetto open."""

import os
import time

import jax
from etils import epath
from ml_collections import ConfigDict

from processes.watchdog import SAVING, Watchdog
from training.metrics.console import say

# Never reached: before that, the watchdog ends a run whose trace makes no progress.
_FOR_EVER_SECONDS = 7 * 24 * 3600


class Profile:
  """Traces the steps that `profile.start_step` and `profile.steps` name; a context manager.

  Only process 0 traces: the processes of one host would write to the same file. Collecting and
  writing a trace takes up to minutes, during which the others wait; no step's time includes it.
  """

  def __init__(self, keys: ConfigDict, folder: epath.Path, watch: Watchdog):
    """Traces nothing yet; `keys.start_step` is counted from 0."""
    self._steps = range(keys.start_step, keys.start_step + keys.steps)
    self._folder, self._watch = folder, watch
    self._running = False

  def __enter__(self) -> "Profile":
    """Returns itself."""
    return self

  def __exit__(self, kind, error, trace) -> None:
    """Writes the trace, if one is running."""
    self._end(together=error is None)

  def before(self, step: int) -> None:
    """Starts or ends the trace; all processes call it before each step, with its number."""
    if step in self._steps and not self._running:
      self._at("starting to trace")
      if self._watch.group.first:
        jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
      self._running = True
      self._meet()
    elif step not in self._steps:
      self._end(together=True)

  def _end(self, *, together: bool) -> None:
    if not self._running:
      return
    self._running = False
    self._at("writing the trace")
    if self._watch.group.first:
      try:
        jax.profiler.stop_trace()
        say(f"trace in {self._folder}")
      except (OSError, RuntimeError) as error:  # such as a full disk; training is worth more
        say(f"WARNING: no trace could be written to {self._folder}: {error}; training continues")
    if together:  # else the others may have failed, and never reach the barrier
      self._meet()

  def _meet(self) -> None:
    if not self._watch.group.alone:
      self._watch.group.wait("trace", timeout_seconds=_FOR_EVER_SECONDS)

  def _at(self, label: str) -> None:
    self._watch.at(label, SAVING, progress=self._progress)

  def _progress(self) -> tuple[int, float]:
    """Returns the bytes of traces, and the CPU time of this process in tens of seconds.

    A trace is assembled in memory, which takes CPU time, before it is written.
    """
    size = 0
    for folder, _, names in os.walk(str(self._folder)):
      size += sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    return size, time.process_time() // 10
